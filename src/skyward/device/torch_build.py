"""The torch of this environment, as far as it is known without importing it.

Importing torch takes 1.9 s of a processor. Loading its libraries takes 0.3 s, and is all that the
operations of a CPU need.
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
    has_gpus: bool
    """Whether it was built for GPUs."""

    def load(self) -> None:
        """Load its libraries for the CPU: what needs them must not find those of another torch."""
        for name in ("libc10.so", "libtorch_cpu.so"):
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
        has_gpus = any(told.get(name) is not None for name in ("cuda", "hip", "xpu"))
        return TorchBuild(home, str(told["__version__"]), has_gpus)
    except (OSError, KeyError, ImportError):
        # A torch that is made another way; then it is imported.
        return None
