"""The torch of this environment, as far as it is known without importing it.

Importing torch takes 2 s, and 4 s where it is built for CUDA. Loading its libraries takes 0.3 s,
and is all that most operations need.
"""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """An installed torch."""

    home: Path
    """The folder of its package."""
    version: str
    cuda: str | None
    """The CUDA that it was built for, or None."""

    def load(self) -> None:
        """Load its libraries: what needs them must not find those of another torch."""
        # Those for CUDA also for a CPU: torch looks for them once, when it is first asked for GPUs.
        more = ("libc10_cuda.so", "libtorch_cuda.so") if self.cuda else ()
        for name in ("libc10.so", "libtorch_cpu.so", *more):
            ctypes.CDLL(str(self.home / "lib" / name))


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
