"""What docs/security.md promises: that its tests are there, and those that belong nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import skyward as sky
from skyward import kernel
from skyward.bootstrap.recipe import assignments, script
from skyward.cli.pools import _export
from skyward.errors import PoolError
from skyward.files.transfer import arriving
from skyward.files.volumes import NodeVolume
from skyward.nodes import records
from skyward.nodes.kept import way_back
from skyward.plugins.frameworks import ray_keeper
from skyward.providers.local import LocalMachine
from skyward.providers.on_node import keeper, relay
from skyward.wire.handshake import Authority

from .conftest import wait_until, worker_processes

ROOT = Path(__file__).parents[1]

PAGE = ROOT / "docs/security.md"
WITHOUT_TESTS = ("What is trusted", "What is not protected")


def test_every_claim_of_the_page_names_tests_that_are_there() -> None:
    text = PAGE.read_text()
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE))
    claims = 0
    for title in {*sections} - {*WITHOUT_TESTS}:
        for claim in re.findall(r"^- .*(?:\n  .*)*", sections[title], re.MULTILINE):
            assert re.search(r"\[\^[\w-]+\]$", claim), f"without a test: {claim}"
            claims += 1
    assert claims > 40
    assert {*WITHOUT_TESTS} <= {*sections}
    named = dict(re.findall(r"^\[\^([\w-]+)\]: (.*)$", text, re.MULTILINE))
    assert {*re.findall(r"\[\^([\w-]+)\](?!:)", text)} == {*named}
    for words in named.values():
        for group in words.split("; "):
            file, *tests = re.findall("`([^`]+)`", group)
            assert tests, words
            source = (ROOT / file).read_text()
            for name in tests:
                assert re.search(rf"^ *def {name}\(", source, re.MULTILINE), (file, name)


# Another user of the same machine, who makes a name below /tmp first.


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, where everybody may make any name."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def theirs(path: Path) -> Path:
    """Make a folder there as somebody else would: as another user, or by a link at least."""
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir()
    if os.geteuid() == 0:
        elsewhere.rename(path)
        os.chown(path, 65534, 65534)
    else:
        path.symlink_to(elsewhere)
    return path


def test_a_folder_that_somebody_else_has_made_first_is_nobodys_own(shared: Path) -> None:
    (shared / "own").mkdir()
    (shared / "link").symlink_to("own")
    (shared / "file").touch()
    assert kernel.is_own_folder(shared / "own")
    for each in (shared / "link", shared / "file", shared / "none", theirs(shared / "theirs")):
        assert not kernel.is_own_folder(each)


def test_volumes_note_nothing_in_a_folder_of_somebody_else(shared: Path) -> None:
    """The note would have been written through a link, into a file of this user's."""
    victim = shared / "victim"
    victim.write_text("mine")
    volume = NodeVolume("/usr", str(shared / "at"), read_only=True)
    (theirs(volume._place.parent) / volume._place.name).symlink_to(victim)
    with pytest.raises(PoolError, match=r"belongs to somebody else, .*remove it, or set TMPDIR"):
        volume.open(lambda *_: None)
    assert victim.read_text() == "mine"


