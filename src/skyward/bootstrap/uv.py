"""uv for machines that neither have it nor can fetch it: this machine fetches and sends it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

from skyward.errors import ImageError

OLDEST = (0, 5)
"""Older versions cannot limit an index to some packages."""


def _tags(system: str, architecture: str) -> list[str]:
    if system == "Darwin":
        apple = architecture == "arm64"
        return ["macosx_11_0_arm64"] if apple else ["macosx_10_12_x86_64"]
    # The build for musl is linked statically and runs on every Linux.
    kinds = ("musllinux_1_1", "musllinux_1_2", "manylinux2014", "manylinux_2_17", "manylinux_2_28")
    return [f"{kind}_{architecture}" for kind in kinds]


async def program_for(system: str, architecture: str, libc: str) -> bytes:
    """The uv program for such a machine; this machine keeps it for the next one.

    `libc` is "gnu", "musl" or, where it is not Linux, "none".
    """
    folder = platformdirs.user_cache_path("skyward") / "uv" / f"{system}-{architecture}"
    kept = await asyncio.to_thread(_kept, folder)
    if kept is not None:
        return kept
    if (system, architecture, libc) == (platform.system(), platform.machine(), _own_libc()):
        own = await asyncio.to_thread(_own_program)
        if own is not None:
            return own
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as new:
        options = ["-q", "--disable-pip-version-check", "--no-input", "--no-deps", "-d", new]
        for tag in _tags(system, architecture):
            options += ["--platform", tag]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "pip", "download", "--only-binary=:all:", *options, "uv"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        wheels = sorted(Path(new).glob("uv-*.whl"))
        if process.returncode or not wheels:
            words = said.decode(errors="replace").strip()[-1000:]
            raise ImageError(
                f"uv for {system} on {architecture} could not be fetched here either:\n{words}"
            )
        os.replace(wheels[0], folder / wheels[0].name)
    kept = await asyncio.to_thread(_kept, folder)
    if kept is None:
        raise ImageError(f"{folder} holds no uv that can be used; delete that folder")
    return kept


def _own_libc() -> str:
    if platform.system() != "Linux":
        return "none"
    return "gnu" if platform.libc_ver()[0] == "glibc" else "musl"


def _own_program() -> bytes | None:
    """This machine's uv, if it is new enough for the scripts and no script itself."""
    found = shutil.which("uv")
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.match(r"uv (\d+)\.(\d+)", said)
    # Version managers install a script that starts the real program.
    program = Path(found).resolve().read_bytes()
    is_script = program.startswith(b"#!")
    if version is None or is_script or (int(version[1]), int(version[2])) < OLDEST:
        return None
    return program


def _kept(folder: Path) -> bytes | None:
    for wheel in sorted(folder.glob("uv-*.whl"), reverse=True):
        with contextlib.suppress(OSError, zipfile.BadZipFile, StopIteration):
            with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
                name = next(n for n in archive.namelist() if n.endswith(".data/scripts/uv"))
                return archive.read(name)
    return None
