"""Encoding: an object becomes a cloudpickle; large buffers are kept outside the pickle."""

from __future__ import annotations

import contextlib
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle
import xxhash
from cloudpickle import cloudpickle as internals

from skyward.errors import SerializationError
from skyward.objects import exceptions, modules, tensors
from skyward.objects.kept import KeptBook, KeptShelf, KeptTensors
from skyward.objects.tensors import Openings, Shelf, StorageBook, StorageRef

if TYPE_CHECKING:
    import torch

    Refer = Callable[[list[torch.UntypedStorage]], list[tuple[bytes, torch.UntypedStorage]] | None]


_received_classes: weakref.WeakSet[type] = weakref.WeakSet()
_SMALL = frozenset((int, float, str, bool, type(None)))
"""Types that need none of Skyward's own reducers."""


@dataclass(slots=True)
class Encoded:
    """An object as bytes: pickle pieces, then buffers, the last of which are tensor storages."""

    pieces: list[bytes | memoryview]
    buffers: list[memoryview] = field(default_factory=list)
    storages: list[tuple[int, int]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    """The data from `put` that the object refers to."""
    referred: dict[bytes, torch.UntypedStorage] = field(default_factory=dict)
    """Storages on a device that the receiver opens in place, by their descriptions; they are kept
    alive until then."""

    @property
    def pickle_length(self) -> int:
        """Bytes of the pickle itself."""
        pieces = self.pieces
        return len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))

    def with_pickle_as_buffer(self) -> Encoded:
        """The same object with the pickle as its first buffer: executors can keep and relay it."""
        whole = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        buffers = [memoryview(whole), *self.buffers]
        return Encoded([], buffers, self.storages, self.handles, self.referred)

    @property
    def size(self) -> int:
        """Bytes altogether."""
        return self.pickle_length + sum(map(len, self.buffers))


class _PickleFile:
    """The file that the pickler writes to; it keeps large bytes objects without a copy."""

    def __init__(self) -> None:
        self.pieces: list[bytes | memoryview] = []

    def write(self, piece: bytes | bytearray) -> int:
        # A large bytearray comes uncopied, and its owner may change it before it is sent.
        self.pieces.append(bytes(piece) if isinstance(piece, bytearray) else piece)
        return len(piece)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        out: _PickleFile,
        own_modules: bool,
        names: dict[int, set[str]],
        keep: KeptBook | None = None,
        *,
        refers: bool = False,
    ) -> None:
        self.buffers: list[memoryview] = []
        buffers = self.buffers
        self.book: StorageBook | None = keep
        self._keep = keep
        self.handles: list[Any] = []
        self.openings = Openings() if refers else None
        self._own_modules = own_modules
        self._names = names
        self._sent: dict[int, set[str]] = {}
        # Not a method: a pickler in a reference cycle would keep all pickled objects alive until
        # the garbage collector runs.
        super().__init__(
            out, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())
        )

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.FunctionType:
            if self._own_modules and modules.travels_by_value(obj):
                modules.name_modules(obj, self._names)
                return self._dynamic_function_reduce(obj)
            return super().reducer_override(obj)
        if isinstance(obj, type):
            return self._reduce_class(obj)
        if kind is types.ModuleType and self._own_modules and modules.is_own(obj.__name__):
            return self._reduce_module(obj)
        if tensors.is_tensor(obj):
            if self.book is None:
                self.book = StorageBook(self.openings)
            reduced = tensors.reduce_tensor(obj, self.book)
            return NotImplemented if reduced is None else reduced
        if isinstance(obj, StorageRef):
            # Said here, it spares cloudpickle a search for each.
            return obj.__reduce__()
        if kind.__name__ == "device" and tensors.is_device(obj):
            if self._keep is not None:
                return self._keep.reduce_device(obj)
            if obj.type == "sky":
                return tensors.reduce_device(obj, self.openings)
        if self._keep is not None and hasattr(obj, "param_groups"):
            self._keep.note(obj)
        if getattr(kind, "__sky_handle__", False):
            self.handles.append(obj)
            return _handle, (obj.key,)
        if getattr(kind, "__sky_function__", False):
            return obj.by_value()
        if isinstance(obj, BaseException):
            return exceptions.reduce_exception(obj)
        return NotImplemented

    def _reduce_class(self, kind: type) -> Any:
        if self._own_modules and modules.is_own(kind.__module__):
            reduced = internals._dynamic_class_reduce(kind)
        else:
            reduced = super().reducer_override(kind)
        if isinstance(reduced, tuple) and reduced[-1] is internals._class_setstate:
            # The definition is sent, but a process that has the class already keeps its own.
            return (_skeleton, (reduced[0], reduced[1]), *reduced[2:-1], _set_class_state)
        return reduced

    def _reduce_module(self, module: types.ModuleType) -> Any:
        wanted = self._names.get(id(module))
        if wanted is None:
            wanted = {name for name in vars(module) if not name.startswith("__")}
        else:
            self._sent[id(module)] = set(wanted)
        state = {name: vars(module)[name] for name in sorted(wanted)}
        return _module, (module.__name__,), state, None, None, _set_module_state

    @property
    def cut_short(self) -> bool:
        """Whether a function uses more of a module than had been pickled of that module."""
        return any(self._names[module] - sent for module, sent in self._sent.items())


