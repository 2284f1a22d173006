"""What a `%%sky` cell takes from the notebook, and how it becomes a function."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyward.notebook.cell import cell_call, shown
from skyward.notebook.reader import read_cell

from .conftest import only_in_all

NOTEBOOK: dict[str, Any] = {"a": 1, "b": 2, "xs": [1, 2, 3], "f": abs, "cell": "mine", "C": int}


def taken(source: str) -> set[str]:
    space = read_cell(source, "In [1]", NOTEBOOK).__globals__
    return {name for name in space if name in NOTEBOOK}


def run(source: str, *wanted: str) -> Any:
    return cell_call(read_cell(source, "In [1]", NOTEBOOK), wanted, "run")()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a + 1", {"a"}),
        ("a = 1\na + 1", set()),
        ("a = a + 1", {"a"}),
        ("a += 1", {"a"}),
        ("if b:\n    a = 1\na", {"a", "b"}),
        ("with open('x') as a:\n    b = a\nb", set()),
        ("import a\na.x", set()),
        ("for a in xs: print(a)", {"xs"}),
        ("for a in xs:\n    a = a + b\n    b = 1", {"xs", "b"}),
        ("while a: b = 1\nb", {"a", "b"}),
        ("[a for a in xs]", {"xs"}),
        ("[b for a in xs]", {"b", "xs"}),
        ("def g(a): return a + b", {"b"}),
        ("def g():\n    a = 1\n    return a", set()),
        ("def g():\n    global a\n    a = 1", {"a"}),
        ("def g(x=a): return x", {"a"}),
        ("g = lambda a: a + b", {"b"}),
        ("class D:\n    a = 1\n    c = a\n    def m(self): return b", {"b"}),
        ("def f(): return f()", set()),
        ("def g(x: C) -> C: return x", {"C"}),
        ("match a:\n    case [b, *xs]: pass\n    case {'k': 1, **C}: pass", {"a"}),
        ("try:\n    1\nexcept ValueError as a:\n    a", set()),
        ("try:\n    a = 1\nexcept C:\n    pass\na", {"a", "C"}),
        ("cell", {"cell"}),
        ("print('a')", set()),
    ],
)
def test_a_cell_takes_the_names_that_it_reads_before_it_assigns_them(
    source: str, names: set[str]
) -> None:
    assert taken(source) == names


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        ("a + b", "3"),
        ("a + b;", None),
        ("c = a", None),
        ("x: int = 5\ny: int\nx", "5"),
        ("def g(n): return n and g(n - 1)\ng(3)", "0"),
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", "'slept'"),
        ("async def gen():\n    yield a\n[x async for x in gen()]", "[1]"),
        ("[y := a, y]", "[1, 1]"),
        ("(lambda: [b for _ in xs])()", "[2, 2, 2]"),
        ("f(-7)", "7"),
        ("cell = 4\ncell", "4"),
        ("", None),
    ],
)
def test_a_cell_runs_as_it_would_in_the_notebook(source: str, plain: str | None) -> None:
    assert run(source).shown.get("text/plain") == plain


def test_names_come_back_and_the_notebook_is_unchanged() -> None:
    result = run("a += 10\nimport math as m\ndef g(): return a\nxs = g()", "a", "xs")

    assert result.values == {"a": 11, "xs": 11}
    assert NOTEBOOK["a"] == 1


def test_a_cell_can_run_twice_and_begins_afresh() -> None:
    call = cell_call(read_cell("a += 1\na", "In [1]", NOTEBOOK), (), "run")

    assert [call().shown["text/plain"] for _ in range(2)] == ["2", "2"]


@pytest.mark.parametrize(
    ("source", "problem", "message"),
    [
        (
            "\nprint(nowhere)",
            NameError,
            r"'nowhere' is not defined in this notebook \(In \[1\], line 2",
        ),
        ("return 1", SyntaxError, "'return' outside function"),
        ("1 +", SyntaxError, "invalid syntax"),
        ("!ls", SyntaxError, "invalid syntax"),
    ],
)
def test_a_cell_that_cannot_run_says_why(
    source: str, problem: type[Exception], message: str
) -> None:
    with pytest.raises(problem, match=message):
        read_cell(source, "In [1]", NOTEBOOK)


def test_a_value_is_shown_as_a_notebook_would() -> None:
    class Rich:
        def __repr__(self) -> str:
            return "rich"

        def _repr_html_(self) -> str:
            return "<b>rich</b>"

        def _repr_png_(self) -> bytes:
            return b"png"

        def _repr_svg_(self) -> str:
            raise RuntimeError("not today")

    assert shown(Rich()) == {
        "text/plain": "rich",
        "text/html": "<b>rich</b>",
        "image/png": "cG5n",
    }
    assert shown(None) == {}


@only_in_all
def test_a_figure_is_shown_as_a_picture() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()

    assert shown(figure)["image/png"].startswith("iVBOR")


def test_a_cell_that_awaits_is_a_coroutine() -> None:
    assert asyncio.iscoroutinefunction(read_cell("await f(1)", "In [1]", NOTEBOOK))
