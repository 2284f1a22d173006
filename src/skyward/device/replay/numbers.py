"""Numbers that remember how they were computed, so that they can be computed again.

While a function is recorded, the numbers that may differ from call to call are of these classes.
They go through Python's arithmetic as any others do, and reach the device as plain numbers.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Leaf = Hashable
Formula = tuple[Any, ...]
"""("leaf", which), or a function's name and its operands, each ("at", index) or ("is", value)."""

ARITHMETIC = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "lshift": "<<",
    "rshift": ">>",
    "and": "&",
    "or": "|",
    "xor": "^",
}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
SIGNS = ("neg", "pos", "abs")
FUNCTIONS = (
    *("sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "tanh"),
    *("atan", "floor", "ceil", "trunc", "pow", "fabs", "isnan", "isinf", "isfinite", "copysign"),
)
"""Of the module `math`."""


@dataclass
class Scope:
    """The numbers of one recording, in the order in which they were made."""

    values: list[float | int] = field(default_factory=list)
    formulas: list[Formula] = field(default_factory=list)
    conditions: list[tuple[Formula, bool]] = field(default_factory=list)
    """What was asked of them, and what came of it."""

    def leaf(self, which: Leaf, value: float | int) -> Any:
        """A number that is given."""
        return self._note(("leaf", which), value)

    def _note(self, formula: Formula, value: Any) -> Any:
        kind = _KINDS.get(type(value))
        if kind is None:
            # Of a class that nobody follows, as NumPy's numbers.
            for operand, index in formula[1:]:
                if operand == "at":
                    self._fix(index)
            return value
        self.values.append(value)
        self.formulas.append(formula)
        made = kind(value)
        made.scope, made.index = self, len(self.values) - 1
        return made

    def compute(self, name: str, value: Any, *operands: Any) -> Any:
        """A number that was computed from others."""
        return self._note((name, *map(_operand, operands)), value)

    def pin(self, number: Any) -> None:
        """The number has gone where it cannot be followed: it has to be the same each time."""
        self._fix(number.index)

    def _fix(self, index: int) -> None:
        self.conditions.append((("eq", ("at", index), ("is", self.values[index])), True))

    def decide(self, name: str, value: bool, *operands: Any) -> bool:
        """Something that was asked of numbers."""
        self.conditions.append(((name, *map(_operand, operands)), value))
        return value


def _operand(number: Any) -> tuple[str, Any]:
    return ("at", number.index) if isinstance(number, Traced) else ("is", number)


def plain(number: Any) -> Any:
    """The number without its history."""
    if isinstance(number, TracedFloat):
        return float.__pos__(number)
    return int.__pos__(number) if isinstance(number, TracedInt) else number


class Traced:
    """A number that remembers where it comes from."""

    scope: Scope
    index: int

    def __reduce__(self) -> tuple[Any, ...]:
        return type(plain(self)), (plain(self),)

    def __int__(self) -> int:
        # Python wants a plain number here.
        found = int(plain(self))
        self.scope.decide("eq", True, self.scope.compute("int", found, self), found)
        return found

    __trunc__ = __int__

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self


class TracedFloat(Traced, float):
    """A number with a fraction."""


class TracedInt(Traced, int):
    """A whole number."""


PINNED = (
    *("__hash__", "__str__", "__repr__", "__format__", "__float__", "__index__", "__floor__"),
    *("__ceil__", "__complex__", "__invert__", "is_integer", "as_integer_ratio", "hex"),
    *("bit_length", "bit_count", "to_bytes", "conjugate"),
)
"""What gives something of a number that is not followed."""


_KINDS: dict[type, Any] = {float: TracedFloat, int: TracedInt}


def _binary(name: str, function: Callable[[Any, Any], Any], *, decides: bool) -> Any:
    def method(self: Traced, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        result = function(plain(self), plain(other))
        note = self.scope.decide if decides else self.scope.compute
        return note(name, result, self, other)

    return method


def _reflected(name: str, function: Callable[[Any, Any], Any]) -> Any:
    def method(self: Traced, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return self.scope.compute(name, function(plain(other), plain(self)), other, self)

    return method


def _unary(name: str, function: Callable[[Any], Any]) -> Any:
    return lambda self: self.scope.compute(name, function(plain(self)), self)


def _rounded(self: Any, digits: int | None = None) -> Any:
    operands = () if digits is None else (digits,)
    return self.scope.compute("round", round(plain(self), *operands), self, *operands)


def _pinned(function: Callable[..., Any]) -> Any:
    def method(self: Traced, *arguments: Any) -> Any:
        self.scope.pin(self)
        return function(plain(self), *arguments)

    return method


def _define() -> None:
    for kind, base in ((TracedFloat, float), (TracedInt, int)):
        setattr(kind, "__round__", _rounded)  # noqa: B010
        for name in PINNED:
            if callable(function := getattr(base, name, None)):
                setattr(kind, name, _pinned(function))
        for name in ARITHMETIC:
            if not hasattr(base, f"__{name}__"):
                continue
            function = getattr(operator, name, None) or getattr(operator, name + "_")
            setattr(kind, f"__{name}__", _binary(name, function, decides=False))
            setattr(kind, f"__r{name}__", _reflected(name, function))
        for name in COMPARISONS:
            function = getattr(operator, name)
            setattr(kind, f"__{name}__", _binary(name, function, decides=True))
        for name in SIGNS:
            setattr(kind, f"__{name}__", _unary(name, getattr(operator, name)))
        setattr(kind, "__bool__", lambda self: self.scope.decide("ne", plain(self) != 0, self, 0))  # noqa: B010


_define()


@contextlib.contextmanager
def followed_through_math() -> Iterator[None]:
    """Have the functions of `math` follow numbers."""

    def following(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def follow(*numbers: Any) -> Any:
            result = function(*map(plain, numbers))
            scopes = [number.scope for number in numbers if isinstance(number, Traced)]
            if not scopes:
                return result
            note = scopes[0].decide if isinstance(result, bool) else scopes[0].compute
            return note("math." + name, result, *numbers)

        return follow

    before = {name: getattr(math, name) for name in FUNCTIONS}
    try:
        for name, function in before.items():
            setattr(math, name, following(name, function))
        yield
    finally:
        for name, function in before.items():
            setattr(math, name, function)


def compiled(
    formulas: Sequence[Formula],
    leaves: Sequence[Leaf],
    wanted: Sequence[int],
    conditions: Sequence[tuple[Formula, bool]],
) -> Callable[..., list[Any] | None]:
    """A function from the leaves to the numbers wanted; None if a condition does not hold."""
    places = {leaf: f"l{number}" for number, leaf in enumerate(leaves)}
    constants: list[Any] = []
    needed: set[int] = set()
    todo = [*wanted, *(at for each, _ in conditions for at in _indices(each))]
    while todo:
        if (index := todo.pop()) not in needed:
            needed.add(index)
            todo += _indices(formulas[index])

    def written(formula: Formula) -> str:
        name, *operands = formula
        if name == "leaf":
            return places[operands[0]]
        words = []
        for kind, operand in operands:
            if kind == "is":
                constants.append(operand)
                words.append(f"c{len(constants) - 1}")
            else:
                words.append(f"v{operand}")
        if name in ARITHMETIC or name in COMPARISONS:
            return f"{words[0]} {ARITHMETIC.get(name) or COMPARISONS[name]} {words[1]}"
        return f"{name}({', '.join(words)})"

    lines = [f"    v{index} = {written(formulas[index])}" for index in sorted(needed)]
    for formula, outcome in dict.fromkeys(conditions):
        lines.append(f"    if ({written(formula)}) != {outcome}: return None")
    lines.append(f"    return [{', '.join(f'v{index}' for index in wanted)}]")
    given = ", ".join([*places.values(), *(f"c{at}=c{at}" for at in range(len(constants)))])
    space: dict[str, Any] = {"math": math, "neg": operator.neg, "pos": operator.pos}
    space |= {f"c{at}": value for at, value in enumerate(constants)}
    exec("\n".join([f"def numbers({given}):", *lines]), space)
    found: Callable[..., list[Any] | None] = space["numbers"]
    return found


def dependent(formulas: Sequence[Formula], leaves: set[Leaf]) -> list[bool]:
    """Which numbers depend on some of these leaves."""
    found: list[bool] = []
    for formula in formulas:
        is_leaf = formula[0] == "leaf"
        found.append(
            formula[1] in leaves if is_leaf else any(found[at] for at in _indices(formula))
        )
    return found


def leaves_of(formulas: Sequence[Formula], wanted: Sequence[int]) -> set[Leaf]:
    """The leaves that numbers depend on."""
    seen: set[int] = set()
    found: set[Leaf] = set()
    todo = list(wanted)
    while todo:
        if (index := todo.pop()) not in seen:
            seen.add(index)
            formula = formulas[index]
            if formula[0] == "leaf":
                found.add(formula[1])
            todo += _indices(formula)
    return found


def _indices(formula: Formula) -> list[int]:
    if formula[0] == "leaf":
        return []
    return [operand for kind, operand in formula[1:] if kind == "at"]
