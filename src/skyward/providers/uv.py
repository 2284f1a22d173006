"""uv for machines that have neither it nor a way to get it: fetched here, carried there."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

from skyward.errors import ImageError


def _tags(system: str, architecture: str) -> list[str]:
    if system == "Darwin":
        apple = architecture == "arm64"
        return ["macosx_11_0_arm64"] if apple else ["macosx_10_12_x86_64"]
    # The one for musl is linked statically and runs on every Linux.
    kinds = ("musllinux_1_1", "musllinux_1_2", "manylinux2014", "manylinux_2_17", "manylinux_2_28")
    return [f"{kind}_{architecture}" for kind in kinds]


async def program_for(system: str, architecture: str) -> bytes:
    """The uv program for such a machine; kept here for the next one."""
    folder = platformdirs.user_cache_path("skyward") / "uv" / f"{system}-{architecture}"
    kept = await asyncio.to_thread(_kept, folder)
    if kept is not None:
        return kept
    own = shutil.which("uv")
    if own and (platform.system(), platform.machine()) == (system, architecture):
        return await asyncio.to_thread(Path(own).read_bytes)
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


def _kept(folder: Path) -> bytes | None:
    for wheel in sorted(folder.glob("uv-*.whl"), reverse=True):
        with contextlib.suppress(OSError, zipfile.BadZipFile, StopIteration):
            with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
                name = next(n for n in archive.namelist() if n.endswith(".data/scripts/uv"))
                return archive.read(name)
    return None
