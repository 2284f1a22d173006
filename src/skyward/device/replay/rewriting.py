"""Users' functions, rewritten for a recorded call so that numbers keep their history.

Python's own floats, lists and ranges take a whole number of a subclass for a plain one: `0.1 * n`
and `table[n]` never ask it. So while a call is recorded, the user's functions run code that is
compiled from their source once more, in which such places go through here.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import functools
import linecache
import math
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from skyward.device.replay.numbers import FUNCTIONS, Traced, TracedInt, plain
from skyward.device.replay.surroundings import is_of_library, is_tensor

MARK = "skyward follows numbers here"
"""Stands in rewritten code where `Followed` belongs: source cannot name an object."""
OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
    ast.MatMult: "matmul",
}
ORDERS = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
HARMLESS = frozenset(
    id(getattr(builtins, name))
    for name in (
        *("abs", "all", "any", "bool", "callable", "classmethod", "delattr", "dict", "divmod"),
        *("format", "getattr", "globals", "hasattr", "id", "isinstance", "issubclass", "iter"),
        *("len", "list", "locals", "map", "max", "min", "next", "object", "pow", "print"),
        *("property", "repr", "reversed", "round", "set", "setattr", "sorted", "staticmethod"),
        *("str", "sum", "super", "tuple", "type", "vars", "zip", "eval", "exec", "dir"),
    )
)
"""They ask a number by its methods, only hand it on, or look at who calls them."""
FREE = ("skyward", "sys", "inspect")
"""Libraries whose functions are called as they are: some look at who calls them."""
KEEPING = ("append", "appendleft", "extend", "add", "update", "get", "setdefault")
"""Methods of Python's containers which do the same."""
GENERATED = frozenset(
    f"__{name}__"
    for name in ("init", "new", "repr", "eq", "hash", "lt", "le", "gt", "ge", "setattr", "delattr")
)
"""Methods that `dataclasses` and others make of text: they have no source to be read."""


class NotRewritableError(Exception):
    """A function's code cannot be compiled from its source."""


@contextlib.contextmanager
def rewritten(functions: Sequence[types.FunctionType]) -> Iterator[None]:
    """Have these functions run rewritten code. Raises NotRewritableError before any does."""
    before = [
        (each, each.__code__, rewrite(each.__code__))
        for each in functions
        if not _is_generated(each.__code__)
    ]
    try:
        for function, _, code in before:
            function.__code__ = code
        yield
    finally:
        for function, code, _ in before:
            function.__code__ = code


def _is_generated(code: types.CodeType) -> bool:
    """Whether it is a data class's or a named tuple's, which use numbers by their methods."""
    return code.co_filename.startswith("<string>") and code.co_name in GENERATED


def rewrite(code: types.CodeType) -> types.CodeType:
    """The same code, but following numbers; raises NotRewritableError."""
    found = _of_file(code.co_filename, "".join(linecache.getlines(code.co_filename)))
    if code not in found:
        raise NotRewritableError(f"the source of {code.co_name} is not to be had")
    return found[code]


