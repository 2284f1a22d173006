"""CUDA graphs: what the worker's core gives a GPU is recorded, and later run again at once."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable
from typing import Any


class Captures:
    """The graphs of one GPU, by their numbers. The core calls it, on its own thread."""

    def __init__(self, core: ctypes.CDLL, device: str, import_torch: Callable[[], None]) -> None:
        self._device, self._import_torch = device, import_torch
        self._graphs: dict[int, Any] = {}
        self._last = 0
        self._stream: Any = None
        self._current: tuple[Any, Any] | None = None
        """The graph that is made now, and what has its stream be the current one."""
        # The core keeps only their addresses.
        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_int)(self._begin),
            ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int)(self._end),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(self._run),
            ctypes.CFUNCTYPE(None, ctypes.c_uint64)(self._drop),
        )
        core.sky_worker_use_captures(*self._functions)

    def _begin(self) -> int:
        try:
            self._import_torch()
            import torch

            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self._device)
            graph: Any = torch.cuda.CUDAGraph()
            current: Any = torch.cuda.stream(self._stream)
            current.__enter__()
            try:
                # Other threads of this process receive bytes meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
            except BaseException:
                current.__exit__(None, None, None)
                raise
            self._current = graph, current
        except Exception:
            _log("no CUDA graph can be begun")
            return 0
        return 1

    def _end(self, is_wanted: int) -> int:
        assert self._current is not None
        graph, current = self._current
        self._current = None
        try:
            graph.capture_end()
        except Exception:
            if is_wanted:
                _log("a CUDA graph is not whole")
            return 0
        finally:
            current.__exit__(None, None, None)
        if not is_wanted:
            graph.reset()
            return 0
        self._last += 1
        self._graphs[self._last] = graph
        return self._last

    def _run(self, number: int) -> int:
        try:
            self._graphs[number].replay()
        except Exception:
            _log("a CUDA graph cannot be run")
            return 0
        return 1

    def _drop(self, number: int) -> None:
        self._graphs.pop(number).reset()


def _log(what: str) -> None:
    os.write(2, f"{what}: {traceback.format_exc()}\n".encode())
