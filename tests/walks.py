"""The walks: the files of the package that a client enters, measured, and CONTRIBUTING's list.

Run as a script, it walks and prints what it entered, as JSON. A process of its own has no thread
that was there before the profile, and no pool of another test in the background.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import skyward as sky
from skyward.device.build import CompilerError

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
PACKAGE = Path(sky.__file__).parent
SECTION = re.compile(r"(?<=<!-- walks -->\n\n).*?(?=\n\n<!-- /walks -->)", re.DOTALL)
ENTRY = re.compile(r"^ {4}(\w.*?), \d+ files[:.](.*(?:\n {8}.*)*)", re.MULTILINE)
WIDTH = 160

CALL = "a call"
LOCAL = "the start of a local pool"
SSH = "over SSH"
KUBERNETES = "on Kubernetes"
LEAVING = "leaving"
ATTACH = "attach"
SAVE = "save"
LOAD = "load"
OPERATION = "an operation of the device"
WALKS = (CALL, LOCAL, SSH, KUBERNETES, LEAVING, ATTACH, SAVE, LOAD, OPERATION)
LIKE_LOCAL = (SSH, KUBERNETES, ATTACH)
"""Of these, the page only says in what they differ from the start of a local pool."""

Entered = dict[str, list[str]]
"""The files of walks, each in the order in which they were entered first."""

TIMES = 3
"""How often walks are walked before a file is new, and for the page."""


def check(walk: str = LOCAL, provider: sky.Provider | None = None) -> None:
    """Fail if a walk enters a file that the page does not list; or write the page, if told to.

    A walk may enter fewer: what threads do meanwhile differs a little from time to time.
    """
    if os.environ.get("SKYWARD_WALKS") == "write":
        write([measure(walk, provider) for _ in range(TIMES)])
        return
    listed = read()
    always: set[tuple[str, str]] | None = None
    for _ in range(TIMES):
        entered = measure(walk, provider)
        new = {(each, file) for each in entered for file in entered[each]}
        new -= {(each, file) for each in listed for file in listed[each]}
        always = new if always is None else always & new
        if not always:
            return
    problems = [
        f"{each} enters {' '.join(names)}, {len(entered[each])} files and not {len(listed[each])}"
        for each in entered
        if (names := sorted(file for which, file in always or () if which == each))
    ]
    raise AssertionError("; ".join(problems) + "; if that has to be, write them with `make walks`")


def measure(walk: str, provider: sky.Provider | None) -> Entered:
    """The start of a pool of the provider's; without a provider, all walks but those of others."""
    done = subprocess.run(
        [sys.executable, __file__, walk],
        input=pickle.dumps(provider),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    found: Entered = json.loads(done.stdout)
    return found


# The page.


def read() -> Entered:
    """The walks as the page has them."""
    found: Entered = {}
    told = SECTION.search(PAGE.read_text())
    assert told, f"{PAGE.name} has no section of walks"
    for walk, text in ENTRY.findall(told[0]):
        if walk in LIKE_LOCAL:
            more, _, less = text.replace("+", "", 1).partition("-")
            without = _files(less)
            found[walk] = [file for file in found[LOCAL] if file not in without] + _files(more)
        else:
            found[walk] = _files(text)
    return found


def write(measured: Sequence[Entered]) -> None:
    """Write to the page what any of the measurements has entered."""
    walks = {walk: list[str]() for walk in WALKS} | read()
    for files in walks.values():
        files[:] = [file for file in files if exists(file)]
    for walk in measured[0]:
        walks[walk] = list(dict.fromkeys(file for each in measured for file in each[walk]))
    lines = []
    for walk, files in walks.items():
        text = _text(files)
        if walk in LIKE_LOCAL:
            more = [file for file in files if file not in walks[LOCAL]]
            less = [file for file in walks[LOCAL] if file not in files]
            text = f"+ {_text(more)}" + (f" - {_text(less)}" if less else "")
        lines += textwrap.wrap(
            f"{walk}, {len(files)} files" + (f": {text}" if text else "."),
            WIDTH,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
    PAGE.write_text(SECTION.sub("\n".join(lines), PAGE.read_text()))


def exists(file: str) -> bool:
    """Whether the package has a file of a walk."""
    return (PACKAGE / f"{file}.py").exists()


def _text(files: Sequence[str]) -> str:
    """The files in order: `functions > nodes: fleet node > pool`."""
    return " > ".join(
        (f"{folder}: " if folder else "") + " ".join(Path(file).name for file in run)
        for folder, run in itertools.groupby(files, lambda file: file.rpartition("/")[0])
    )


def _files(text: str) -> list[str]:
    """The opposite of `_text`."""
    found = []
    for run in text.split(">"):
        folder, _, names = run.rpartition(":")
        found += [f"{folder.strip()}/{name}".lstrip("/") for name in names.split()]
    return found


# The script.

_entered: dict[str, None] | None = None
"""The files of the walk that goes on."""
_walked: dict[str, list[dict[str, None]]] = {}
"""What each time of each walk has entered."""
_BELOW = f"{PACKAGE}{os.sep}"


def _note(frame: types.FrameType, event: str, argument: object) -> None:
    """The profile of all threads; what an import runs is not entered, nor the table of names."""
    entered, file = _entered, frame.f_code.co_filename
    if entered is None or event != "call" or file in entered or not file.startswith(_BELOW):
        return
    if file == sky.__file__:
        return
    caller: types.FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            return
        caller = caller.f_back
    entered[file] = None


@contextlib.contextmanager
def walking(walk: str) -> Iterator[None]:
    """Note the files that any thread enters meanwhile."""
    global _entered
    _entered = entered = {}
    sys.setprofile(_note)
    try:
        yield
    finally:
        sys.setprofile(None)
        _entered = None
    _walked.setdefault(walk, []).append(entered)


@sky.function
def nothing() -> None:
    return None


def start(walk: str, provider: sky.Provider | None = None) -> None:
    """Start a pool, call and leave."""
    with contextlib.ExitStack() as pool:
        with walking(walk):
            compute = pool.enter_context(sky.Compute(provider))
        nothing() >> compute
        for _ in range(20):
            with walking(CALL):
                nothing() >> compute
        with walking(LEAVING):
            pool.close()


def attach_and_operate() -> None:
    """Attach to a kept pool, and use a device of it."""
    import torch

    # A test that is interrupted leaves it for five minutes.
    with sky.Compute(name="walked", keep=300):
        pass
    for _ in range(2):
        with contextlib.ExitStack() as pool:
            with walking(ATTACH):
                compute = pool.enter_context(sky.attach("walked"))
    with contextlib.suppress(CompilerError), sky.attach("walked") as compute:
        here = torch.ones(4, device=compute.device("cpu"))
        for _ in range(20):
            with walking(OPERATION):
                (here + 1).sum().item()
    sky.attach("walked").down(force=True)


def save_and_load(folder: Path) -> None:
    """Save a new model and load it."""
    import torch

    store = sky.ModelStore(folder)
    for _ in range(2):
        with walking(SAVE):
            store.save_model(torch.nn.Linear(4, 4), "walked")
        with walking(LOAD):
            store.load_model("walked", torch.nn.Linear(4, 4))


def main() -> None:
    walk, provider = sys.argv[1], pickle.load(sys.stdin.buffer)
    threading.setprofile(_note)
    # Short, because Unix sockets end up below it.
    with tempfile.TemporaryDirectory(prefix="skyw-", dir="/tmp") as folder:
        os.environ.update(SKYWARD_STATE=f"{folder}/state", TMPDIR=folder)
        tempfile.tempdir = folder
        start(walk, provider)
        if provider is None:
            start(walk)
            attach_and_operate()
            save_and_load(Path(folder, "store"))
        else:
            del _walked[CALL], _walked[LEAVING]
    json.dump({walk: _names(times) for walk, times in _walked.items()}, sys.stdout)


def _names(times: Sequence[dict[str, None]]) -> list[str]:
    """The files that were entered every time, as the page calls them."""
    always = [file for file in times[-1] if all(file in each for each in times)]
    return [file.removeprefix(_BELOW).removesuffix(".py") for file in always]


if __name__ == "__main__":
    main()