@functools.lru_cache(maxsize=64)
def _of_file(name: str, source: str) -> dict[types.CodeType, types.CodeType]:
    """All code of a file, by what it is without being rewritten."""
    try:
        before = compile(source, name, "exec", dont_inherit=True)
        tree = ast.fix_missing_locations(_Rewriter().visit(ast.parse(source)))
        after = compile(tree, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    # Rewriting adds no functions, so these come in the same order.
    return dict(zip(_within(before), map(_filled, _within(after)), strict=True))


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _within(each)


def _filled(code: types.CodeType) -> types.CodeType:
    """With `Followed` in place of its mark."""

    def fill(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return _filled(constant)
        return Followed if constant == MARK else constant

    return code.replace(co_consts=tuple(map(fill, code.co_consts)))


class _Rewriter(ast.NodeTransformer):
    """Has operations, comparisons, indices and calls go through `Followed`."""

    def __init__(self) -> None:
        self._temporaries = 0

    def _call(self, name: str, *arguments: ast.expr) -> ast.expr:
        return ast.Call(ast.Attribute(ast.Constant(MARK), name, ast.Load()), [*arguments], [])

    def _temporary(self) -> str:
        self._temporaries += 1
        return f"@{self._temporaries}"  # no name of the user's

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = ast.Constant(OPERATORS[type(node.op)])
        return ast.copy_location(self._call("binary", name, node.left, node.right), node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        parts: list[ast.expr] = []
        left = node.left
        for at, (kind, right) in enumerate(zip(node.ops, node.comparators, strict=True)):
            again = right
            if at < len(node.ops) - 1:
                # What is in the middle is computed once, and only if it is needed.
                name = self._temporary()
                right = ast.NamedExpr(ast.Name(name, ast.Store()), right)
                again = ast.Name(name, ast.Load())
            parts.append(self._compared(left, kind, right))
            left = again
        whole = parts[0] if len(parts) == 1 else ast.BoolOp(ast.And(), parts)
        return ast.copy_location(whole, node)

    def _compared(self, left: ast.expr, kind: ast.cmpop, right: ast.expr) -> ast.expr:
        if type(kind) in ORDERS:
            return self._call("compare", ast.Constant(ORDERS[type(kind)]), left, right)
        if isinstance(kind, ast.In | ast.NotIn):
            found = self._call("contained", left, right)
            return found if isinstance(kind, ast.In) else ast.UnaryOp(ast.Not(), found)
        return ast.Compare(left, [kind], [right])

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        node.slice = self._indexed(node.slice)
        return node

    def _indexed(self, index: ast.expr) -> ast.expr:
        if isinstance(index, ast.Slice):
            for name in ("lower", "upper", "step"):
                if (part := getattr(index, name)) is not None:
                    setattr(index, name, self._call("pinned", part))
            return index
        if isinstance(index, ast.Tuple):
            index.elts = [*map(self._indexed, index.elts)]
            return index
        return index if isinstance(index, ast.Starred) else self._call("pinned", index)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.func = ast.copy_location(self._call("callee", node.func), node.func)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        target, before = node.target, list[ast.stmt]()

        def once(value: ast.expr) -> ast.expr:
            """It is used twice, and computed before."""
            name = self._temporary()
            before.append(ast.Assign([ast.Name(name, ast.Store())], value))
            return ast.Name(name, ast.Load())

        now: ast.expr
        if isinstance(target, ast.Name):
            now = ast.Name(target.id, ast.Load())
        elif isinstance(target, ast.Attribute):
            target.value = once(target.value)
            now = ast.Attribute(target.value, target.attr, ast.Load())
        elif isinstance(target.slice, ast.Slice | ast.Tuple):
            return node  # of arrays and lists, not of numbers
        else:
            target.value, target.slice = once(target.value), once(target.slice)
            now = ast.Subscript(target.value, target.slice, ast.Load())
        name = ast.Constant(OPERATORS[type(node.op)])
        value = self._call("inplace", name, now, node.value)
        after = ast.Assign([target], value)
        return [ast.copy_location(each, node) for each in (*before, after)]

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        # A pattern may be no call; it asks the number by its methods.
        node.guard = self.visit(node.guard) if node.guard else None
        node.body = [self.visit(each) for each in node.body]
        return node


class Followed:
    """What rewritten code calls."""

    @staticmethod
    def binary(name: str, left: Any, right: Any) -> Any:
        """`left + right`, and the like."""
        return _operate(name, f"__{name}__", left, right)

    @staticmethod
    def inplace(name: str, left: Any, right: Any) -> Any:
        """`left += right`, and the like."""
        return _operate(name, f"__i{name}__", left, right)

    @staticmethod
    def compare(name: str, left: Any, right: Any) -> Any:
        """`left < right`, and the like."""
        is_plain = isinstance(left, int | float) and not isinstance(left, Traced)
        if is_plain and isinstance(right, Traced):
            return getattr(right, f"__{MIRRORED[name]}__")(left)
        return getattr(operator, name)(left, right)

    @staticmethod
    def contained(value: Any, container: Any) -> bool:
        """`value in container`."""
        if isinstance(value, Traced) and type(container) in (list, tuple):
            return any(Followed.compare("eq", each, value) for each in container)
        return Followed.pinned(value) in container

    @staticmethod
    def pinned(value: Any) -> Any:
        """A plain number, which has to be the same in each call."""
        if isinstance(value, Traced):
            value.scope.pin(value)
            return plain(value)
        if type(value) in (list, tuple) and any(isinstance(each, Traced) for each in value):
            return type(value)(map(Followed.pinned, value))
        return value

    @staticmethod
    def callee(function: Any) -> Any:
        """The function, or one that does the same and lets no number get lost in it."""
        if id(function) in HARMLESS:
            return function
        if id(function) in _CONVERSIONS:
            return _CONVERSIONS[id(function)]
        if id(function) in _MATH:
            return getattr(math, _MATH[id(function)])
        if isinstance(function, functools.partial):
            inner = Followed.callee(function.func)
            return functools.partial(inner, *function.args, **function.keywords)
        root, owner = _root(function), getattr(function, "__self__", None)
        if not is_of_library(root) or root in FREE:
            return function
        if isinstance(function, types.FunctionType | types.MethodType | type):
            # Fractions keep their history in Python, whole numbers do not.
            return _Pinning(function, TracedInt)
        if root == "torch" or is_tensor(owner):
            return function  # what it gets is seen in what it does on the device
        is_container = isinstance(owner, list | dict | set | collections.deque)
        if is_container and function.__name__ in KEEPING:
            return function
        return _Pinning(function, Traced)


def _operate(name: str, method: str, left: Any, right: Any) -> Any:
    if isinstance(right, Traced) and not isinstance(left, Traced):
        reflected = getattr(right, f"__r{name}__", None)
        if isinstance(left, int | float) and reflected is not None:
            return reflected(left)
        if not is_tensor(left):
            right = Followed.pinned(right)
    elif isinstance(left, Traced) and not (isinstance(right, int | float) or is_tensor(right)):
        left = Followed.pinned(left)
    return getattr(operator, method)(left, right)


def _root(function: Any) -> str:
    """The library that a function or an object that is called is of."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
    else:
        found = getattr(function, "__module__", None) or getattr(owner, "__module__", None)
        module = found if isinstance(found, str) else type(function).__module__
    return module.partition(".")[0]


class _Pinning:
    """A function that nobody follows: what it gets of some kind has to be the same each time."""

    def __init__(self, function: Callable[..., Any], kind: type) -> None:
        self._function, self._kind = function, kind

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it with plain numbers."""
        given = [self._plain(each) for each in arguments]
        return self._function(*given, **{key: self._plain(each) for key, each in options.items()})

    def _plain(self, value: Any) -> Any:
        is_one = isinstance(value, self._kind) or type(value) in (list, tuple)
        return Followed.pinned(value) if is_one else value


def _converted(kind: type, value: Any = 0, *more: Any) -> Any:
    result = kind(plain(value), *more)
    return (
        value.scope.compute(kind.__name__, result, value) if isinstance(value, Traced) else result
    )


_CONVERSIONS = {id(kind): functools.partial(_converted, kind) for kind in (int, float)}
_MATH = {id(getattr(math, name)): name for name in FUNCTIONS}
