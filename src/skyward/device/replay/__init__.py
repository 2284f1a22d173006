"""`sky.replay`: a function on a device is recorded, and then done again with one message."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import linecache
import os
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

from skyward.device.core import core
from skyward.device.library import Core
from skyward.device.replay import tape
from skyward.device.replay.numbers import Leaf, Scope, followed_through_math, plain
from skyward.device.replay.program import (
    DTYPES,
    KeptProgram,
    Plan,
    Returned,
    TapedCall,
    TensorView,
    Unfit,
    numbers_for,
    plan,
)
from skyward.device.replay.surroundings import SCALARS, Guards, Spot, Surroundings, home, same
from skyward.device.replay.tape import Name, TapedOperation, Uploaded
from skyward.errors import ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")

KINDS_MOST = 16
"""For so many kinds of arguments a function is recorded."""
PROGRAMS_MOST = 8
"""Programs for one kind of arguments: a function may do one thing or the other."""
CALLS_IN_VAIN = 6
"""After so many calls of which no two did the same, a function is not recorded any more."""
CALLS_MOST = 32
"""Nor after so many that were recorded, if more were recorded than replayed."""
SAMPLES = 3
HOST_MOST = 4 << 10
"""Tensors on the host of more bytes are not compared in each call."""

_recording = threading.Lock()
_is_recording = threading.local()


def replay(function: Callable[P, T]) -> Replay[P, T]:
    """Have a function of tensors on a sky device run as one message.

    The first calls run as they are, and are recorded. When two have done the same, the worker does
    it by itself, on a GPU as a CUDA graph: Python is not run any more. Numbers that vary, such as a
    learning rate or an optimiser's count of steps, are computed here and sent along.

    >>> step = sky.replay(train_step)
    >>> for x, y in loader:
    ...     loss = step(x, y)
    """
    if not callable(function):
        raise ConfigurationError(f"replay({function!r}): give a function that uses a sky device")
    return Replay(function)


class Replay(Generic[P, T]):
    """A function that is recorded and replayed; `sky.replay` makes it."""

    def __init__(self, function: Callable[P, T]) -> None:
        self._function = function
        self._kinds: dict[Any, _Kind] = {}
        self._is_synchronous = os.environ.get("SKYWARD_DEVICE_SYNC", "0") not in ("", "0")
        self._is_full = False
        self.replayed = 0
        """How many calls were replayed."""
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function, or have the worker do what it did."""
        from torch.utils import _pytree as pytree

        if self._is_synchronous or getattr(_is_recording, "now", False):
            return self._function(*args, **kwargs)
        if not kwargs and all(map(_is_leaf, map(type, args))):
            # The usual arguments, without what looks into each: that takes 10 us.
            leaves, tree = [*args], _FLAT[len(args)]
        else:
            leaves, tree = pytree.tree_flatten((args, kwargs))
        key = (tree, *map(_kind_of, leaves), *_mode())
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) == KINDS_MOST:
                if not self._is_full:
                    self._is_full = True
                    warnings.warn(
                        f"sky.replay runs {self._name} as it is for arguments of more than "
                        f"{KINDS_MOST} kinds of sizes; give it fewer, or make another sky.replay",
                        stacklevel=2,
                    )
                return self._function(*args, **kwargs)
            kind = self._kinds[key] = _Kind(self._function)
        for ready in kind.ready:
            found, result = ready.run(leaves)
            if found:
                self.replayed += 1
                kind.replayed += 1
                return cast(T, result)
        if kind.problem is not None:
            return self._function(*args, **kwargs)
        result, problem = kind.record(leaves, tree)
        if problem is not None:
            warnings.warn(self._advice(problem), stacklevel=2)
        return cast(T, result)

    def __repr__(self) -> str:
        problems = [str(kind.problem) for kind in self._kinds.values() if kind.problem]
        ready = sum(len(kind.ready) for kind in self._kinds.values())
        told = f"; {problems[0]}" if problems else ""
        return f"<sky.replay of {self._name}: {ready} programs, {self.replayed} replayed{told}>"

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    def _advice(self, problem: Unfit) -> str:
        where = ""
        if problem.line:
            file, number = _lines.at(problem.line)
            text = linecache.getline(file, number).strip()
            where = f"\n  {file}:{number}: {text}"
        return f"sky.replay runs {self._name} as it is: {problem}{where}"


@functools.cache
def _is_leaf(kind: type) -> bool:
    from torch.utils import _pytree as pytree

    return kind not in pytree.SUPPORTED_NODES and not issubclass(kind, tuple)


class _Flat(dict[int, Any]):
    """The trees of so many leaves as arguments."""

    def __missing__(self, count: int) -> Any:
        from torch.utils import _pytree as pytree

        self[count] = pytree.tree_structure(((None,) * count, {}))
        return self[count]


_FLAT = _Flat()


