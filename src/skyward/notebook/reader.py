"""The reader of a cell: which names it takes from the notebook, and its code as a function."""

from __future__ import annotations

import ast
import builtins
import symtable
import types
from collections.abc import Mapping
from typing import Any

from skyward.errors import ConfigurationError

NAME = "cell"
"""The name of a cell's function in tracebacks."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def read_cell(source: str, file: str, notebook: Mapping[str, Any]) -> types.FunctionType:
    """A cell as a function that takes no arguments and assigns globals of its own.

    Its globals are what the cell reads from the notebook. It returns the value of the cell's last
    expression, or None. Raises `SyntaxError`, and `NameError` for a name that is nowhere defined.
    """
    # As a cell first: a function would accept `return`, for example.
    compile(source, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    tree = ast.parse(source, file)
    taken = _taken_names(tree)
    assigned = _assigned_names(source, file)
    space: dict[str, Any] = {"__name__": "__main__"}
    for name, line in taken.items():
        if name in notebook:
            space[name] = notebook[name]
        elif name not in assigned and not hasattr(builtins, name):
            raise NameError(
                f"name {name!r} is not defined in this notebook ({file}, line {line}); define or "
                "import it in a cell before, or in this one",
                name=name,
            )
    function = _as_function(tree, source, assigned)
    exec(compile(function, file, "exec", dont_inherit=True), space)
    made = space.pop(NAME)
    assert isinstance(made, types.FunctionType)
    if NAME in taken and NAME in notebook:
        space[NAME] = notebook[NAME]
    return made


def _assigned_names(source: str, file: str) -> set[str]:
    """The names that a cell assigns, imports or defines at its top level."""
    # symtable refuses `await` outside of functions, and needs to see only what is bound.
    tree = _WithoutAwait().visit(ast.parse(source, file))
    table = symtable.symtable(ast.unparse(tree), file, "exec")
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()}


class _WithoutAwait(ast.NodeTransformer):
    """Replaces what only coroutines may contain, at the top level of a cell."""

    def visit_Await(self, node: ast.Await) -> ast.AST:
        found: ast.AST = self.visit(node.value)
        return found

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.For(**dict(ast.iter_fields(node))), node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.With(**dict(ast.iter_fields(node))), node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.is_async = 0
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node


def _taken_names(tree: ast.Module) -> dict[str, int]:
    """The names that a cell may read before it assigns them, with the line of the first use."""
    taken: dict[str, int] = {}
    _take(tree.body, set(), taken)
    return taken


def _take(body: list[ast.stmt], certain: set[str], taken: dict[str, int]) -> None:
    """Add the names that statements take; `certain` are those that are assigned in any case."""
    for statement in body:
        match statement:
            case ast.For() | ast.AsyncFor():
                _take_from(statement.iter, certain, taken)
                _take(statement.body, certain | _names_in([statement.target]), taken)
                _take(statement.orelse, set(certain), taken)
            case ast.With() | ast.AsyncWith():
                for item in statement.items:
                    _take_from(item.context_expr, certain, taken)
                    if item.optional_vars is not None:
                        _take_from(item.optional_vars, certain, taken)
                        certain |= _names_in([item.optional_vars])
                _take(statement.body, certain, taken)
            case ast.If() | ast.While():
                _take_from(statement.test, certain, taken)
                _take(statement.body, set(certain), taken)
                _take(statement.orelse, set(certain), taken)
            case ast.Try() | ast.TryStar():
                for part in (statement.body, statement.orelse, statement.finalbody):
                    _take(part, set(certain), taken)
                for handler in statement.handlers:
                    if handler.type is not None:
                        _take_from(handler.type, certain, taken)
                    _take(handler.body, certain | {handler.name or ""}, taken)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for decorator in statement.decorator_list:
                    _take_from(decorator, certain, taken)
                certain.add(statement.name)
                _take_from(statement, certain, taken)
            case _:
                _take_from(statement, certain, taken)
                certain |= _surely_assigned(statement)


def _take_from(part: ast.AST, certain: set[str], taken: dict[str, int]) -> None:
    reader = _NamesRead()
    reader.visit(part)
    for name, line in reader.reads.items():
        if name not in certain:
            taken.setdefault(name, line)


def _surely_assigned(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.Assign(targets=targets):
            return _names_in(targets)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            return _names_in([target])
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
        case ast.ClassDef(name=name):
            return {name}
        case _:
            return set()


def _names_in(targets: list[ast.expr]) -> set[str]:
    return {
        node.id
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


class _NamesRead(ast.NodeVisitor):
    """Collects the names that a statement reads from outside, also in functions inside it."""

    def __init__(self) -> None:
        self.reads: dict[str, int] = {}

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, (ast.Load, ast.Del)):
            self.reads.setdefault(node.id, node.lineno)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.reads.setdefault(node.target.id, node.lineno)
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        for name in node.names:
            self.reads.setdefault(name, node.lineno)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        inner = _NamesRead()
        body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else [*node.body]
        for part in body:
            inner.visit(part)
        own = _own_names(node)
        own |= _parameters_of(node)
        if not isinstance(node, ast.Lambda):
            for decorator in node.decorator_list:
                self.visit(decorator)
            if node.returns is not None:
                inner.visit(node.returns)
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg) and argument.annotation is not None:
                inner.visit(argument.annotation)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for name, line in inner.reads.items():
            if name not in own:
                self.reads.setdefault(name, line)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        inner = _NamesRead()
        inner.generic_visit(node)
        own = _bound_in(node.body) | _parameters_of(node)
        for name, line in inner.reads.items():
            if name not in own:
                self.reads.setdefault(name, line)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._visit_comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._visit_comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._visit_comprehension(node)

    def _visit_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> None:
        inner = _NamesRead()
        inner.generic_visit(node)
        own = _names_in([part.target for part in node.generators])
        for name, line in inner.reads.items():
            if name not in own:
                self.reads.setdefault(name, line)


def _own_names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """A function's parameters and local names."""
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {each.arg for each in every}
    names |= {each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None}
    return names if isinstance(node, ast.Lambda) else names | _bound_in(node.body)


