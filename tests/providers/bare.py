"""A machine with nothing but `sh`, as a container image; and a mirror that has Python for it."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path

IMAGE = "localhost/skyward-bare:1"
MUSL_IMAGE = "localhost/skyward-musl:1"
PROGRAMS = ["sh", "cat", "chmod", "id", "ln", "ls", "mkdir", "mv"]
PROGRAMS += ["readlink", "rm", "sleep", "touch", "uname", "wc"]
"""No grep, awk, sed, find, tar, gzip or env, and no Python."""
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_RELEASE = "20260101"
_DOWNLOADS = "https://github.com/astral-sh/python-build-standalone/releases/download"
_UNUSED = {"site-packages", "test", "tests", "__pycache__", "idlelib", "tkinter", "ensurepip"}


def import_image() -> None:
    """Give it to the Podman that the environment names."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder in ("tmp", "etc/ssl/certs", "proc", "dev", "sys", "run"):
            entry = tarfile.TarInfo(folder)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for program in PROGRAMS:
            tar.add(Path(shutil.which(program) or program).resolve(), f"bin/{program}")
        # Python for any machine brings its libraries; this machine's own needs those around it.
        python = Path(sys.base_prefix)
        used = [*map(shutil.which, PROGRAMS), sys.executable, *python.rglob("lib-dynload/*.so")]
        for library in _libraries(str(each) for each in used if each):
            place = library if not library.is_relative_to(python) else Path("/lib", library.name)
            tar.add(library.resolve(), str(place).lstrip("/"))
        if AUTHORITIES.exists():
            tar.add(AUTHORITIES.resolve(), str(AUTHORITIES).lstrip("/"))
    _import(packed.getvalue(), IMAGE)


def remove_image() -> None:
    """Remove it, with what was built for it."""
    subprocess.run(["podman", "rmi", "-f", IMAGE, MUSL_IMAGE], check=False, capture_output=True)
    filters = ["--filter", "label=skyward.cache"]
    listed = subprocess.run(["podman", "volume", "ls", "-q", *filters], capture_output=True)
    for name in listed.stdout.decode().split():
        subprocess.run(["podman", "volume", "rm", "-f", name], check=False, capture_output=True)


def _libraries(programs: Iterable[str]) -> set[Path]:
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    found = {Path(each) for each in re.findall(r"(/\S+) \(0x", listed)}
    # The other parts of the C library, which every machine with this one has.
    (libc,) = (each for each in found if each.name == "libc.so.6")
    parts = "libpthread.so.0 libdl.so.2 librt.so.1 libutil.so.1 libresolv.so.2 libgcc_s.so.1"
    return found | {each for name in parts.split() if (each := libc.with_name(name)).exists()}


def mirror(folder: Path) -> dict[str, str]:
    """This machine's Python, packed as uv's mirrors have it; the variables that lead uv there."""
    version, minor = platform.python_version(), sysconfig.get_python_version()
    name = (
        f"cpython-{version}+{_RELEASE}-{platform.machine()}-unknown-linux-gnu-install_only.tar.gz"
    )
    archive = folder / _RELEASE / name
    archive.parent.mkdir()
    base = Path(sys.base_prefix)
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(base / f"bin/python{minor}", f"python/bin/python{minor}")
        tar.add(base / f"lib/python{minor}", f"python/lib/python{minor}", filter=_wanted)
    major, small, patch = version.split(".")
    described = {
        "name": "cpython",
        "arch": {"family": platform.machine(), "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": int(major),
        "minor": int(small),
        "patch": int(patch),
        "prerelease": "",
        "url": f"{_DOWNLOADS}/{_RELEASE}/{name.replace('+', '%2B')}",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "variant": None,
        "build": _RELEASE,
    }
    key = f"cpython-{version}-linux-{platform.machine()}-gnu"
    # uv knows the checksums of the real archives, so it has to be told of this one.
    (folder / "downloads.json").write_text(json.dumps({key: described}))
    return {
        "UV_PYTHON_INSTALL_MIRROR": folder.as_uri(),
        "UV_PYTHON_DOWNLOADS_JSON_URL": (folder / "downloads.json").as_uri(),
    }


def _wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    unused = _UNUSED.intersection(entry.name.split("/")) or entry.name.endswith(".a")
    return None if unused else entry


def import_image_without_glibc(folder: Path) -> bool:
    """A machine with a static shell and musl, as far as apt has them; whether it could be."""
    fetch = ["apt-get", "-qq", "download", "busybox-static", "musl"]
    if subprocess.run(fetch, cwd=folder, check=False, capture_output=True).returncode:
        return False
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "unpacked")], check=True)
    (loader,) = folder.glob("unpacked/lib/ld-musl-*")
    (libc,) = folder.glob("unpacked/**/*-musl/libc.so")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder / "unpacked/bin/busybox", "bin/busybox")
        tar.add(libc, f"lib/{loader.name}")
        for program in PROGRAMS:
            entry = tarfile.TarInfo(f"bin/{program}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        entry = tarfile.TarInfo("tmp")
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(entry)
    _import(packed.getvalue(), MUSL_IMAGE)
    return True


def _import(packed: bytes, name: str) -> None:
    command = ["podman", "import", "-q", "-c", "ENV PATH=/bin", "-", name]
    subprocess.run(command, input=packed, check=True, capture_output=True)
