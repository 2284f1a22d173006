"""Which uv is taken to a machine that has none."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path

import pytest

from skyward.bootstrap import uv
from skyward.errors import ImageError

MINE = (platform.system(), platform.machine())


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept here, and nothing can be fetched; programs are in a folder of their own."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    return programs


def taken(libc: str) -> bytes:
    return asyncio.run(uv.program_for(*MINE, libc))


def test_this_machines_own_goes_where_its_libc_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uv, "_own_program", lambda: b"mine")
    monkeypatch.setattr(uv, "_own_libc", lambda: "gnu")
    assert taken("gnu") == b"mine"
    with pytest.raises(ImageError, match=f"uv for {MINE[0]} on {MINE[1]} could not be fetched"):
        taken("musl")


def test_a_script_that_starts_another_uv_stays_here(offline: Path) -> None:
    script = offline / "uv"
    script.write_text("#!/bin/sh\necho uv 0.9.1\n")
    script.chmod(0o755)
    assert uv._own_program() is None


def test_what_does_not_say_that_it_is_uv_stays_here(offline: Path) -> None:
    (offline / "uv").symlink_to("/bin/echo")
    assert uv._own_program() is None