def test_no_process_is_killed_because_somebody_else_names_it(shared: Path) -> None:
    """Who looks for the machines of a pool passes over folders of others."""
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        (theirs(shared / "sky-0123456789ab-0.x") / f"{bystander.pid}.group").touch()
        for machine in LocalMachine.of("0123456789ab"):
            asyncio.run(machine.destroy())
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_ray_does_not_start_in_a_folder_of_somebody_else(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ray_keeper", str(theirs(shared / "skyray")), "--head"])
    monkeypatch.setattr(ray_keeper, "_start", lambda *_: pytest.fail("Ray was started"))
    with pytest.raises(SystemExit, match="belongs to somebody else"):
        ray_keeper.main()


def test_a_node_has_no_folder_that_somebody_else_has_made(tmp_path: Path) -> None:
    pool = uuid.uuid4().hex[:12]
    (tmp_path / "elsewhere").mkdir()
    first = Path("/tmp", f"sky.{pool}.0")
    first.symlink_to(tmp_path / "elsewhere")
    unset = dict.fromkeys(("key", "want", "apt", "includes"), "")
    facts = {"pool": pool, "node": "0", "wheel": "none", "given_python": sys.executable}
    text = script("paths", "folder", prelude=assignments(**unset, **facts))
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    try:
        said = subprocess.run(
            ["sh"], input=text, env=home, capture_output=True, check=True
        ).stdout.decode()
        made = Path(re.findall("^@sky folder (.*)$", said, re.MULTILINE)[0])
        try:
            assert made.parent != first.parent
            assert stat.S_IMODE(made.stat().st_mode) == 0o700
        finally:
            shutil.rmtree(made)
    finally:
        first.unlink()
    assert not any((tmp_path / "elsewhere").iterdir())


def test_commands_reach_a_keeper_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command's input has the key of the node, and its name can be known."""
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    for module in (keeper, relay):
        monkeypatch.setattr(module, "PLACES", (str(first), str(second)))
    second.mkdir()
    taken = first / keeper.folder_name()
    taken.mkdir(parents=True)
    (taken / "s").touch()
    # Nobody but its owner can remove it below /tmp.
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    status = os.lstat

    def owned_by_another(path: Any) -> Any:
        found = status(path)
        return os.stat_result((*found[:4], 65534, *found[5:])) if str(path) == str(taken) else found

    monkeypatch.setattr(os, "lstat", owned_by_another)
    made = keeper.Keeper(keeper.folder_name(), 0, {"pool": "p", "idle": 1}, {})
    with made.listen():
        assert Path(made.folder).parent == second
        assert relay.keeper_socket() == f"{made.folder}/s"


# A pool whose user lets everybody read and write new files.

SECRET = "what-nobody-else-may-read"


@pytest.fixture(scope="module")
def kept() -> Iterator[tuple[sky.Compute, Path]]:
    """A pool over TCP that stays, and the folder where it writes."""
    folder = Path(tempfile.mkdtemp(prefix="skys-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("TMPDIR", "XDG_RUNTIME_DIR", "SKYWARD_STATE"):
            (folder / variable).mkdir()
            (folder / variable).chmod(0o1777)
            patch.setenv(variable, str(folder / variable))
        folder.chmod(0o755)
        patch.setattr("tempfile.tempdir", None)
        mask = os.umask(0)
        try:
            compute = sky.Compute(
                sky.Local(transport="tcp"),
                name="kept",
                keep=True,
                image=sky.Image(env={"SECRET": SECRET}),
                options=sky.Options(console=False),
            )
            with compute:
                assert secret() >> compute == SECRET
                os.umask(mask)
                yield compute, folder
        finally:
            os.umask(mask)
            sky.attach("kept").down(force=True)
            shutil.rmtree(folder)


@sky.function
def secret() -> str:
    print("a line for the logs")
    return os.environ["SECRET"]


@sky.function
def result_that_runs() -> object:
    class Runs:
        def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
            return os.getpid, ()

    return Runs()


def test_nobody_else_can_open_what_a_pool_writes(kept: tuple[sky.Compute, Path]) -> None:
    _, folder = kept
    kinds = set()
    for path in folder.glob("*/**/*"):
        status = path.lstat()
        kinds.add(stat.S_IFMT(status.st_mode))
        closed = [each for each in path.parents[:-3] if not each.stat().st_mode & 0o077]
        assert closed or not status.st_mode & 0o077 or path.is_symlink(), path
        if stat.S_ISSOCK(status.st_mode):
            assert stat.S_IMODE(status.st_mode) == 0o600
    assert {stat.S_IFREG, stat.S_IFDIR, stat.S_IFSOCK} <= kinds


def test_no_key_is_in_a_command_line_an_environment_or_a_file_but_the_record(
    kept: tuple[sky.Compute, Path],
) -> None:
    _, folder = kept
    files = [each for each in folder.glob("*/**/*") if each.is_file()]
    assert len(files) > 3
    with_keys = [each.name for each in files if b"PRIVATE KEY" in each.read_bytes()]
    assert with_keys == ["kept.json"]
    assert not any(SECRET.encode() in each.read_bytes() for each in files)
    processes = worker_processes()
    assert len(processes) > 1
    for process in processes:
        line, variables = " ".join(process.cmdline()), " ".join(process.environ().values())
        assert "PRIVATE KEY" not in line + variables
        assert SECRET not in line + variables


def test_a_key_shows_in_no_message() -> None:
    """Tracebacks and debuggers show values."""
    authority = Authority("pool")
    for holder in (authority, authority.save(), authority.issue("client")):
        assert "PRIVATE KEY" not in repr(holder)


def test_a_job_on_the_pool_gets_no_key_to_make_nodes_with(kept: tuple[sky.Compute, Path]) -> None:
    record = records.read("kept")
    assert record.authority is not None
    _, private = way_back(record)
    (text,) = private.values()
    assert record.authority[1].strip() not in text.replace("\\n", "\n")
    theirs = records.decode(text.encode(), "a job")
    assert theirs.authority is None
    assert theirs.credentials == record.credentials


def test_the_page_has_no_keys_and_no_variables(kept: tuple[sky.Compute, Path]) -> None:
    compute, _ = kept
    base, _, token = compute.ui().partition("/?")

    def opened(path: str) -> Any:
        return urllib.request.urlopen(f"{base}{path}?{token}", timeout=100)

    with opened("/") as page, opened("/metrics") as numbers, opened("/stream") as stream:
        said = page.read() + numbers.read()
        secret() >> compute
        while b"a line for the logs" not in said:
            said += stream.readline()
    assert b'"kept"' in said
    assert b"PRIVATE KEY" not in said
    assert SECRET.encode() not in said


def test_a_node_can_run_code_in_its_client(kept: tuple[sky.Compute, Path]) -> None:
    """Nothing keeps it from doing so, and the page says so: results are pickles."""
    compute, _ = kept
    assert result_that_runs() >> compute == os.getpid()


# Files that others give.


def test_an_exported_record_is_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "record").touch(0o644)
    for name in ("record", "new"):
        with click.Context(click.Command("attach")):
            _export(b"keys", tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_folder_that_is_copied_gets_no_rights_beyond_the_usual(tmp_path: Path) -> None:
    """The other end says which."""
    with arriving(tmp_path, "new", 0o7755):
        pass
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o755


NO_PICKLES = ("bootstrap", "files", "page", "providers", "store", "wire", "worker/services")
LOADER = re.compile(
    r"^\s*(?:import|from) (?:pickle|cloudpickle|marshal|shelve|dill|joblib)\b", re.M
)


def test_no_pickle_is_read_in_the_store_on_the_way_or_before_a_peer_is_known() -> None:
    """`torch.load` reads tensors and plain values alone."""
    source = ROOT / "src/skyward"
    files = [each for folder in NO_PICKLES for each in (source / folder).rglob("*.py")]
    files += [source / "state/owner.py", source / "worker/agent.py", source / "nodes/host.py"]
    texts = {each: each.read_text() for each in files}
    assert [each for each, text in texts.items() if LOADER.search(text)] == []
    loads = [each for text in texts.values() for each in re.findall(r"torch\.load\(.*", text)]
    assert loads
    assert all("weights_only=True" in each for each in loads)
    assert LOADER.search((source / "state/shared.py").read_text()), "the expression finds them"


# What a release is installed with.


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the folder tools."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


def test_a_release_is_pinned_by_hash_to_the_versions_that_are_tested() -> None:
    text = (ROOT / "requirements-release.txt").read_text()
    blocks = [each for each in re.split(r"\n(?=\w)", text) if "==" in each]
    assert all("--hash=sha256:" in each for each in blocks)
    pinned = dict(re.match(r"([\w.-]+)==([^\s;]+)", each).groups() for each in blocks)  # type: ignore[union-attr]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # Frameworks are the user's choice, and tools of development are none of a release's.
    free = {"jax", "keras", "huggingface", "sklearn", "trackers", "dev"}
    wanted = {*project["dependencies"], *(w for e in {*extras} - free for w in extras[e])}
    names = {re.split(r"[^\w.-]", each)[0] for each in wanted} - {"torch"}
    assert names <= {*pinned}, "run: make lock"
    tested = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints-dev.txt").read_text(), re.M)
    )
    assert {each: pinned[each] for each in names & {*tested}} == {
        each: tested[each] for each in names & {*tested}
    }, "run: make lock"
    assert "torch" not in pinned
    assert "://" not in text, "an index that is not everybody's"


SLEEPS = "import time; time.sleep(600)"


def stand_in(says: Any, code: int = 0, error: str = "") -> list[str]:
    """A command that answers as pip-audit does."""
    text = says if isinstance(says, str) else json.dumps({"dependencies": says})
    program = f"import sys; print({text!r}); print({error!r}, file=sys.stderr); sys.exit({code})"
    return ["lock.txt", "--", sys.executable, "-c", program]


def test_a_known_vulnerability_fails_and_says_what_to_take(tool: Any) -> None:
    flaw = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
    with pytest.raises(SystemExit, match=r"a 1\.0: PYSEC-1, mended in 2\.0\n.*make lock"):
        tool("audit").main(stand_in([{"name": "a", "version": "1.0", "vulns": [flaw]}], 1))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (stand_in([{"name": "a", "version": "1", "vulns": []}]), "1 packages, without known"),
        (
            stand_in([{"name": "a", "skip_reason": "not found"}]),
            "nothing was looked up: of these 1",
        ),
        *(
            (stand_in("", 1, problem), f"nothing was looked up: {problem}")
            for problem in (
                "Could not connect to PyPI's vulnerability feed",
                "[Errno 111] Connection refused",
                "dns error: Temporary failure in name resolution",
                "Read timed out. (read timeout=15)",
                "ProxyError('Unable to connect to proxy')",
                "503 Server Error: Service Unavailable for url",
            )
        ),
        ([*stand_in("")[:-1], SLEEPS], "nothing was looked up: no answer within"),
    ],
)
def test_an_audit_without_its_service_says_so_and_passes(
    tool: Any, command: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SLEEPS in command:
        monkeypatch.setattr(tool("audit"), "SECONDS", 0.01)
    assert tool("audit").main(command).startswith(said)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (stand_in("", 2, "pip-audit: error: unrecognized arguments: --bogus"), "--bogus"),
        (stand_in("", 1, "the hash of a is invalid"), "hash of a"),
        (stand_in("", 139), "ended with 139"),
        (stand_in("[", 0), "ended with 0"),
        (stand_in([{"name": "a", "version": "1", "vulns": []}], 1, "half of it"), "half of it"),
    ],
    ids=["usage", "lock", "crash", "no answer", "half an answer"],
)
def test_an_audit_that_fails_for_another_reason_fails(
    tool: Any, command: list[str], why: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(why)):
        tool("audit").main(command)


def test_an_audit_without_an_answer_leaves_no_process(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(tool("audit"), "SECONDS", 1.0)
    starts_another = f"(echo there; exec sleep 100) >{shlex.quote(str(held))} & wait"
    tool("audit").main(["lock.txt", "--", "sh", "-c", starts_another])

    def ended() -> bool:
        with contextlib.suppress(BlockingIOError):
            return not os.read(reader, 100)
        return False

    wait_until(ended)
    os.close(reader)
