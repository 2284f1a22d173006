"""The C++ cores, of the device and of links: the wheel's, else compiled on first use and cached."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from skyward.device import toolchain
from skyward.device.toolchain import LINK, PARTS, Compiler, CompilerError
from skyward.wire import native
from skyward.wire.native import SHIPPED, cache
from skyward.worker.process import Show

__all__ = [
    "LINK",
    "PARTS",
    "CompilerError",
    "cache",
    "check",
    "is_there",
    "libraries",
    "library",
    "shipped_name",
]

# What `make check` compiles with; users' compilers may know warnings that nobody here has seen.
STRICT_FLAGS = ("-std=c++20", "-fPIC", "-fsyntax-only", "-Wall", "-Wextra", "-Werror")
KEPT = 16
"""How many cores, and how many objects, stay in the cache: for other versions of torch, of the
sources and of the compiler. All of them take less than 50 MB."""
STALE_SECONDS = 3600
"""What an older version's killed compiler has left is removed after this time."""
POLL_SECONDS = 0.2
"""How often a process looks whether another one has compiled."""


def library(part: str, show: Show | None = None) -> Path:
    """The "client" or "worker" core for this torch: from the wheel, from the cache, or made now."""
    return libraries([part], show)[0]


def libraries(parts: Sequence[str] = PARTS, show: Show | None = None) -> list[Path]:
    """The cores of some parts; those that have to be made are made side by side.

    `show` shows that they are made; without it, this process's terminal or log does.
    """
    found = {part: _place(part) for part in parts}
    missing = {part: path for part, path in found.items() if not path.exists()}
    if missing:
        cache().mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            if show is None:
                # Imported here: a device process starts sooner without it.
                from skyward.console import console_for

                console = console_for(None, several_workers=False)
                held.callback(console.close, "")
                show = console.own_line
            # One process compiles, the others wait for it.
            for part in sorted(missing):
                lock = held.enter_context(open(cache() / f"{part}.lock", "w"))
                _take(lock, part, show)
            still_missing = {part: path for part, path in missing.items() if not path.exists()}
            if still_missing:
                with _ended_by_sigterm():
                    _compile(still_missing, show)
    for path in found.values():
        _note_use(path)
    return list(found.values())


def _take(lock: TextIO, part: str, show: Show) -> None:
    """Take the lock of a core; says so if another process has it."""
    started = time.monotonic()
    words = f"for another process that compiles the torch device's {part} core"
    waits = False
    while True:
        waited = f"{time.monotonic() - started:.0f} s"
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show(f"waiting {words}: {waited}", waits)
            waits = True
            time.sleep(POLL_SECONDS)
            continue
        if waits:
            show(f"waited {waited} {words}", False)
        return


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let a SIGTERM raise `SystemExit`, unless the program does something with it.

    The compilers then end, and their files go.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _note_use(path: Path) -> None:
    if path.parent == cache():
        # The time says when it was last used. The cache may be read-only.
        with contextlib.suppress(OSError):
            os.utime(path)


def ready(part: str, torch: str) -> Path | None:
    """The core for a torch of this version, if it is there; torch need not be imported for that.

    None also if there are several, for other builds of the same version.
    """
    shipped = [_shipped(part, torch, abi) for abi in (0, 1)]
    found = [path for path in shipped if path is not None]
    found = found or [path for abi in (0, 1) if (path := _cached(part, torch, abi)).exists()]
    if len(found) != 1:
        return None
    _note_use(found[0])
    return found[0]


def is_there(part: str) -> bool:
    """Whether the core for this torch exists, so that nothing has to be compiled."""
    return _place(part).exists()


def shipped_name(part: str, torch: str, abi: int, system: str, machine: str) -> str:
    """The file of a core in a wheel; `torch` is the minor version, whose patches fit as well."""
    # The digest: a core of other sources than those beside it is not taken.
    if part == LINK:
        return native.core_name(system, machine)
    digest = native.digest(toolchain.files_of(part), ())
    return f"{part}-torch{torch}-abi{abi}-{system}-{machine}-{digest}.so"


