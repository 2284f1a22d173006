"""The torch of this environment, as far as it is known without importing it.

Importing torch takes 2 s, and 4 s where it is built for CUDA. Loading its libraries takes 0.3 s,
and is all that most operations need.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TRIED = ((2, 11), (2, 13), (2, 15))
"""The versions of torch that the device was tried with: 2.11 by hand on a machine with a GPU; 2.13
by `make test`, whose torch is pinned; 2.15 by `make test-all`, as the newest that pip offered. The
device refuses none: its cores are compiled for the torch that is there."""


def tried() -> str:
    """Those versions, for people."""
    *others, last = (f"{major}.{minor}" for major, minor in TRIED)
    return f"torch {', '.join(others)} and {last}"


def is_tried(version: str) -> bool:
    """Whether a version of torch is among them; patch releases are those of their version."""
    return _minor(version) in TRIED


def is_in_range(version: str) -> bool:
    """Whether a version of torch is among them, or between two of them."""
    return TRIED[0] <= _minor(version) <= TRIED[-1]


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class TorchBuild:
    """An installed torch."""

    home: Path
    """The folder of its package."""
    version: str
    cuda: str | None
    """The CUDA that it was built for, or None."""

    def load(self) -> None:
        """Load its libraries as its import does, from its own folder; raises OSError."""
        folder = self.home / "lib"
        # What these bring must be there for all: MKL and cuDNN load further libraries by name.
        ctypes.CDLL(str(folder / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
        # Those for CUDA also for a CPU: torch looks for them once, when it is first asked for GPUs.
        cuda = ("libc10_cuda.so", "libtorch_cuda.so") if self.cuda else ()
        if self.cuda:
            # cuDNN finds the compiler of CUDA only if it has been loaded. It needs the driver, and
            # where there is none, there is no GPU.
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(folder / "libcaffe2_nvrtc.so"))
        for name in ("libc10.so", "libtorch_cpu.so", *cuda):
            ctypes.CDLL(str(folder / name))

    def cudnn(self) -> int | None:
        """The version of the cuDNN that has been loaded with it; None if there is none."""
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        paths = (line.split(maxsplit=5)[-1] for line in lines if "/libcudnn.so" in line)
        for path in paths:
            version = ctypes.CDLL(path).cudnnGetVersion
            version.restype = ctypes.c_size_t
            return int(version())
        return None

    def named_by_python(self) -> set[str]:
        """The words by which its Python code names operators of a GPU that it puts others for.

        There are more words than operators: torch is only imported once too often for them.
        """
        sources = (self.home / "_native").rglob("*.py")
        texts = (source.read_text(errors="replace") for source in sources)
        return {word for text in texts for word in re.findall(r"[\"']([\w.]+)[\"']", text)}


@cache
def installed() -> TorchBuild | None:
    """The torch that an import would find; None if that cannot be known without the import."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    home = Path(found.origin).parent
    try:
        told = runpy.run_path(str(home / "version.py"))
        version, others = str(told["__version__"]), (told.get("hip"), told.get("xpu"))
    except (OSError, KeyError, ImportError):
        # A torch that is made another way.
        return None
    # Of torch for other GPUs, nobody has tried what its libraries do alone.
    return None if any(others) else TorchBuild(home, version, told.get("cuda"))
