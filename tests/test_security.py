"""What docs/security.md promises: that its tests are there, and those that belong nowhere else."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from skyward import kernel
from skyward.errors import PoolError
from skyward.files.volumes import NodeVolume
from skyward.plugins.frameworks import ray_keeper
from skyward.providers.local import LocalMachine

ROOT = Path(__file__).parents[1]

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
        (stand_in("", 1, "no connection"), "nothing was looked up: no connection"),
        ([*stand_in("")[:-1], SLEEPS], "nothing was looked up: no answer within"),
    ],
    ids=["known", "unknown", "no service", "no answer"],
)
def test_an_audit_without_its_service_says_so_and_passes(
    tool: Any, command: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SLEEPS in command:
        monkeypatch.setattr(tool("audit"), "SECONDS", 0.01)
    assert tool("audit").main(command).startswith(said)
