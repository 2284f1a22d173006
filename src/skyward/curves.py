"""The user's own numbers: `log` takes them, anywhere, and curves keep what a page draws of them."""

from __future__ import annotations

import operator
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from skyward import context, functions
from skyward.errors import ConfigurationError

NAME_MOST = 200
"""How many characters a name has at most."""
NAMES_MOST = 1000
"""How many numbers one call may log."""
STEP_MOST = 2**53
"""Steps up to this are exact in a browser, too."""
POINTS = 1000
"""How many points a curve has at most; of a longer one, every second is kept, then every fourth."""
CURVES = 200
"""How many curves a pool keeps for pages."""
STEPS = 10_000
"""Of how many further curves a pool counts the steps."""


class Taker(Protocol):
    """Takes the numbers that a worker's tasks log."""

    def take(self, values: dict[str, float], step: int | None) -> None: ...


_taker: Taker | None = None


def install(taker: Taker | None) -> None:
    """Called once by a worker process, to take what its tasks log."""
    global _taker
    _taker = taker


# A process that a task forks has no connection to the client.
os.register_at_fork(after_in_child=lambda: install(None))


def log(
    values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **more: Any
) -> None:
    """Draw numbers on the page of the pool, and pass them on to the tracker that is set up.

    It works in a task, on the client inside a `with sky.Compute()` block, and outside of any pool,
    where only the tracker gets the numbers. Without `step`, each name counts its own steps. An
    array or a tensor of one element is taken with its `item()`, which waits for a device. Else the
    call waits for nothing in a task, and on the client for Weights & Biases alone.

    >>> sky.log(loss=0.3, accuracy=0.91, step=7)
    >>> sky.log({"train/loss": 0.3})
    """
    given = {**(values or {}), **more}
    if not 0 < len(given) <= NAMES_MOST:
        raise ConfigurationError(
            f"sky.log() got {len(given)} numbers, and takes {NAMES_MOST} in a call; log fewer, "
            "such as a mean for each layer"
            if given
            else "sky.log() got no number; write sky.log(loss=0.3, step=7)"
        )
    numbers = {name: _number(name, value) for name, value in given.items()}
    if step is not None:
        step = _step(step)
    if _taker is not None:
        _taker.take(numbers, step)
        return
    if context.own_pool is None:
        target = functions.active_compute()
    else:
        # In a process that a task has forked, which has only pools of its own.
        target = functions.current.get() or next(reversed(functions.active), None)
    take = getattr(target, "take_numbers", None)
    if take is not None:
        take(numbers, step)
    elif sys.modules.keys() & {"wandb", "mlflow"}:
        # Imported here: a worker never needs it.
        from skyward.listeners import track_outside

        track_outside(numbers, _outside.add(None, numbers, step))


def _number(name: Any, value: Any) -> float:
    if not isinstance(name, str) or not name.strip() or len(name) > NAME_MOST:
        raise ConfigurationError(
            f"sky.log({{{name!r}: ...}}): a name is text of 1 to {NAME_MOST} characters"
        )
    found, cause = value, None
    try:
        if hasattr(value, "item"):
            found = value.item()
        if not isinstance(found, (str, bytes, bytearray)):
            return float(found)
    except (TypeError, ValueError, RuntimeError, OverflowError) as problem:
        cause = problem
    shape = getattr(value, "shape", None)
    what = type(value).__name__ + (f" of shape {tuple(shape)}" if shape else "")
    raise ConfigurationError(
        f"sky.log({name}={_short(value)}): this {what} is not one number that a curve can have; "
        "give an int, a float, or an array or tensor of one element, such as loss.mean()"
    ) from cause


def _step(step: Any) -> int:
    cause = None
    try:
        found = operator.index(step.item() if hasattr(step, "item") else step)
        if abs(found) <= STEP_MOST:
            return found
    except (TypeError, ValueError, RuntimeError) as problem:
        cause = problem
    raise ConfigurationError(
        f"sky.log(step={_short(step)}): give a whole number of at most 2**53, or none"
    ) from cause


def _short(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except RuntimeError:
        # A tensor whose device is gone.
        text = object.__repr__(value)
    return text if len(text) <= 60 else text[:60] + "..."


Place = tuple[int, int] | None
"""The node and the worker that have logged something; None stands for the client."""
Told = dict[tuple[str, Place], tuple[int, int, int]]
Point = tuple[int, float]
"""A step and a value."""
News = tuple[str, Place, int, list[Point], Point]
"""Name and place of a curve; which of its points come in place of all from that number on; and the
last point, which may not be kept."""


class Curve:
    """The points of one name, thinned so that the whole run fits."""

    __slots__ = ("added", "last", "points", "stride")

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.stride, self.added = 1, 0
        self.last = (-1, 0.0)

    def add(self, step: int, value: float) -> None:
        """Add a point; of a long curve, only some are kept."""
        self.last = step, value
        if self.added % self.stride == 0:
            self.points.append(self.last)
            if len(self.points) > POINTS:
                self.points, self.stride = self.points[::2], self.stride * 2
        self.added += 1


class Curves:
    """The numbers of one pool, by name and place; any thread may add to them and read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._curves: dict[tuple[str, Place], Curve] = {}
        self._steps: dict[tuple[str, Place], int] = {}
        """The last step of each curve that is not kept, because there are too many."""

    @property
    def left_out(self) -> int:
        """How many curves are not kept."""
        return len(self._steps)

    def add(self, place: Place, values: Mapping[str, float], step: int | None) -> int:
        """Add values of a place; returns their step, which is counted if there is none."""
        with self._lock:
            if step is None:
                step = 1 + max(self._last_step(name, place) for name in values)
            for name, value in values.items():
                key = name, place
                curve = self._curves.get(key)
                if curve is None and len(self._curves) < CURVES:
                    curve = self._curves[key] = Curve()
                if curve is not None:
                    curve.add(step, value)
                elif key in self._steps or len(self._steps) < STEPS:
                    self._steps[key] = step
        return step

    def _last_step(self, name: str, place: Place) -> int:
        curve = self._curves.get((name, place))
        return self._steps.get((name, place), -1) if curve is None else curve.last[0]

    def news(self, told: Told) -> list[News]:
        """What has come since `told`, which is brought up to date, of each curve with news."""
        rows: list[News] = []
        with self._lock:
            for (name, place), curve in self._curves.items():
                stride, count, added = told.get((name, place), (0, 0, 0))
                if added == curve.added:
                    continue
                start = count if stride == curve.stride else 0
                told[name, place] = curve.stride, len(curve.points), curve.added
                rows.append((name, place, start, curve.points[start:], curve.last))
        return rows


_outside = Curves()
"""What is logged outside of a pool: only its steps are of use."""