def encode_small(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded | None:
    """Encode arguments that need none of Skyward's own reducers; None if some do."""
    if kwargs or not _SMALL.issuperset(map(type, args)):
        return None
    return Encoded([pickle.dumps((args, kwargs), 5)])


def encode(
    value: Any,
    *,
    own_modules: bool = False,
    names: Mapping[int, set[str]] | None = None,
    what: str = "the value",
    refer: Refer | None = None,
    keep: KeptBook | None = None,
) -> Encoded:
    """Encode any object; `own_modules` sends the user's modules by value.

    `Arguments` are encoded as their values. `refer` gets the storages on sky devices, if there are
    any. It returns how the receiver opens each of them, and the storage that is opened, which may
    be a copy; or None if their bytes have to be sent.
    With `keep`, some storages are kept on a device: those of a result, or of a value with a name.
    Raises a `SerializationError` that names the part that cannot be sent, and the path to it from
    `what`.
    """
    whole = value
    if isinstance(value, Arguments):
        small = encode_small(value.args, value.kwargs)
        if small is not None:
            return small
        whole = (value.args, value.kwargs)
    elif type(value) in _SMALL:
        return Encoded([pickle.dumps(value, 5)])
    wanted = {module: set(found) for module, found in names.items()} if names else {}
    refers = refer is not None
    out, pickler = _dumped(value, whole, own_modules, wanted, what, keep, refers=refers)
    referred: dict[bytes, torch.UntypedStorage] = {}
    if refer is not None and (openings := pickler.openings) is not None:
        opened = refer(openings.storages) if openings.storages else []
        if opened is None:
            out, pickler = _dumped(value, whole, own_modules, wanted, what, keep)
        else:
            referred = dict(opened)
            openings.fill(pickler.buffers, [description for description, _ in opened])
    encoded = Encoded(out.pieces, pickler.buffers, [], pickler.handles, referred)
    if pickler.book is not None:
        views, encoded.storages = pickler.book.buffers()
        encoded.buffers += views
    return encoded


def _dumped(
    value: Any,
    whole: Any,
    own_modules: bool,
    wanted: dict[int, set[str]],
    what: str,
    keep: KeptBook | None = None,
    *,
    refers: bool = False,
) -> tuple[_PickleFile, _Pickler]:
    """The pickle of `whole`; errors are about `value`, which `whole` contains."""
    try:
        while True:
            out = _PickleFile()
            pickler = _Pickler(out, own_modules, wanted, keep, refers=refers)
            pickler.dump(whole)
            if not pickler.cut_short:
                return out, pickler
    except SerializationError:
        raise
    except Exception as problem:
        path, culprit, cause = _culprit(value, own_modules)
        if path.startswith(("[", ".")):
            path = f"{what} at {path}"
        raise SerializationError(
            f"{path or what} cannot be sent: {_short(culprit)} ({cause or problem}); "
            "pass plain data instead, or make it inside the function"
        ) from problem


def decode(
    data: bytes | bytearray | memoryview,
    buffers: Sequence[memoryview] = (),
    storages: Sequence[tuple[int, int]] = (),
    kept: KeptTensors | None = None,
) -> Any:
    """The object that was encoded; only ever called with bytes from authenticated peers.

    `kept` has the tensors of an object that is kept on a device.
    """
    if not buffers and kept is None:
        return pickle.loads(data)
    plain = len(buffers) - len(storages)
    received = list(buffers[plain:]), list(storages)
    shelf = Shelf(*received) if kept is None else KeptShelf(*received, kept)
    outer = tensors.use_shelf(shelf)
    try:
        return pickle.loads(data, buffers=buffers[:plain])
    finally:
        tensors.use_shelf(outer)


_look_up: Callable[[bytes], Any] | None = None


def find_handles(look_up: Callable[[bytes], Any]) -> None:
    """From now on, use `look_up` to find the data of handles that this process decodes."""
    global _look_up
    _look_up = look_up


def _handle(key: bytes) -> Any:
    if _look_up is None:
        raise SerializationError(
            "a handle from sky.put was used outside of a pool's task; pass it to a function as an "
            "argument"
        )
    return _look_up(key)


_finds_own: ContextVar[bool] = ContextVar("skyward_finds_own", default=False)


@contextlib.contextmanager
def own_classes() -> Iterator[None]:
    """Decode objects of classes that this process has imported as objects of these classes.

    For what another process has encoded: its classes are the same in the source alone. A worker
    must not do so, since its modules may be older than the definition that was sent.
    """
    token = _finds_own.set(True)
    try:
        yield
    finally:
        _finds_own.reset(token)


def _own_class(arguments: tuple[Any, ...]) -> type | None:
    """The class of this process that has the name of one that is being decoded."""
    strings = [each for each in arguments[:-2] if isinstance(each, str)]
    names = next((each for each in arguments if isinstance(each, dict)), {})
    # An enumeration's constructor takes the module by itself, others within the namespace.
    module = names.get("__module__") or strings[-1]
    found = getattr(sys.modules.get(module), strings[0], None)
    is_it = isinstance(found, type) and found.__qualname__ == strings[0]
    return found if is_it else None


def _skeleton(make: Any, arguments: tuple[Any, ...]) -> Any:
    # Both of cloudpickle's constructors take the class's tracking id last but one.
    known = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    if known is not None:
        return known
    if _finds_own.get() and (own := _own_class(arguments)) is not None:
        return own
    made = make(*arguments)
    _received_classes.add(made)
    return made


def _set_class_state(kind: type, state: Any) -> None:
    if kind in _received_classes:
        internals._class_setstate(kind, state)


def _module(name: str) -> types.ModuleType:
    return types.ModuleType(name)


def _set_module_state(module: types.ModuleType, state: dict[str, Any]) -> None:
    vars(module).update(state)


def _culprit(value: Any, own_modules: bool) -> tuple[str, Any, BaseException | None]:
    """The smallest part that cannot be pickled: its path, the part itself, and the cause."""
    steps: list[str] = []
    cause = _failure(value, own_modules)
    seen: set[int] = set()
    while id(value) not in seen and len(seen) < 64:
        seen.add(id(value))
        for step, part in _parts(value):
            if type(part) in _SMALL:
                continue
            failure = _failure(part, own_modules)
            if failure is not None:
                steps.append(step)
                value, cause = part, failure
                break
        else:
            break
    path = (steps[0] if steps else "").strip()
    if len(steps) > 1:
        path += ("" if path.startswith(("[", ".")) else " at ") + "".join(steps[1:])
    return path, value, cause


def _failure(value: Any, own_modules: bool) -> BaseException | None:
    try:
        encoded = (value.args, value.kwargs) if isinstance(value, Arguments) else value
        _Pickler(_PickleFile(), own_modules, {}).dump(encoded)
    except Exception as problem:
        return problem
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Arguments):
        yield from (
            (f"argument {name!r} of {value.function}", part) for name, part in value.named()
        )
    elif isinstance(value, Mapping):
        for key, part in list(value.items()):
            yield f"[{_short(key)}]", part
            yield f" key {_short(key)}", key
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, type):
        yield from ((f".{name}", part) for name, part in vars(value).items())
    else:
        yield from _state_parts(value)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name = function.__qualname__
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" closure variable {free!r} of {name}", cell.cell_contents
        except ValueError:
            continue
    for used in internals._extract_code_globals(function.__code__):
        if used in function.__globals__:
            yield f" global {used!r} used by {name}", function.__globals__[used]
    for index, default in enumerate(function.__defaults__ or ()):
        yield f" default {index} of {name}", default


