"""`sky.replay`: a function on a device is recorded, and then done again with one message."""

from __future__ import annotations

import functools
import linecache
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

from skyward.device.core import core
from skyward.device.replay.program import TapedCall, Unfit, plan
from skyward.device.replay.ready import Ready
from skyward.device.replay.recorder import Recorder, lines
from skyward.device.replay.surroundings import Spot, Surroundings, kind_of
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
        key = (tree, *map(kind_of, leaves), *_mode())
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
            file, number = lines.at(problem.line)
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
        self.ready: list[Ready] = []
        self.problem: Unfit | None = None
        self._groups: list[list[TapedCall]] = []
        """Calls that did the same, each."""
        self._varying: set[Spot] = set()
        """Numbers that were seen to change."""
        self._renewed: list[Spot] = []
        """Where tensors are kept that each call makes anew."""
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
                recorder = Recorder(self._function, self._varying, self._renewed, leaves)
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

    def _consider(self, recording: TapedCall, recorder: Recorder) -> None:
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
            ready = Ready(recorder, found)
        except Unfit as problem:
            self.problem = problem
            return
        self._in_vain = 0
        for sample in group:
            for number in found.inputs:
                sample.arguments[number] = None
        ready.group = group
        others = [each for each in self.ready if each.group is not group]
        self.ready = [ready, *others][:PROGRAMS_MOST]
