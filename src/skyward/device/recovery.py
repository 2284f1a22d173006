"""Recovery: what a device lost with its process, and the checkpoint that brings it back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyward.device.library import Core, Life
from skyward.errors import DeviceError

if TYPE_CHECKING:
    import torch

_NAMED_MOST = 4
"""How many of the lost tensors an error names: the largest ones."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A checkpoint of a device's storages, and how to fill them from it."""

    title: str
    """The checkpoint, in words."""
    kept: tuple[Life, ...]
    failed: frozenset[Life]
    """Storages that the checkpoint has not, since an operation on them had failed."""
    fill: Callable[[], None]


class Recoveries:
    """The newest checkpoint of each device, by the device's index."""

    def __init__(self) -> None:
        self._known: dict[int, Recovery] = {}
        self._empty: set[int] = set()
        """Devices that were opened again, and whose tensors have memory but no contents yet."""
        self._lost: dict[int, frozenset[Life]] = {}
        self._lock = threading.Lock()
        self._filling = threading.RLock()
        """Held while tensors get their contents: a second thread waits for them."""

    def remember(self, index: int, recovery: Recovery) -> None:
        """Have this checkpoint bring the device's tensors back if its process is lost."""
        with self._lock:
            self._known[index] = recovery

    def forget(self, index: int) -> None:
        """Note that the device has ended with its pool."""
        with self._lock:
            self._known.pop(index, None)
            self._empty.discard(index)
            self._lost.pop(index, None)

    def get(self, index: int) -> Recovery | None:
        """The checkpoint of a device."""
        return self._known.get(index)

    def opened_again(self, index: int, lost: frozenset[Life]) -> None:
        """Note that a device was opened again without these storages; `fill` has to follow."""
        with self._lock:
            self._empty.add(index)
            self._lost[index] = lost

    def lost(self, index: int) -> frozenset[Life]:
        """The storages that a device has not got back."""
        return self._lost.get(index, frozenset())

    def found(self, index: int, lives: Iterable[Life]) -> None:
        """Note that storages of a device have contents again."""
        with self._lock:
            self._lost[index] = self.lost(index).difference(lives)

    def fill(self, index: int) -> None:
        """Fill the tensors of a device that was opened again, unless they are filled."""
        with self._filling:
            if index in self._empty:
                self._known[index].fill()
                with self._lock:
                    self._empty.discard(index)


recoveries = Recoveries()


def inheritance(core: Core, index: int) -> tuple[tuple[Life, ...], dict[Life, str]]:
    """The storages of a lost device that its checkpoint has, and what to say of each other one."""
    recovery = recoveries.get(index)
    assert recovery is not None
    kept, named = set(recovery.kept), names(core, index)
    texts: dict[Life, str] = {}
    for life in core.living(core.serial(index)):
        if life not in kept:
            name = named.get(life.slot, f"a tensor of {_size(life.bytes)}")
            has_failed = life in recovery.failed
            why = "an operation on it had failed before" if has_failed else "it was made after"
            texts[life] = (
                f"{name} was lost with the process that held it, since {why} {recovery.title}; "
                "make it again"
            )
    return recovery.kept, texts


def loss(core: Core, index: int) -> str:
    """What was lost with a device, as the end of an error's sentence; empty if it was nothing."""
    lives = core.living(core.serial(index))
    if not lives:
        return ""
    count, listed = summary(core, index, lives)
    text = f"; {count} ({_size(sum(life.bytes for life in lives))}) lost: {listed}"
    recovery = recoveries.get(index)
    if recovery is None:
        return text
    back = len(set(lives) & set(recovery.kept))
    return f"{text}; compute.device() brings {back} of them back from {recovery.title}"


def summary(core: Core, index: int, lives: Collection[Life]) -> tuple[str, str]:
    """How many storages these are, and the names of the largest."""
    named = names(core, index)
    largest = sorted(lives, key=lambda life: -life.bytes)[:_NAMED_MOST]
    listed = ", ".join(named.get(life.slot, _size(life.bytes)) for life in largest)
    more = ", ..." if len(lives) > len(largest) else ""
    return "1 tensor" if len(lives) == 1 else f"{len(lives)} tensors", listed + more


def explain_errors(core: Core) -> None:
    """Have errors of devices say which tensors were lost, and where ranks are that do not come."""
    DeviceError.explain_with("is gone", lambda index, _: loss(core, index))
    DeviceError.explain_with("misses ranks", core.explain_absent)


def names(core: Core, index: int) -> dict[int, str]:
    """The names of a device's tensors that this process still refers to, by slot."""
    import torch

    found: dict[int, str] = {}
    modules: dict[int, torch.nn.Module] = {}
    loose: list[torch.Tensor] = []
    for value in gc.get_objects():
        # By its type alone: the class of a proxy may be a function of the user's.
        kind = type(value)
        if issubclass(kind, torch.nn.Module):
            modules[id(value)] = value
        elif issubclass(kind, torch.Tensor):
            loose.append(value)
    inner = {id(child) for module in modules.values() for child in _children(module)}
    for module in modules.values():
        if id(module) not in inner:
            for name, tensor in _tensors(module):
                _note(core, index, found, tensor, f"{type(module).__name__}.{name} ")
    for tensor in loose:
        _note(core, index, found, tensor, "")
    return found


def _children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    # Not `children()`: a module may be half made, and this is said in an error.
    held: Mapping[str, Any] = vars(module).get("_modules") or {}
    yield from (child for child in held.values() if child is not None)


def _tensors(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for held in ("_parameters", "_buffers"):
        for name, tensor in (vars(module).get(held) or {}).items():
            if tensor is not None:
                yield prefix + name, tensor
                if tensor.grad is not None:
                    yield f"{prefix}{name}.grad", tensor.grad
    for name, child in (vars(module).get("_modules") or {}).items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.")


def _note(core: Core, index: int, found: dict[int, str], tensor: torch.Tensor, name: str) -> None:
    import torch

    if tensor.device.type != "sky" or tensor.device.index != index:
        return
    # A compiler has traced with it: it has a shape and no memory, and some warn who asks for that.
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return
    try:
        address = tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return
    slot = core.slot(index, address)
    if slot is not None and slot not in found:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        found[slot] = f"{name}({shape} {dtype})" if name else f"a tensor ({shape} {dtype})"


def _size(count: int) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    amount = float(count)
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        del units[0]
    return f"{amount:.3g} {units[0]}"
