"""The `torch.sky` module: the functions that PyTorch and its users expect for a device."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from skyward.device import recurrent
from skyward.device.library import Core

if TYPE_CHECKING:
    import torch


def install(core: Core) -> None:
    """Name the backend "sky" and give it its module; once per process."""
    import torch
    from torch.utils import backend_registration

    backend_registration.rename_privateuse1_backend("sky")
    torch._register_device_module("sky", _SkyModule(core))  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    for method in (_byteswap, _write_file, _set_from_file):
        setattr(torch.UntypedStorage, method.__name__, method)
    recurrent.flatten_on_sky()


# PyTorch's own take every address for one of the CPU, or lose what keeps its memory alive.


def _byteswap(storage: Any, element_size: int) -> None:
    """Reverse the bytes of each element."""
    import torch

    if storage.device.type != "sky":
        torch._C.StorageBase._byteswap(storage, element_size)  # type: ignore[attr-defined]
        return
    whole = storage.nbytes() // element_size * element_size
    elements = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    elements = elements[:whole].view(-1, element_size)
    elements.copy_(elements.flip(1))


def _write_file(storage: Any, *how: Any, **more: Any) -> None:
    """Write the bytes to a file."""
    import torch

    here = storage.cpu() if storage.device.type == "sky" else storage
    torch._C.StorageBase._write_file(here, *how, **more)  # type: ignore[attr-defined]


def _set_from_file(storage: Any, *how: Any, **more: Any) -> Any:
    """Read the bytes from a file."""
    import torch

    is_sky = storage.device.type == "sky"
    here = torch.UntypedStorage(storage.nbytes()) if is_sky else storage  # type: ignore[no-untyped-call]
    torch._C.StorageBase._set_from_file(here, *how, **more)  # type: ignore[attr-defined]
    return storage if here is storage else storage.copy_(here)


def _module_there() -> types.ModuleType | None:
    """The module of the process that unpickles it, if that process uses devices."""
    import torch

    return getattr(torch, "sky", None)


class _SkyModule(types.ModuleType):
    # PyTorch's checkpointing keeps the state of the generator only where this is set.
    _initialized = True

    def __init__(self, core: Core) -> None:
        super().__init__("torch.sky", "Devices of Skyward's workers.")
        self._core = core

    def __reduce__(self) -> tuple[Any, ...]:
        """A function that names both `torch` and `sky` is taken for one that uses `torch.sky`."""
        return _module_there, ()

    # Devices.

    def is_available(self) -> bool:
        """Whether there is a sky device."""
        return self._core.count > 0

    def is_initialized(self) -> bool:
        """Always: the core is loaded before this module is."""
        return True

    def _lazy_init(self) -> None:
        """Do nothing: the core is loaded already."""

    def _is_in_bad_fork(self) -> bool:
        return self._core.in_bad_fork

    def device_count(self) -> int:
        """How many sky devices there are."""
        return self._core.count

    def current_device(self) -> int:
        """This thread's current device."""
        return self._core.current

    def set_device(self, device: Any) -> None:
        """Choose this thread's current device."""
        self._core.current = self._index(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Choose the current device for a block."""
        before = self._core.current
        self._core.current = self._index(device)
        try:
            yield
        finally:
            self._core.current = before

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything so far is done; raises the first error since the last time."""
        import torch

        torch.accelerator.synchronize(self._index(device))

    def get_device_name(self, device: Any = None) -> str:
        """The name of a device for people."""
        return f"sky:{self._index(device)}"

    def _index(self, device: Any) -> int:
        import torch

        if device is None:
            return self._core.current
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self._core.current if index is None else index

    # Streams and events.

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:  # noqa: N802
        """A stream: what is issued on it runs in order, beside other streams.

        >>> side = torch.sky.Stream()
        """
        import torch

        return torch.Stream(torch.device("sky", self._index(device)), priority=priority)

    def Event(  # noqa: N802
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        """A moment in a stream, to wait for and, with `enable_timing`, to measure from.

        >>> start = torch.sky.Event(enable_timing=True)
        """
        import torch

        device = torch.device("sky", self._core.current)
        return torch.Event(device, enable_timing=enable_timing, blocking=blocking)

    def current_stream(self, device: Any = None) -> torch.Stream:
        """The stream on which this thread issues its operations."""
        import torch

        return torch.accelerator.current_stream(torch.device("sky", self._index(device)))

    def default_stream(self, device: Any = None) -> torch.Stream:
        """The stream for all operations, unless another stream was chosen."""
        import torch

        now = self.current_stream(device)
        return torch.Stream(stream_id=0, device_index=now.device_index, device_type=now.device_type)

    def set_stream(self, stream: torch.Stream) -> None:
        """Choose the stream on which this thread issues its operations."""
        import torch

        torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        """Choose the stream for a block."""
        if stream is None:
            yield
            return
        with stream:
            yield

    # Memory, of the worker's device.

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes that tensors take on the device."""
        import torch

        return int(torch.accelerator.memory_allocated(self._index(device)))

    def max_memory_allocated(self, device: Any = None) -> int:
        """The most bytes that tensors have taken since the last `reset_peak_memory_stats`."""
        import torch

        return int(torch.accelerator.max_memory_allocated(self._index(device)))

    def memory_reserved(self, device: Any = None) -> int:
        """Bytes the worker's allocator holds, in use or kept for later."""
        import torch

        return int(torch.accelerator.memory_reserved(self._index(device)))

    def max_memory_reserved(self, device: Any = None) -> int:
        """The most bytes the worker's allocator has held."""
        import torch

        return int(torch.accelerator.max_memory_reserved(self._index(device)))

    def memory_stats(self, device: Any = None) -> dict[str, Any]:
        """All numbers of memory by name, as `torch.accelerator.memory_stats` returns them."""
        import torch

        return dict(torch.accelerator.memory_stats(self._index(device)))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free bytes and all bytes of the device's memory."""
        import torch

        free, total = torch.accelerator.get_memory_info(self._index(device))
        return int(free), int(total)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Count the peaks from now on."""
        import torch

        torch.accelerator.reset_peak_memory_stats(self._index(device))

    def empty_cache(self) -> None:
        """Have the worker's allocator give back the memory that no tensor uses."""
        import torch

        torch.accelerator.empty_cache()

    # Random numbers.

    def manual_seed(self, seed: int) -> None:
        """Seed the current device."""
        self._core.seed(self._core.current, seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device."""
        for index in self._core.open_devices:
            self._core.seed(index, seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of the worker's generator."""
        import torch

        return torch.frombuffer(
            bytearray(self._core.rng_state(self._index(device))), dtype=torch.uint8
        )

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the state of the worker's generator."""
        self._core.set_rng_state(self._index(device), bytes(state.cpu().tolist()))

    # Autocast.

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The dtypes that autocast may cast to."""
        import torch

        return [torch.float16, torch.bfloat16]