def _kind_of(leaf: Any) -> Any:
    import torch

    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) is float:
        return float
    # Other objects are what they are; what is in them is looked at in each call.
    return (type(leaf), leaf) if isinstance(leaf, SCALARS) else _Same(leaf)


class _Same:
    """An object, which equals itself alone."""

    def __init__(self, it: Any) -> None:
        self._it = it

    def __hash__(self) -> int:
        return id(self._it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._it is other._it


def _mode() -> tuple[Any, ...]:
    import torch

    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("sky"),
        torch.get_autocast_dtype("sky"),
        torch.get_default_dtype(),
        core().settings(),
    )


class _Kind:
    """Calls with one kind of arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.ready: list[_Ready] = []
        self.problem: Unfit | None = None
        self._groups: list[list[TapedCall]] = []
        """Calls that did the same, each."""
        self._varying: set[Spot] = set()
        """Numbers that were seen to change."""
        self._numbers: dict[Spot, Any] = {}
        """What the function has reached last."""
        self._in_vain = 0
        self._recorded = 0
        self.replayed = 0

    def record(self, leaves: list[Any], tree: Any) -> tuple[Any, Unfit | None]:
        """Call the function and note what it does; make a program of it if that is possible.

        Returns what the function does, and why it is not recorded any more, if it is not.
        """
        with _recording:
            _is_recording.now = True
            try:
                recorder = _Recorder(self._function, self._varying, leaves)
                changed = self._note_numbers(recorder.surroundings)
                result, recording = recorder.record(leaves, tree)
            finally:
                _is_recording.now = False
        self._numbers = recorder.surroundings.numbers
        self._recorded += 1
        if recording is not None:
            self._consider(recording, recorder)
        if self._recorded >= CALLS_MOST and self.replayed < self._recorded:
            told = f", as {changed.path}" if changed else ""
            self.problem = Unfit(f"what it reaches is another in most calls{told}")
        return result, self.problem

    def _note_numbers(self, now: Surroundings) -> Spot | None:
        """Find what has changed since the last call that was recorded; returns one of them."""
        changed = None
        for place, value in now.numbers.items():
            former = self._numbers.get(place, value)
            if former != value or type(former) is not type(value):
                self._varying.add(place)
                changed = place
        return changed

    def _consider(self, recording: TapedCall, recorder: _Recorder) -> None:
        self._in_vain += 1
        group = next((each for each in self._groups if not each[-1].difference(recording)), None)
        if group is None:
            problem = self._groups[-1][-1].difference(recording) if self._groups else None
            self._groups = [*self._groups, [recording]][-PROGRAMS_MOST:]
            if self._in_vain >= CALLS_IN_VAIN:
                self.problem = recording.problem or problem
            return
        group[:] = [*group, recording][-SAMPLES:]
        try:
            found = plan(group)
            ready = _Ready(recorder, found)
        except Unfit as problem:
            self.problem = problem
            return
        self._in_vain = 0
        for sample in group:
            for number in found.inputs:
                sample.arguments[number] = None
        former = [each for each in self.ready if each.group is group]
        for each in former:
            self.ready.remove(each)
            each.drop()
        ready.group = group
        self.ready = [ready, *self.ready]
        while len(self.ready) > PROGRAMS_MOST:
            self.ready.pop().drop()


class _Lines:
    """The lines of users' programs, by numbers."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, int]] = [("", 0)]
        self._numbers: dict[tuple[str, int], int] = {}

    def now(self) -> int:
        """The number of the line of the user's that runs now."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        line = (frame.f_code.co_filename, frame.f_lineno)
        if line not in self._numbers:
            self._numbers[line] = len(self._lines)
            self._lines.append(line)
        return self._numbers[line]

    def at(self, number: int) -> tuple[str, int]:
        return self._lines[number]


@functools.cache
def _is_ours(file: str) -> bool:
    import torch

    folders = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    return file.startswith((*folders, "<")) or os.sep + "contextlib.py" in file


_lines = _Lines()


class _Recorder:
    """Records one call of a function."""

    def __init__(self, function: Callable[..., Any], varying: set[Spot], leaves: list[Any]) -> None:
        self._function, self._varying, self.given = function, varying, leaves
        self.core = core()
        self.surroundings = Surroundings.of(function, leaves)
        self.index = -1
        self._scope = Scope()
        self._values: dict[Leaf, float | int] = {}
        self._items: list[Any] = []
        """What `.item()` gave of the device, in order."""
        self._looks_at_host = ""
        self.steps: dict[int, int] = {}
        """How often schedulers were stepped, by their numbers."""
        self._is_stepping = False
        self._stepped_at = -1
        """How many operations there were then."""

    def record(self, leaves: list[Any], tree: Any) -> tuple[Any, TapedCall | None]:
        """What the function returns, and what it has done."""
        from torch.utils import _pytree as pytree

        found = self.surroundings
        tensors = [*(each for each in leaves if _is_sky(each)), *found.tensors.values()]
        indices = {each.device.index for each in tensors if _is_sky(each)} | found.devices
        given = self._plant_arguments(leaves)
        args, kwargs = pytree.tree_unflatten(given, tree)
        recording = TapedCall(tape.Tape(), self._scope, self._values, list(leaves))
        if found.problem or len(indices) != 1:
            reached = found.problem or f"{len(indices)} devices"
            recording.problem = Unfit(f"it reaches {reached}")
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            return self._function(*args, **kwargs), recording
        self.index = indices.pop()
        others = {
            each: self.core.stats(each).operations
            for each in self.core.open_devices
            if each != self.index
        }
        before = self._before()
        guards = found.guards(set())
        self.gradients = {path: owner.grad for path, owner in found.owners.items()}
        drawn = _random_states()
        self._versions = {path: t._version for path, t in found.tensors.items() if _is_on_host(t)}
        self._told = {path: t.item() for path, t in found.tensors.items() if _is_host(t)}
        self._given_versions = {n: t._version for n, t in enumerate(leaves) if _is_on_host(t)}
        planted = self._plant()
        self.core.use_lines(_lines.now)
        self.core.start_tape(self.index)
        try:
            with followed_through_math(), self._reading(), self._scheduling(planted):
                result = self._function(*args, **kwargs)
        finally:
            content = self.core.stop_tape(self.index)
            ended = {place: place.get() for place in planted}
            self._uproot(planted)
        try:
            slots = self._slots_of_arguments(leaves, before)
            recording.tape = tape.read(
                content,
                {slot: path for path, slot in reversed(before.items())},
                slots,
                self._hosts_of_arguments(leaves),
                {n: each.nbytes for n, each in enumerate(leaves) if _is_on_host(each)},
                {
                    n: each.storage_offset() * each.itemsize
                    for n, each in enumerate(leaves)
                    if _is_sky(each)
                },
            )
            if _random_states() != drawn:
                raise Unfit("it draws random numbers on the host")
            self._explain(recording, ended, guards, others)
            result = self._note_results(recording, result, leaves)
        except Unfit as problem:
            recording.problem = problem
            result = pytree.tree_map(plain, result)
        return result, recording

    def _hosts_of_arguments(self, leaves: list[Any]) -> dict[int, int]:
        """The numbers of arguments on the host by their addresses."""
        found: dict[int, int] = {}
        for number, each in enumerate(leaves):
            if _is_on_host(each) and each.numel():
                if each._version != self._given_versions[number] or each.data_ptr() in found:
                    raise Unfit(f"argument {number} is changed on the host, or given twice")
                if each.is_contiguous():
                    found[each.data_ptr()] = number
        return found

    def _slots_of_arguments(self, leaves: list[Any], before: dict[str, int]) -> dict[int, int]:
        """The numbers of arguments by their slots; raises Unfit if one is not alone there."""
        slots: dict[int, int] = {}
        reached = {slot: path for path, slot in before.items()}
        for number, each in enumerate(leaves):
            if not _is_sky(each):
                continue
            slot = self._slot(each)
            if slot in slots or slot in reached:
                other = reached.get(slot, f"argument {slots.get(slot)}")
                raise Unfit(f"argument {number} shares its memory with {other}; clone one of them")
            slots[slot] = number
        return slots

    # Before.

    def _plant_arguments(self, leaves: list[Any]) -> list[Any]:
        """Arguments whose numbers remember how they are used."""
        given = list(leaves)
        for number, leaf in enumerate(leaves):
            if type(leaf) is float:
                given[number] = self._leaf(("argument", number), leaf)
        return given

    def _leaf(self, which: Leaf, value: Any) -> Any:
        self._values[which] = value
        return self._scope.leaf(which, value)

    def _plant(self) -> list[Spot]:
        """Replace numbers that may change; returns their places."""
        groups = {id(group) for group in self.surroundings.groups}
        planted = []
        for place, value in self.surroundings.numbers.items():
            moves = home(place.container) in self.surroundings.moving
            # Whole numbers lose their history in what Python's own floats and lists do with them.
            if type(value) is not float and not (moves and type(value) is int):
                continue
            if place in self._varying or moves or id(place.container) in groups:
                place.set(self._leaf(place, value))
                planted.append(place)
        return planted

    def _uproot(self, planted: list[Spot]) -> None:
        """Have plain numbers in all places again."""
        for place in planted:
            with contextlib.suppress(KeyError, IndexError):
                place.set(plain(place.get()))
        for scheduler in self.surroundings.schedulers:
            for key, value in vars(scheduler).items():
                if isinstance(value, list):
                    value[:] = map(plain, value)
                else:
                    vars(scheduler)[key] = plain(value)

    def _of_optimizers(self, planted: list[Spot]) -> list[Spot]:
        """Those that schedulers look at and change."""
        groups, moving = {id(group) for group in self.surroundings.groups}, self.surroundings.moving
        return [
            each
            for each in planted
            if id(each.container) in groups or home(each.container) in moving
        ]

    def _slot(self, tensor: Any) -> int:
        slot = self.core.slot(self.index, tensor.untyped_storage().data_ptr())
        return -1 if slot is None else slot

    def _before(self) -> dict[str, int]:
        """The slots of all tensors of the device, by their paths."""
        return {
            path: self._slot(each)
            for path, each in self.surroundings.tensors.items()
            if _is_sky(each) and each.device.index == self.index
        }

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Have numbers that are read from tensors remember that."""
        import torch

        known = {id(each): path for path, each in self.surroundings.tensors.items()}
        recorder = self

        def item(self: Any) -> Any:
            value = torch._C.TensorBase.item(self)
            if self.device.type == "sky":
                recorder._items.append(recorder._leaf(("read", len(recorder._items)), value))
                return recorder._items[-1]
            path = known.get(id(self))
            if path not in recorder._told:
                recorder._looks_at_host = "item"
                return value
            is_later = self._version != recorder._versions[path]
            return recorder._leaf(("host", path, is_later), value)

        def looking(name: str) -> Callable[..., Any]:
            def look(self: Any, *arguments: Any, **options: Any) -> Any:
                if self.device.type == "cpu":
                    recorder._looks_at_host = name
                return getattr(torch._C.TensorBase, name)(self, *arguments, **options)

            return look

        names = ("__bool__", "__int__", "__float__", "__index__", "tolist", "numpy")
        torch.Tensor.item = item  # type: ignore[method-assign]
        for name in names:
            setattr(torch.Tensor, name, looking(name))
        try:
            yield
        finally:
            for name in ("item", *names):
                delattr(torch.Tensor, name)

    @contextlib.contextmanager
    def _scheduling(self, planted: list[Spot]) -> Iterator[None]:
        """Have schedulers see plain numbers: a replay runs them as they are."""

        def stepping(number: int, step: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if self._is_stepping:
                    return step(*args, **kwargs)
                if args or kwargs:
                    self._looks_at_host = "what it gives to a scheduler"
                self._uproot(self._of_optimizers(planted))
                self.steps[number] = self.steps.get(number, 0) + 1
                self._stepped_at = self.core.stats(self.index).operations
                self._is_stepping = True
                try:
                    return step(*args, **kwargs)
                finally:
                    self._is_stepping = False

            return run

        for number, each in enumerate(self.surroundings.schedulers):
            each.step = stepping(number, each.step)
        try:
            yield
        finally:
            for each in self.surroundings.schedulers:
                del each.step

    # After.

    def _explain(
        self,
        recording: TapedCall,
        ended: dict[Spot, Any],
        guards: Guards,
        others: dict[int, int],
    ) -> None:
        """Find what has changed besides the device's memory; raises Unfit where it is not known."""
        noted = recording.tape
        if noted.problem is not None:
            raise Unfit(*noted.problem)
        for index, operations in others.items():
            if self.core.stats(index).operations != operations:
                raise Unfit(f"it uses sky:{index} besides sky:{self.index}")
        if self._looks_at_host:
            raise Unfit(
                f"it looks at a tensor on the host ({self._looks_at_host}); do so outside, and "
                "give what comes of it as an argument"
            )
        recording.schedulers = tuple(sorted(self.steps.items()))
        if self.steps and self._stepped_at != self.core.stats(self.index).operations:
            raise Unfit("it steps a scheduler before other operations; do so at the end")
        found, now = self.surroundings, Surroundings.of(self._function, self.given)
        if now.problem:
            raise Unfit(f"it reaches {now.problem}")
        stepped = [found.schedulers[number] for number in self.steps]
        rates = {id(group) for each in stepped for group in each.optimizer.param_groups}
        for container, key, path in guards.differences():
            place = Spot(container, key, path)
            numbers = [
                each
                for each in now.numbers
                if each == place or (each.container is container and each.key == key)
            ]
            if id(container) in rates:
                self._varying.update(numbers)
            elif key is None or not numbers:
                raise Unfit(
                    f"it changes {path or 'a variable'}, which a replay would not: give what "
                    "changes as an argument, and return what comes of it"
                )
            else:
                self._note_number(recording, numbers[0], ended, path)
        self._note_hosts(recording, now)
        self._note_replaced(recording, now)
        self.surroundings = now

    def _note_number(
        self, recording: TapedCall, place: Spot, ended: dict[Spot, Any], path: str
    ) -> None:
        """A number that is another one now."""
        last = ended.get(place)
        if last is not None and last is not plain(last) and last.scope is self._scope:
            recording.updates[place] = last.index
        elif type(place.get()) is int:
            raise Unfit(
                f"it counts {path}, which is {place.get()} now: count outside, and give what "
                "follows from it as an argument"
            )
        elif place in ended or type(place.get()) is not float:
            raise Unfit(f"it sets {path} to {place.get()!r}, and replay does not know why")
        else:
            # The next recording follows it.
            self._varying.add(place)

    def _note_hosts(self, recording: TapedCall, now: Surroundings) -> None:
        for path, version in self._versions.items():
            tensor = now.tensors.get(path)
            if tensor is None or tensor._version == version:
                continue
            change = tensor.item() - self._told[path] if path in self._told else 0
            if change != 1 or tensor._version != version + 1:
                raise Unfit(f"it changes {path}, a tensor on the host, and not by counting on")
            recording.hosts[path] = change
            for later in (False, True):
                which = ("host", path, later)
                expected = tensor.item() if later else self._told[path]
                if self._values.get(which, expected) != expected:
                    raise Unfit(f"it reads {path} between two changes")

    def _note_replaced(self, recording: TapedCall, now: Surroundings) -> None:
        """Gradients that are other tensors now."""
        noted = recording.tape
        names = {slot: name for name, slot in noted.slots.items() if name in noted.living}
        for path, owner in now.owners.items():
            former = self.gradients.get(path)
            if owner.grad is former:
                continue
            if owner.grad is None or not _is_sky(owner.grad):
                raise Unfit(
                    f"it sets {path} to None, which was there before: begin with zero_grad(), or "
                    "have it keep the gradients (set_to_none=False)"
                )
            if self._slot(owner.grad) not in names:
                raise Unfit(f"{path} becomes a tensor that was there before")
            view = _view(owner.grad, names[self._slot(owner.grad)])
            recording.replaced[path] = (None if former is None else ("place", path)), view
        for number, leaf in enumerate(self.given):
            if _is_sky(leaf) and leaf.is_leaf and leaf.requires_grad:
                raise Unfit(
                    f"argument {number} requires gradients; make it a variable of the function's"
                )

    def _note_results(self, recording: TapedCall, result: Any, leaves: list[Any]) -> Any:
        """Find what comes back; returns it with plain numbers."""
        from torch.utils import _pytree as pytree

        flat, recording.tree = pytree.tree_flatten(result)
        noted = recording.tape
        names = {slot: name for name, slot in noted.slots.items() if name[0] != "made"}
        names |= {slot: name for name, slot in noted.slots.items() if name in noted.living}
        same = {id(each): path for path, each in self.surroundings.tensors.items()}
        kept = {view.storage for _, view in recording.replaced.values()}
        unread = set(range(len(noted.reads)))
        addresses = {read.address: at for at, read in enumerate(noted.reads)}
        on_host = {leaf.data_ptr() for leaf in flat if _is_on_host(leaf)}
        items = [at for at, read in enumerate(noted.reads) if read.address not in on_host]
        for leaf in flat:
            found = next((at for at, given in enumerate(leaves) if given is leaf), None)
            if found is not None and not isinstance(leaf, float):
                recording.results.append(Returned("argument", found))
            elif _is_sky(leaf) and id(leaf) in same:
                recording.results.append(Returned("same", same[id(leaf)]))
            elif _is_sky(leaf):
                slot = self._slot(leaf)
                name = names.get(slot, ("slot", slot))
                if _has_graph(leaf):
                    raise Unfit(
                        "it returns a tensor from which backward() can be called; call it in the "
                        "function, or return loss.detach()"
                    )
                if name[0] == "slot":
                    raise Unfit("it returns a tensor that replay cannot find where it comes from")
                kept.add(name)
                view = _view(leaf, name)
                if name[0] == "argument":
                    # Told from where the argument begins.
                    begin = leaves[int(name[1])].storage_offset()
                    view = dataclasses.replace(view, offset=view.offset - begin)
                recording.results.append(Returned("view", view))
            elif _is_on_host(leaf) and leaf.data_ptr() in addresses:
                at = addresses[leaf.data_ptr()]
                if (tuple(leaf.shape), leaf.stride()) != noted.reads[at][3:5]:
                    raise Unfit("it returns a part of what it has copied from the device")
                unread.discard(at)
                recording.results.append(Returned("read", (at, True)))
            elif any(leaf is each for each in self._items):
                at = items[next(n for n, each in enumerate(self._items) if each is leaf)]
                unread.discard(at)
                recording.results.append(Returned("read", (at, False)))
            elif getattr(leaf, "scope", None) is self._scope:
                recording.results.append(Returned("number", leaf.index))
            elif _is_on_host(leaf):
                raise Unfit(
                    "it returns a tensor on the host that it has not copied from the device"
                )
            elif self.steps and isinstance(leaf, float):
                raise Unfit("it returns a number that a scheduler may change; read that outside")
            else:
                recording.results.append(Returned("constant", leaf))
        if unread or len(items) != len(self._items):
            read = noted.reads[min(unread, default=0)]
            raise Unfit(
                "it reads a value of the device and does not return it; return the tensor, and "
                "read the value outside",
                read.line,
            )
        kept |= {read.storage for read in noted.reads}
        self._check_living(recording, kept)
        return pytree.tree_unflatten(list(map(plain, flat)), recording.tree)

    def _check_living(self, recording: TapedCall, kept: set[Name]) -> None:
        """What was made and still lives has to be known: somebody may look at it."""
        noted = recording.tape
        left = noted.living - kept
        if left:
            gc.collect()
            serial = self.core.serial(self.index)
            alive = {life.slot for life in self.core.living(serial)}
            left = {name for name in left if noted.slots[name] in alive}
        operations = [step for step in noted.steps if isinstance(step, TapedOperation)]
        for step in operations:
            if left.intersection(step.made):
                raise Unfit(
                    f"what {step.name} makes is kept after the call, where replay cannot find it: "
                    "return it, or let go of it (call backward() in the function, or use "
                    "torch.no_grad())",
                    step.line,
                )


@dataclass(frozen=True)
class _Argument:
    number: int

    def __call__(self, leaves: list[Any]) -> Any:
        return leaves[self.number]


@dataclass(frozen=True)
class _InPlace:
    place: Spot

    def __call__(self, leaves: list[Any]) -> Any:
        return self.place.get()


class _OnHost:
    """A number on the host, which changes by as much in each call."""

    def __init__(self, tensor: Any, change: float) -> None:
        self._tensor, self._change = tensor, change
        # Adding to its memory takes 0.5 us, and adding to the tensor 4 us.
        self._array = tensor.detach().numpy()
        self._version = -1
        self._look()

    def _look(self) -> None:
        if self._tensor._version != self._version:
            self._version, self._now = self._tensor._version, self._tensor.item()
            self._next = (self._array + self._array.dtype.type(self._change)).item()

    def before(self, leaves: list[Any]) -> Any:
        """What it is when the function begins."""
        self._look()
        return self._now

    def later(self, leaves: list[Any]) -> Any:
        """What it is after the function has changed it."""
        self._look()
        return self._next

    def change(self) -> None:
        """Change it as the function does."""
        self._look()
        self._array[...] = self._now = self._next
        self._next = (self._array + self._array.dtype.type(self._change)).item()


def _is_tensor(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor)


def _is_sky(leaf: Any) -> bool:
    return _is_tensor(leaf) and leaf.device.type == "sky"


def _is_on_host(leaf: Any) -> bool:
    return _is_tensor(leaf) and leaf.device.type == "cpu"


def _is_host(leaf: Any) -> bool:
    """Whether it is one number on the host."""
    return _is_on_host(leaf) and leaf.numel() == 1 and not leaf.dtype.is_complex


def _view(tensor: Any, name: Name) -> TensorView:
    code = DTYPES.index(str(tensor.dtype)[6:])
    return TensorView(name, code, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _has_graph(tensor: Any) -> bool:
    """Whether gradients can still flow back from it: `backward` frees what it has used."""
    todo, seen = [tensor.grad_fn], {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    getattr(node, name)
                except RuntimeError:
                    return False
        todo += [each for each, _ in node.next_functions]
    return tensor.grad_fn is not None


@functools.cache
def _references() -> int:
    """How often a gradient that nobody keeps is referred to where that is asked."""
    import torch

    owner = torch.zeros(1, requires_grad=True)
    owner.grad = torch.zeros(1)
    kept = [(owner.grad, 0)]
    return max(sys.getrefcount(each) for each, _ in kept)


def _described(tensor: Any) -> tuple[Any, ...]:
    """What a program takes for granted of a tensor of the device, besides its contents."""
    return (
        tensor.data_ptr(),
        tensor.requires_grad,
        tensor.shape,
        tensor.stride(),
        not tensor._backward_hooks,
        not tensor._post_accumulate_grad_hooks,
    )


def _random_states() -> tuple[Any, ...]:
    """The states of what draws random numbers on the host."""
    import torch

    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else ()
    return random.getstate(), str(drawn), torch.get_rng_state().numpy().tobytes()


class _Ready:
    """A program with all that is to be looked at and changed on this side."""

    group: list[TapedCall]

    def __init__(self, recorder: _Recorder, plan: Plan) -> None:
        import torch
        from torch.utils import _pytree as pytree

        self._core: Core = recorder.core
        self._index = recorder.index
        self._opening = self._core.openings[self._index]
        sample = plan.sample
        found = recorder.surroundings
        used = {str(which) for kind, which in sample.tape.names if kind == "place"}
        # Gradients that it neither uses nor makes are another function's, which may keep them.
        others = found.owners.keys() - used - sample.replaced.keys()
        self._sample = sample
        self._tensors = {path: each for path, each in found.tensors.items() if path not in others}
        self._other_gradients = [
            (found.owners[path], found.owners[path].grad is None) for path in others
        ]
        self._schedulers = [
            found.schedulers[number] for number, count in sample.schedulers for _ in range(count)
        ]
        self._hosts = {
            path: _OnHost(found.tensors[path], change) for path, change in sample.hosts.items()
        }
        serial = self._core.serial(self._index)

        def slot_of(name: Name) -> int:
            kind, which = name
            if kind == "slot":
                return int(which)
            tensor = found.tensors[str(which)] if kind == "place" else sample.arguments[int(which)]
            slot = self._core.slot(self._index, tensor.untyped_storage().data_ptr())
            if slot is None:
                raise Unfit(f"{which} is not on the device any more")
            return slot

        self.program = KeptProgram(self._core, self._index, plan, slot_of)
        weakref.finalize(self, self.program.drop)
        self._held = [
            self._core.alias(serial, int(name[1]))
            for name in sample.tape.names
            if name[0] == "slot"
        ]
        more = [*sample.updates.values()]
        more += [each.value for each in sample.results if each.kind == "number"]
        leaves, self._compute = numbers_for(plan, more)
        self._find = [self._finder(leaf) for leaf in leaves]
        self._letters = [number.letter for _, number, _ in plan.varying]
        self._integers = [at for at, letter in enumerate(self._letters) if letter == "i"]
        self._reals = [at for at, letter in enumerate(self._letters) if letter != "i"]
        self._updates = [*sample.updates]
        # What has changed once may change again, where it is known what follows from it.
        moving = {each for each in found.numbers if home(each.container) in found.moving}
        free = {leaf for leaf in plan.loose if isinstance(leaf, Spot)} | {*sample.updates} | moving
        self._guards = found.guards(free)
        self._constant = [
            (self._finder(leaf), value)
            for leaf, value in sample.leaves.items()
            if leaf not in plan.loose and not isinstance(leaf, Spot)
        ]
        self._device_tensors = [each for each in self._tensors.values() if _is_sky(each)]
        self._described = [*map(_described, self._device_tensors)]
        # What the function lets go of without a look at it may be anything.
        remade = set(self.program.carried.values()) - used
        self._remade = [
            (owner, owner.grad) for path, owner in found.owners.items() if path in remade
        ]
        self._owners = [
            each for each in found.owners.items() if each[0] not in others and each[0] not in remade
        ]
        # As the function begins: one that it makes anew then is not there.
        self._gradients = [
            None if recorder.gradients.get(path) is None else owner.grad
            for path, owner in self._owners
        ]
        changed = {id(found.tensors[path]) for path in self._hosts}
        self._host_tensors = [
            each for each in found.tensors.values() if _is_on_host(each) and id(each) not in changed
        ]
        self._host_versions = [each._version for each in self._host_tensors]
        self._host_contents = [
            (each, each.clone()) for each in self._host_tensors if each.nbytes <= HOST_MOST
        ]
        self._given_on_host = []
        uploaded = {each.argument for each in sample.tape.steps if isinstance(each, Uploaded)}
        for number, each in enumerate(recorder.given):
            if _is_on_host(each) and number not in uploaded:
                if each.nbytes > HOST_MOST:
                    raise Unfit(f"argument {number} is used on the host; move it to the device")
                self._given_on_host.append((number, each.clone()))
        self._fixed = [
            (number, each.data_ptr())
            for number, each in enumerate(sample.arguments)
            if _is_sky(each) and number not in self.program.inputs
            if ("argument", number) in sample.tape.names
        ]
        self._from_host = [
            at
            for at, number in enumerate(self.program.inputs)
            if _is_on_host(sample.arguments[number])
        ]
        written = {name for step in sample.tape.steps for name in getattr(step, "written", ())}
        self._written = [self._tensors[str(which)] for kind, which in written if kind == "place"]
        self._setters: list[tuple[Any, int]] = []
        for path, at in self.program.assigned.items():
            if path not in found.owners:
                raise Unfit(f"{path} becomes another tensor in each call")
            self._setters.append((found.owners[path], at))
        self._on_device = [at for at, each in enumerate(recorder.given) if _is_sky(each)]
        self._reached = {each.untyped_storage()._cdata for each in self._device_tensors}
        self._device = torch.device("sky", self._index)
        # Which of the tensors that the program gives each view is, if it is one of them.
        given = iter(range(len(self.program.views)))
        self._fresh = [
            next(given)
            if each.storage[0] == "made" and each.storage not in self.program.kept
            else None
            for each in self.program.views
        ]
        self._results = list(self._getters())
        self._kinds = [type(sample.leaves[leaf]) for leaf in leaves]
        carried = [self._tensors[path] for path in self.program.carried.values()]
        own = (
            *(self._tensors.values(), self._device_tensors, self._gradients, self._written),
            [gradient for _, gradient in self._remade],
        )
        self._carried = [
            (each, _references() + sum(one is each for some in own for one in some))
            for each in carried
        ]
        self._is_single = sample.tree == pytree.tree_structure(0)

    def _finder(self, leaf: Leaf) -> Callable[[list[Any]], Any]:
        if isinstance(leaf, Spot):
            return _InPlace(leaf)
        assert isinstance(leaf, tuple)
        if leaf[0] == "argument":
            return _Argument(leaf[1])
        _, path, is_later = leaf
        number = self._hosts.get(path) or _OnHost(self._tensors[path], 0)
        return number.later if is_later else number.before

    def drop(self) -> None:
        """It is not used any more."""
        self.program.drop()

    def _fits(self, leaves: list[Any]) -> bool:
        import torch

        return (
            self._core.openings[self._index] == self._opening
            and self._guards.hold()
            and [*map(_described, self._device_tensors)] == self._described
            and all(a.grad is b for (_, a), b in zip(self._owners, self._gradients, strict=True))
            and all((each.grad is None) is is_none for each, is_none in self._other_gradients)
            and [each._version for each in self._host_tensors] == self._host_versions
            and all(torch.equal(each, before) for each, before in self._host_contents)
            and all(leaves[number].data_ptr() == at for number, at in self._fixed)
            and all(same(find(leaves), value) for find, value in self._constant)
            and all(torch.equal(leaves[number], each) for number, each in self._given_on_host)
            and self._are_apart(leaves)
            # A gradient that the user keeps must not change.
            and all(sys.getrefcount(each) <= count for each, count in self._carried)
        )

    def _are_apart(self, leaves: list[Any]) -> bool:
        """Whether no argument shares its memory with another, or with what is reached."""
        storages = [leaves[at].untyped_storage()._cdata for at in self._on_device]
        return len({*storages}) == len(storages) and self._reached.isdisjoint(storages)

    def run(self, leaves: list[Any]) -> tuple[bool, Any]:
        """Have it done if all is as it was; whether it was, and what came of it."""
        import torch
        from torch.utils import _pytree as pytree

        if not self._fits(leaves):
            return False, None
        given = [find(leaves) for find in self._find]
        if [*map(type, given)] != self._kinds:
            return False, None
        try:
            numbers = self._compute(*given)
        except ArithmeticError:
            numbers = None  # the function raises it where it does
        if numbers is None:
            return False, None
        inputs = [leaves[number] for number in self.program.inputs]
        for at in self._from_host:
            inputs[at] = inputs[at].to(self._device, non_blocking=True)
        reals = [float(numbers[at]) for at in self._reals]
        integers = [numbers[at] for at in self._integers]
        made = self.program.run(inputs, reals, integers)
        for place, value in zip(self._updates, numbers[len(self._letters) :], strict=False):
            place.set(value)
        for number in self._hosts.values():
            number.change()
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        for owner, gradient in self._remade:
            if owner.grad is not gradient:
                owner.grad = gradient
        for owner, at in self._setters:
            owner.grad = self._view(at, made, inputs, leaves)
        for scheduler in self._schedulers:
            scheduler.step()
        computed = numbers[len(self._letters) + len(self._updates) :]
        flat = [get(made, inputs, leaves, computed) for get in self._results]
        return True, flat[0] if self._is_single else pytree.tree_unflatten(flat, self._sample.tree)

    def _view(self, at: int, made: list[Any], inputs: list[Any], leaves: list[Any]) -> Any:
        """One of the tensors of the program, or of those that were there before."""
        fresh = self._fresh[at]
        return self._base(at, inputs, leaves) if fresh is None else made[fresh]

    def _getters(self) -> Iterator[Callable[..., Any]]:
        """How the leaves of the result are found."""
        results = self._sample.results
        views = reads = sum(each.kind == "view" for each in results)
        own, computed = iter(range(views)), iter(range(len(results)))
        for each in results:
            if each.kind == "view":
                at = next(own)
                fresh = self._fresh[at]
                if fresh is None:
                    yield lambda m, i, v, n, at=at: self._base(at, i, v)
                else:
                    yield lambda m, i, v, n, fresh=fresh: m[fresh]
            elif each.kind == "argument":
                yield lambda m, i, v, n, at=each.value: v[at]
            elif each.kind == "read":
                number, is_tensor = each.value
                read = "cpu" if is_tensor else "item"
                yield (
                    lambda m, i, v, n, at=reads + number, read=read: getattr(
                        self._view(at, m, i, v), read
                    )()
                )
            elif each.kind == "number":
                at = next(computed)
                yield lambda m, i, v, n, at=at: n[at]
            else:
                value = self._tensors[each.value] if each.kind == "same" else each.value
                yield lambda m, i, v, n, value=value: value

    def _base(self, at: int, inputs: list[Any], leaves: list[Any]) -> Any:
        """A tensor over a storage that was there before."""
        view = self.program.views[at]
        kind, which = view.storage
        if view.storage in self.program.carried:
            # The next call changes it.
            base = self._tensors[self.program.carried[view.storage]]
            return base.detach().as_strided(view.sizes, view.strides, view.offset).clone()
        if view.storage in self.program.uploaded:
            base = inputs[self.program.uploaded[view.storage]]
        else:
            base = self._tensors[str(which)] if kind == "place" else leaves[int(which)]
        begin = base.storage_offset() if kind == "argument" else 0
        return base.detach().as_strided(view.sizes, view.strides, begin + view.offset)