def _state_parts(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        state = value.__reduce_ex__(5)
    except Exception:
        state = None
    if isinstance(state, tuple) and len(state) > 2 and isinstance(state[2], dict):
        yield from ((f".{name}", part) for name, part in state[2].items())
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", part) for name, part in list(vars(value).items()))


@dataclass(slots=True)
class Arguments:
    """A call's arguments, with the names that error messages use for them."""

    function: str
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self) -> Iterator[tuple[str, Any]]:
        """Every argument with its name in the function's signature."""
        for index, value in enumerate(self.args):
            yield self.names[index] if index < len(self.names) else f"*args[{index}]", value
        yield from self.kwargs.items()


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(slots=True)
class StreamRef:
    """Stands for an argument that travels item by item."""

    index: int


@dataclass(slots=True, eq=False)
class Code:
    """A function's code, encoded and named by its content."""

    key: bytes
    encoded: Encoded
    references: modules.References

    @classmethod
    def of(cls, body: Callable[..., Any]) -> Code:
        """Encode a function."""
        references = modules.references(body)
        encoded = encode(body, own_modules=True, names=references.module_names)
        digest = xxhash.xxh3_128()
        for part in (*encoded.pieces, *encoded.buffers):
            digest.update(part)
        for handle in encoded.handles:
            digest.update(handle.key)
        return cls(digest.digest(), encoded, references)
