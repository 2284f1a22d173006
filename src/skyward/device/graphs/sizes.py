"""Sizes that are not the same in every call: as text, as expressions of symbols, and as numbers.

Of what follows from them, the sizes that were used last are kept.
"""

from __future__ import annotations

import ast
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

FUNCTIONS = (
    *(
        "FloorDiv",
        "CeilDiv",
        "CleanDiv",
        "Mod",
        "PythonMod",
        "ModularIndexing",
        "Max",
        "Min",
        "Abs",
    ),
    *("PowByNatural", "IntTrueDiv", "FloatTrueDiv", "ToFloat"),
    *("CeilToInt", "FloorToInt", "TruncToInt", "RoundToInt"),
)
"""What sizes are computed with, besides the signs of arithmetic. Attention on a GPU has results of
`32*CeilToInt(IntTrueDiv(s0, 32))` rows."""
PYTHONS = {
    "max": "Max",
    "min": "Min",
    "abs": "Abs",
    "float": "ToFloat",
    "round": "RoundToInt",
    "math.ceil": "CeilToInt",
    "math.floor": "FloorToInt",
    "math.trunc": "TruncToInt",
}
"""The same in Python, as the compiler writes the strides of results that its code has."""
KNOWN_MAX = 256
"""For how many different sizes a graph keeps what follows from them."""


def parsed(text: str, symbols: Mapping[str, Any]) -> Any:
    """An expression of sizes as sympy has it. Not by `sympify`, which would run any code."""
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy import functions

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return sympy.Integer(number)
            case ast.Constant(value=float(number)):
                return sympy.Float(number)
            case ast.Name(id=name) if name in symbols:
                return symbols[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in binary:
                return binary[type(op)](value(left), value(right))
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                parts = value(left), value(right)
                are_whole = all(part.is_integer for part in parts)
                return (functions.IntTrueDiv if are_whole else functions.FloatTrueDiv)(*parts)
            case ast.Call(func=func, args=given, keywords=[]):
                written = ast.unparse(func)
                name = PYTHONS.get(written, written)
                if name in FUNCTIONS:
                    made = getattr(functions, name, None) or getattr(sympy, name)
                    return made(*map(value, given))
        raise ValueError(f"a size cannot be {text!r}")

    binary: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Pow: operator.pow,
        ast.FloorDiv: functions.FloorDiv,
        ast.Mod: functions.PythonMod,
    }
    return value(ast.parse(text, mode="eval").body)


def expression_of(number: Any) -> Any:
    """A number, or a symbolic one, as sympy has it."""
    import sympy
    import torch

    if isinstance(number, torch.SymInt):
        return number.node.expr
    return sympy.Integer(number) if isinstance(number, int) else number


class Following:
    """Numbers that follow from those that a graph gets, each of them once."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = [expression_of(number) for number in given]
        self._symbols = {one for one in self._given if getattr(one, "is_Symbol", False)}
        self._wanted: dict[Any, int] = {}
        self._compute: Callable[..., Sequence[int]] | None = None
        self._known: Recent[tuple[int, ...], list[int]] = Recent(KNOWN_MAX)

    @property
    def symbols(self) -> dict[str, Any]:
        """The symbols among the numbers that the graph gets, by their names."""
        return {str(symbol): symbol for symbol in self._symbols}

    def add(self, expression: Any) -> int | None:
        """Where this one will be among the numbers of a call; None if it does not follow."""
        import sympy

        if not isinstance(expression, sympy.Expr) or not expression.free_symbols <= self._symbols:
            return None
        self._compute = None
        return self._wanted.setdefault(expression, len(self._wanted))

    def __call__(self, given: Sequence[int]) -> list[int]:
        if not self._wanted:
            return []
        key = tuple(given)
        found = self._known.find(key)
        return self._known.keep(key, self.computed(key)) if found is None else found

    def computed(self, given: Sequence[int]) -> list[int]:
        """The numbers of a call, which are not kept."""
        if self._compute is None:
            self._compute = self._computing()
        return [int(number) for number in self._compute(*given)]

    def _computing(self) -> Callable[..., Sequence[int]]:
        """All that is wanted as one function: `subs` takes a millisecond for each."""
        import torch
        from torch.utils._sympy.printers import PythonPrinter

        names = [
            str(one) if one in self._symbols else f"unused{at}"
            for at, one in enumerate(self._given)
        ]
        wanted = ", ".join(PythonPrinter().doprint(one) for one in self._wanted)
        # The symbols' names are the tracer's, and whatever else is in there `parsed` has made.
        code = f"lambda {', '.join(names)}: [{wanted}]"
        made: Callable[..., Sequence[int]] = eval(code, {"math": math, "torch": torch})
        return made


Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """A mapping of at most `limit` entries: it keeps what was used last, and forgets the rest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key) -> Value | None:
        """The value of a key, if it is known; it counts as used."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def keep(self, key: Key, value: Value) -> Value:
        """Add an entry, for which the one that was used longest ago may have to go."""
        self._entries[key] = value
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