def check() -> int:
    """Compile the cores with strict warnings as errors; returns how many were not known to pass.

    A core that passed is not compiled again until one of its files or torch changes.
    """
    compiler = _compiler()
    checked = 0
    for part in (*PARTS, LINK):
        words = (*STRICT_FLAGS, compiler.identity, compiler.torch)
        digest = native.digest(toolchain.files_of(part), words)
        stamp = cache() / "checked" / f"{part}-{digest}"
        if stamp.exists():
            continue
        toolchain.inspect(part, compiler, STRICT_FLAGS)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        checked += 1
    return checked


def _place(part: str) -> Path:
    """Where the core for the torch of this process is, or would be."""
    if part == LINK:
        return native.place()
    import torch

    version, abi = str(torch.__version__), _abi()
    return _shipped(part, version, abi) or _cached(part, version, abi)


def _shipped(part: str, torch: str, abi: int) -> Path | None:
    """The core in the installed wheel, if there is one for this torch."""
    # A nightly or a vendor's own build, such as 2.13.0a0, may differ from the release.
    released = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", torch)
    if released is None:
        return None
    system, machine = platform.system().lower(), platform.machine()
    path = SHIPPED / shipped_name(part, released[1], abi, system, machine)
    return path if path.exists() else None


def _cached(part: str, torch: str, abi: int) -> Path:
    digest = native.digest(toolchain.files_of(part), toolchain.flags_of(part))
    return cache() / f"{part}-{torch}-abi{abi}-{platform.machine()}-{digest}.so"


def _abi() -> int:
    import torch

    return int(torch.compiled_with_cxx11_abi())


def _compiler() -> Compiler:
    import torch

    command = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if command is None:
        raise CompilerError(
            "the torch device needs a C++ compiler once, and there is none; install g++ (for "
            "example `apt-get install g++`) or name one with CXX"
        )
    if os.sep in command:
        command = os.path.abspath(command)
    home = Path(torch.__file__).parent
    link = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
    if platform.system() == "Linux":
        # Some compilers link their C++ library in; it must not mix with the one torch uses.
        link.append("-Wl,--exclude-libs,ALL")
    return Compiler(
        (command,),
        home / "include",
        f"{torch.__version__} {torch.version.git_version}",
        options=(f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}",),
        link=tuple(link),
    )


def _compile(targets: dict[str, Path], show: Show) -> None:
    """Make these cores; with their locks."""
    compiler = _compiler()
    started = time.monotonic()
    what = " and ".join(targets) + (" cores" if len(targets) > 1 else " core")
    words = f"compiling the torch device's {what}, once for this torch"
    show(f"{words} (most often less than a minute)", False)

    def tick() -> None:
        show(f"{words}: {time.monotonic() - started:.0f} s", True)

    objects = cache() / "objects"
    for part in targets:
        # Who made them has been killed: else it would have the lock.
        for left in objects.glob(f"sky-{part}-*"):
            shutil.rmtree(left, ignore_errors=True)
    try:
        toolchain.make(targets, compiler, objects, tick)
    except BaseException as problem:
        show(f"the torch device's {what} was not compiled: {type(problem).__name__}", False)
        raise
    _remove_old()
    show(f"compiled the torch device's {what} in {time.monotonic() - started:.0f} s", False)


def _remove_old() -> None:
    """Leave the cores and objects used last."""
    folder, now = cache(), time.time()
    for kind in (folder.glob("*.so"), folder.glob("objects/*.o")):
        for path in sorted(kind, key=_used, reverse=True)[KEPT:]:
            path.unlink(missing_ok=True)
    for left in (*folder.glob("objects/sky-*"), *folder.glob("sky-build-*")):
        if _used(left) < now - STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process removes, too
        return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m skyward.device.build",
        description="Compile the torch device's cores for this torch, if they are not there yet.",
    )
    parser.add_argument("--check", action="store_true", help="only check them, strictly")
    wanted = parser.parse_args()
    try:
        if wanted.check:
            print(f"{check()} cores compiled, the others had passed before")
        else:
            print(*libraries((*PARTS, LINK)), sep="\n")
    except CompilerError as problem:
        sys.exit(str(problem))
