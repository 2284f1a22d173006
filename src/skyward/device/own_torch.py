"""The device process's own torch: its libraries at first, and Python's part when it is needed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from skyward.device import build, operators, properties, torch_build
from skyward.device.captures import Captures
from skyward.device.graphs import runner as graphs
from skyward.device.torch_build import TorchBuild
from skyward.worker.process import Show

Import = ctypes.CFUNCTYPE(None)
ImportOperator = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t
)


def available() -> dict[str, int]:
    """The kinds of torch device here, and how many of each."""
    import torch

    kinds = {"cpu": 1}
    if torch.cuda.is_available():
        kinds["cuda"] = torch.cuda.device_count()
    if torch.backends.mps.is_available():
        kinds["mps"] = 1
    return kinds


def choose(kind: str) -> str:
    """The real device for "cuda", "cuda:1" or "auto"; an error names the devices of the node."""
    kinds = available()
    if kind == "auto":
        kind = next((k for k in ("cuda", "mps") if k in kinds), "cpu")
    name, _, index = kind.partition(":")
    if name not in kinds or not (index or "0").isdigit() or int(index or 0) >= kinds[name]:
        has = ", ".join(f"{count} x {k}" if count > 1 else k for k, count in kinds.items())
        raise LookupError(
            f"the node has no {kind!r}, it has {has}; ask for one of these, or set "
            "SKYWARD_DEVICE=cpu to try GPU code without one"
        )
    return name if name == "cpu" else f"{name}:{index or 0}"


class _About(ctypes.Structure):
    """What the core says of torch's libraries; `csrc/worker/api.cpp` has the same."""

    gpus: int
    instructions: bytes
    _fields_ = (("gpus", ctypes.c_int64), ("instructions", ctypes.c_char * 64))


class OwnTorch:
    """The core with the torch that it calls, for one device of this machine."""

    def __init__(self, kind: str, show: Show) -> None:
        """`show` shows that the core is compiled, if it is."""
        self._programs: graphs.Programs | None = None
        # The core keeps only their addresses.
        self._import = Import(self._import_apart)
        self._import_operator = ImportOperator(_bring)
        if not self._load_libraries(kind):
            with _uncollected():
                self.kind = choose(kind)
            self.core = ctypes.CDLL(str(build.library("worker", show)))
            self.properties = properties.read(self.kind)
            self._programs = graphs.install(self.kind)
        self.core.sky_worker_import_operator(self._import_operator)
        if self.kind.startswith("cuda"):
            self._captures = Captures(self.core, self.kind, self.import_whole)

    def _load_libraries(self, kind: str) -> bool:
        """Do without importing torch, if that is possible; returns whether it was."""
        torch = torch_build.installed()
        core = None if torch is None else build.ready("worker", torch.version)
        if torch is None or core is None or platform.system() != "Linux":
            return False
        try:
            torch.load()
            self.core = ctypes.CDLL(str(core))
        except OSError:
            # The import knows of libraries that are elsewhere.
            return False
        found = self._described(kind, torch)
        if found is None:
            return False
        self.kind, self.properties = found
        names = torch.named_by_python() if self.kind != "cpu" else set()
        self.core.sky_worker_import_later(self._import, "\n".join(names).encode())
        return True

    def _described(self, kind: str, torch: TorchBuild) -> tuple[str, dict[str, Any]] | None:
        """The real device and its properties; None if torch has to be imported to know them."""
        about = _About()
        self.core.sky_worker_about(ctypes.byref(about))
        gpus = range(about.gpus)
        if kind == "cpu" or (kind == "auto" and not gpus):
            return "cpu", properties.of_host("cpu", torch.version, about.instructions.decode())
        name, _, index = ("cuda:0" if kind == "auto" else kind).partition(":")
        if name != "cuda" or not (index or "0").isdigit() or int(index or 0) not in gpus:
            return None  # whoever imports torch says what there is
        real = f"cuda:{index or 0}"
        cudnn = torch.cudnn()
        if cudnn is None or self.core.sky_worker_try(real.encode()):
            return None  # the import knows, or says why
        found = properties.of_gpu(int(index or 0), torch, cudnn)
        return None if found is None else (real, found)

    def import_whole(self) -> None:
        """Import Python's part, if that has not been done."""
        if self._programs is None:
            self._import_apart()

    def _import_apart(self) -> None:
        _on_another_thread(self._import_now, "skyward-import-torch")

    def _import_now(self) -> None:
        if self._programs is not None:
            return
        try:
            with _uncollected():
                self._programs = graphs.install(self.kind)
        except Exception:
            # The client hears that the operator is not there; why, is in the log.
            os.write(2, f"torch cannot be imported: {traceback.format_exc()}\n".encode())

    def forget(self) -> None:
        """Forget the graphs of the client that has left."""
        if self._programs is not None:
            self._programs.forget()


def _on_another_thread(work: Callable[[], None], name: str) -> None:
    """Import something: the thread that serves the client has switched gradients off."""
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def _bring(wanted: bytes, message: Any, size: int) -> int:
    """Import what registers an operator; called by the core, which gives lines."""
    name, overload, *modules = wanted.decode().splitlines()
    problems = ["the import ended"]

    def work() -> None:
        problems[0] = operators.bring(name, overload, modules)

    _on_another_thread(work, "skyward-import-operator")
    words = problems[0].encode()[: size - 1]
    ctypes.memmove(message, words + b"\0", len(words) + 1)
    return int(bool(words))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Import torch here: it takes 1.68 s so instead of 1.85 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
