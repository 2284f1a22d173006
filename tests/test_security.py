"""What docs/security.md promises: that its tests are there, and those that belong nowhere else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyward import kernel
from skyward.errors import PoolError
from skyward.files.volumes import NodeVolume
from skyward.plugins.frameworks import ray_keeper
from skyward.providers.local import LocalMachine

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
