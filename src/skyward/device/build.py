"""The device's C++ cores: compiled on first use, and then kept in a cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs

from skyward.errors import SkywardError

SOURCES = Path(__file__).parent / "csrc"
PARTS = ("client", "worker")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-Wall", "-Wno-unused-function")
UNITS = 2
"""Into how many pieces the sources of a core are joined before they are compiled.

Nearly all of a compiler's time goes to torch's headers: 19 sources of the client one by one take
226 s of processor time, all in one piece 49 s. Two pieces keep two processors busy.
"""
# What `make check` compiles with; users' compilers may know warnings that nobody here has seen.
STRICT_FLAGS = ("-std=c++20", "-fPIC", "-fsyntax-only", "-Wall", "-Wextra", "-Werror")


class CompilerError(SkywardError):
    """The device's core could not be compiled; the message carries what the compiler said."""


def library(part: str) -> Path:
    """The compiled "client" or "worker" core for this torch, from the cache or made now."""
    import torch

    home = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    digest = _digest(_files_of(part), (*FLAGS, str(UNITS)))
    name = f"{part}-{torch.__version__}-abi{abi}-{platform.machine()}-{digest}.so"
    target = _cache() / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # One process compiles, the others wait for it.
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(part, home, target)
    return target


def check() -> int:
    """Compile the cores with strict warnings as errors; returns how many were not known to pass.

    A core that passed is not compiled again until one of its files or torch changes.
    """
    import torch

    compiler = _compiler()
    flags = (*STRICT_FLAGS, "-isystem", str(Path(torch.__file__).parent / "include"))
    checked = 0
    for part in PARTS:
        words = (*STRICT_FLAGS, str(UNITS), compiler, torch.__version__)
        stamp = _cache() / "checked" / f"{part}-{_digest(_files_of(part), words)}"
        if stamp.exists():
            continue
        with tempfile.TemporaryDirectory(prefix="sky-check-") as folder:
            _run_each([(compiler, *flags, str(unit)) for unit in _join(part, Path(folder))])
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        checked += 1
    return checked


def _files_of(part: str) -> list[Path]:
    """The source files of a part's core."""
    return [path for room in (part, "wire") for path in (SOURCES / room).iterdir()]


def _join(part: str, folder: Path) -> list[Path]:
    """Write the files to compile: each includes its share of the part's sources."""
    sources = sorted((SOURCES / part).glob("*.cpp"))
    units = [folder / f"{part}{number}.cpp" for number in range(UNITS)]
    for number, unit in enumerate(units):
        unit.write_text("".join(f'#include "{source}"\n' for source in sources[number::UNITS]))
    return units


def _run_each(commands: list[tuple[str, ...]]) -> None:
    """Run compilers side by side; raises when one of them fails."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        for done in [workers.submit(_run, *command) for command in commands]:
            done.result()


def _cache() -> Path:
    return (
        Path(os.environ.get("SKYWARD_CACHE") or platformdirs.user_cache_dir("skyward")) / "device"
    )


def _digest(sources: list[Path], words: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(" ".join(words).encode())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise CompilerError(
            "the torch device needs a C++ compiler once, and there is none; install g++ (for "
            "example `apt-get install g++`) or name one with CXX"
        )
    return compiler


def _compile(part: str, torch_home: Path, target: Path) -> None:
    compiler = _compiler()
    started = time.monotonic()
    print(
        f"skyward: compiling the torch device's {part} core, once for this torch (about a minute)",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="sky-build-", dir=target.parent) as folder:
        units = _join(part, Path(folder))
        objects = [unit.with_suffix(".o") for unit in units]
        flags = (*FLAGS, f"-I{torch_home / 'include'}")
        _run_each(
            [
                (compiler, *flags, "-c", str(unit), "-o", str(made))
                for unit, made in zip(units, objects, strict=True)
            ]
        )
        linked = Path(folder, "linked.so")
        libraries = torch_home / "lib"
        _run(
            compiler,
            "-shared",
            *map(str, objects),
            "-o",
            str(linked),
            f"-L{libraries}",
            "-ltorch_cpu",
            "-lc10",
            # Some compilers link their C++ library in; it must not mix with the one torch uses.
            "-Wl,--exclude-libs,ALL",
            f"-Wl,-rpath,{libraries}",
        )
        os.replace(linked, target)
    print(
        f"skyward: compiled in {time.monotonic() - started:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line][:20]
        raise CompilerError(
            f"compiling the torch device's core failed:\n{' '.join(command)}\n"
            + "\n".join(errors or done.stderr.splitlines()[-20:])
        )


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--check"]:
            print(f"{check()} cores compiled, the others had passed before")
        else:
            for part in PARTS:
                print(library(part))
    except CompilerError as problem:
        sys.exit(str(problem))
