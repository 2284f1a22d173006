"""The `torch.sky` module: the functions and classes that PyTorch and its users expect for a device.

Among them are the classes that stand for a dtype on a device, such as `torch.sky.FloatTensor`, for
old code.
"""

from __future__ import annotations

import functools
import secrets
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from skyward.device import storages
from skyward.device.library import Core
from skyward.device.properties import DeviceProperties
from skyward.errors import DeviceError

if TYPE_CHECKING:
    import torch


def install(core: Core) -> None:
    """Name the backend "sky" and give it its module; once per process."""
    import torch
    from torch.utils import backend_registration

    backend_registration.rename_privateuse1_backend("sky")
    torch._register_device_module("sky", _SkyModule(core))  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    storages.install()
    _flatten_on_sky()


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
        # What `torch.cuda` keeps in modules of their own.
        self.random = self.memory = self
        self.__dict__.update(_legacy_classes())

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

    def init(self) -> None:
        """Do nothing: the core is loaded already."""

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
        """Choose this thread's current device, and have libraries use sky devices."""
        self._core.current = self._core.chosen = self._open_index(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Choose the current device for a block."""
        before = self._core.current
        self._core.current = self._open_index(device)
        try:
            yield
        finally:
            self._core.current = before

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything so far is done; raises the first error since the last time."""
        import torch

        torch.accelerator.synchronize(self._index(device))

    @contextmanager
    def device_of(self, tensor: Any) -> Iterator[None]:
        """Choose the device of a tensor for a block, if it is on a sky device."""
        with self.device(tensor.device if tensor.device.type == "sky" else None):
            yield

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """What the device is on its node: its name, memory, version and more.

        >>> torch.sky.get_device_properties(device).total_memory
        """
        return self._core.properties(self._index(device))

    def get_device_name(self, device: Any = None) -> str:
        """The name of the GPU, such as "NVIDIA H200", or of the processor."""
        return self.get_device_properties(device).name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """The version of the GPU's instructions; (0, 0) on a CPU."""
        properties = self.get_device_properties(device)
        return properties.major, properties.minor

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Whether the current device computes with bfloat16."""
        properties = self.get_device_properties()
        is_emulated = properties.type == "cuda" and properties.major < 8
        return properties.is_bf16_supported and (including_emulation or not is_emulated)

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        """Whether a device reads another's memory: none does, each has its own process."""
        return False

    def ipc_collect(self) -> None:
        """Do nothing: memory shared with functions of the node is freed when they free it."""

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is recorded: never."""
        return False

    def _index(self, device: Any) -> int:
        import torch

        if device is None:
            return self._core.current
        index: int | None = device if isinstance(device, int) else None
        if not isinstance(device, int):
            named = torch.device(device)
            if named.type != "sky":
                raise DeviceError(f"{device!r} is not a sky device; give one of compute.device()")
            index = named.index
        if index is None:
            return self._core.current
        if index < 0:
            raise DeviceError(f"there is no device sky:{index}; get one with compute.device()")
        return index

    def _open_index(self, device: Any) -> int:
        """The index of a device that is open."""
        index = self._index(device)
        if index not in self._core.open_devices:
            raise DeviceError(f"there is no device sky:{index}; get one with compute.device()")
        return index

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

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        """The numbers of memory as a table for people."""
        index, mebibyte = self._index(device), 1 << 20
        free, total = self.mem_get_info(index)
        rows = {
            "allocated": self.memory_allocated(index),
            "allocated at most": self.max_memory_allocated(index),
            "reserved": self.memory_reserved(index),
            "reserved at most": self.max_memory_reserved(index),
            "free": free,
            "all": total,
        }
        lines = (f"{what:<18}{size / mebibyte:>14,.1f} MiB" for what, size in rows.items())
        return "\n".join([f"sky:{index}, {self.get_device_name(index)}", *lines])

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """Do nothing: no sums are kept."""

    def reset_max_memory_allocated(self, device: Any = None) -> None:
        """Count the peaks from now on."""
        self.reset_peak_memory_stats(device)

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

    def seed(self) -> None:
        """Seed the current device with a random number."""
        self.manual_seed(secrets.randbits(63))

    def seed_all(self) -> None:
        """Seed every device with the same random number."""
        self.manual_seed_all(secrets.randbits(63))

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of the worker's generator."""
        import torch

        return torch.frombuffer(
            bytearray(self._core.rng_state(self._index(device))), dtype=torch.uint8
        )

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the state of the worker's generator."""
        self._core.set_rng_state(self._index(device), bytes(state.cpu().tolist()))

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The states of the generators of all open devices."""
        return [self.get_rng_state(index) for index in self._core.open_devices]

    def set_rng_state_all(self, states: Iterable[torch.Tensor]) -> None:
        """Set the states of the generators of all open devices, in their order."""
        for index, state in zip(self._core.open_devices, states, strict=True):
            self.set_rng_state(state, index)

    # Autocast.

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The dtypes that autocast may cast to."""
        import torch

        return [torch.float16, torch.bfloat16]


if TYPE_CHECKING:
    from torch.nn import RNNBase

CUDNN_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
"""How cuDNN numbers the kinds of recurrent layers."""


def _flatten_on_sky() -> None:
    """Have `flatten_parameters`, which PyTorch keeps to CUDA, work for sky devices too.

    The weights of a recurrent layer are one buffer then, laid out as the worker's cuDNN does it.
    """
    import torch

    flatten = torch.nn.RNNBase.flatten_parameters

    @functools.wraps(flatten)
    def flatten_parameters(layer: RNNBase) -> None:
        weights = layer._flat_weights
        if weights and isinstance(weights[0], torch.Tensor) and weights[0].device.type == "sky":
            _flatten(layer, weights)
        else:
            flatten(layer)

    setattr(torch.nn.RNNBase, flatten.__name__, flatten_parameters)


def _flatten(layer: Any, weights: list[Any]) -> None:
    import torch

    first = weights[0]
    whole = len(weights) == len(layer._flat_weights_names)
    alike = all(
        isinstance(weight, torch.Tensor)
        and weight.dtype == first.dtype
        and weight.device == first.device
        for weight in weights
    )
    if not whole or not alike or not torch.cudnn_is_acceptable(first):
        return
    # A weight that occurs twice cannot have two places.
    if len({(weight.data_ptr(), weight.storage_offset()) for weight in weights}) < len(weights):
        return
    with torch.no_grad():
        torch._cudnn_rnn_flatten_weight(
            weights,
            (4 if layer.bias else 2) + (1 if layer.proj_size else 0),
            layer.input_size,
            CUDNN_MODES[layer.mode],
            layer.hidden_size,
            layer.proj_size,
            layer.num_layers,
            layer.batch_first,
            bool(layer.bidirectional),
        )


TENSORS = ("Byte", "Char", "Double", "Float", "Int", "Long", "Short", "Half", "Bool", "BFloat16")
"""The dtypes that have such a class on CUDA."""


class _TensorType(type):
    """The class of such classes: tensors are never made of them, and yet count as instances."""

    dtype: Any
    plain: Any
    """The class for the dtype on the CPU."""

    def __instancecheck__(cls, value: object) -> bool:
        import torch

        is_ours = isinstance(value, torch.Tensor) and value.device.type == "sky"
        return is_ours and value.dtype == cls.dtype  # type: ignore[attr-defined]

    def __call__(cls, *values: Any, device: Any = None) -> Any:
        return cls.plain(*values).to("sky" if device is None else device)


def _legacy_classes() -> dict[str, Any]:
    """Every class that stands for a dtype, by its name in `torch.sky`."""
    import torch
    from torch.storage import _dtype_to_storage_type_map, _LegacyStorage

    named: dict[str, Any] = {}
    storage_type: Any = type(_LegacyStorage)
    for name in TENSORS:
        plain = getattr(torch, f"{name}Tensor")
        body = {
            "__module__": "torch.sky",
            "__qualname__": f"{name}Tensor",
            "dtype": plain.dtype,
            "plain": plain,
            "layout": torch.strided,
            "is_cuda": False,
            "is_sparse": False,
        }
        # `x.type(...)` takes the whole name from the class.
        named[f"{name}Tensor"] = _TensorType(f"torch.sky.{name}Tensor", (), body)
    for dtype, name in _dtype_to_storage_type_map().items():
        storage = {"__module__": "torch.sky", "dtype": dtype, "_dtype": dtype}
        named[name] = storage_type(name, (_LegacyStorage,), storage)
    return named