def _parameters_of(node: ast.AST) -> set[str]:
    """The type parameters of a generic function or class, which Python has from 3.12 on."""
    return {each.name for each in getattr(node, "type_params", ())}


def _bound_in(body: list[ast.stmt]) -> set[str]:
    """The names that the statements of a function or class assign there."""
    names: set[str] = set()
    declared: set[str] = set()
    todo: list[ast.AST] = list(body)
    while todo:
        part = todo.pop()
        match part:
            case ast.Global(names=more):
                declared |= set(more)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                names |= {name} if name is not None else set()
            case ast.MatchMapping(rest=name) if name is not None:
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name):
                names.add(name)
        if not isinstance(part, _SCOPES):
            todo += ast.iter_child_nodes(part)
    return names - declared


class _Unannotated(ast.NodeTransformer):
    """Drops annotations at the top level, which a function's global names cannot have."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, _SCOPES) else super().visit(node)


def _as_function(tree: ast.Module, source: str, assigned: set[str]) -> ast.Module:
    is_coroutine = _awaits(tree)
    body: list[ast.stmt] = [_Unannotated().visit(statement) for statement in tree.body]
    if body and isinstance(last := body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        body[-1] = ast.copy_location(ast.Return(last.value), last)
    if assigned:
        body.insert(0, ast.Global(sorted(assigned)))
    # A template, since the fields of a definition differ between versions of Python.
    made = ast.parse(f"{'async ' if is_coroutine else ''}def {NAME}(): pass")
    definition = made.body[0]
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    definition.body = body or [ast.Pass()]
    return ast.fix_missing_locations(made)


def _awaits(tree: ast.Module) -> bool:
    todo: list[ast.AST] = list(tree.body)
    while todo:
        part = todo.pop()
        if isinstance(part, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return True
        if isinstance(part, ast.comprehension) and part.is_async:
            return True
        if not isinstance(part, _SCOPES):
            todo += ast.iter_child_nodes(part)
    return False


def wanted_names(given: str) -> tuple[str, ...]:
    """The names in the value of `-o`, such as `a,b`."""
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if not name.isidentifier():
            raise ConfigurationError(f"-o {given}: {name!r} is not a name; write -o loss,model")
    return names
