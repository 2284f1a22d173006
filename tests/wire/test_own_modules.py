"""The user's own modules travel by value, decided per pickle, without touching any registry."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest

import skyward as sky
from skyward.functions import Function
from skyward.objects import encoding, modules

FILES = {
    "skyown/__init__.py": """
        from .sub import scaled
        VERSION = "by value"
    """,
    "skyown/helpers.py": """
        import threading
        _lock = threading.Lock()      # cannot be pickled, and nobody shipped needs it
        calls = []
        OFFSET = 10
        def double(x):
            return 2 * x
        def shifted(x):
            return double(x) + OFFSET
    """,
    "skyown/sub.py": """
        from . import helpers
        from .deep.inner import deepest
        FACTOR = 3
        def scaled(x):
            return helpers.double(x) * FACTOR
        def deep(x):
            return deepest(x) + helpers.shifted(x)
    """,
    "skyown/deep/__init__.py": "",
    "skyown/deep/inner.py": """
        from ..helpers import double
        def deepest(x):
            return double(double(x))
    """,
    "skyown/shapes.py": """
        from dataclasses import dataclass
        from skyown import helpers
        @dataclass
        class Square:
            side: float
            def area(self):
                return self.side ** 2
            def doubled(self):
                return Square(helpers.double(self.side))
        class Cube(Square):
            def area(self):
                return 6 * super().area()
    """,
    "skyscript.py": """
        import skyward as sky
        import skyown
        import skyown.shapes
        import skyown.helpers as tools
        from skyown import helpers
        from skyown.shapes import Cube, Square
        from skyown.sub import deep, scaled

        SQUARE = Square(2)

        @sky.function
        def by_function(x): return scaled(x)
        @sky.function
        def by_module(x): return helpers.shifted(x)
        @sky.function
        def by_alias(x): return tools.double(x)
        @sky.function
        def by_submodule(x): return skyown.sub.scaled(x)
        @sky.function
        def by_package(x): return skyown.scaled(x), skyown.VERSION
        @sky.function
        def by_relative_imports(x): return deep(x)
        @sky.function
        def by_class(x): return Cube(x).area()
        @sky.function
        def by_instance(): return helpers.shifted(0) + SQUARE.doubled().area()
        @sky.function
        def made(x): return skyown.shapes.Square(x)
        @sky.function
        def given(shape): return shape.doubled()
        @sky.function
        def imported_here():
            import sys
            return sorted(name for name in sys.modules if name.startswith(("skyown", "skyscript")))
    """,
}


@pytest.fixture(scope="module")
def script(pool: sky.Compute, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A user's script with a package beside it, where the running workers do not look."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    sys.path.insert(0, str(folder))
    yield importlib.import_module("skyscript")
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith(("skyown", "skyscript"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("by_function", (5,), 30),
        ("by_module", (5,), 20),
        ("by_alias", (5,), 10),
        ("by_submodule", (5,), 30),
        ("by_package", (5,), (30, "by value")),
        ("by_relative_imports", (5,), 40),
        ("by_class", (2,), 24),
        ("by_instance", (), 26),
    ],
)
def test_whatever_way_a_module_is_used_it_works_where_it_is_not_installed(
    pool: sky.Compute, script: ModuleType, name: str, args: tuple[Any, ...], expected: Any
) -> None:
    assert getattr(script, name)(*args) >> pool == expected


def test_the_workers_never_imported_any_of_it(pool: sky.Compute, script: ModuleType) -> None:
    assert script.by_relative_imports(1) >> pool == 16
    assert script.imported_here() @ pool == [[], []]


def test_instances_come_and_go_as_the_users_own_class(
    pool: sky.Compute, script: ModuleType
) -> None:
    square = script.made(3) >> pool
    assert type(square) is script.Square
    cube = script.given(script.Cube(2)) >> pool
    assert type(cube) is script.Square
    assert cube.area() == 16


def test_a_module_imported_inside_a_function_travels_too(
    pool: sky.Compute, script: ModuleType
) -> None:
    from skyown import helpers  # type: ignore[import-not-found]

    @sky.function
    def closed_over(x: int) -> int:
        return int(helpers.shifted(x))

    assert closed_over(1) >> pool == 12


def test_a_module_as_an_argument(pool: sky.Compute, script: ModuleType) -> None:
    @sky.function
    def use(module: Any) -> int:
        return int(module.deepest(1))

    assert use(sys.modules["skyown.deep.inner"]) >> pool == 4


def test_a_change_in_a_module_is_seen_by_the_next_call(
    pool: sky.Compute, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers = sys.modules["skyown.helpers"]
    assert script.by_module(1) >> pool == 12
    monkeypatch.setattr(helpers, "OFFSET", 100)
    assert script.by_module(1) >> pool == 102
    monkeypatch.setattr(helpers, "double", lambda x: x)
    assert script.by_module(1) >> pool == 101
    assert script.by_relative_imports(1) >> pool == 4 + 101


def test_an_edited_and_reloaded_module_is_seen(
    pool: sky.Compute, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "skyown_edited.py"
    file.write_text("def answer(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    edited = importlib.import_module("skyown_edited")

    @sky.function
    def ask() -> int:
        return int(edited.answer())

    assert ask() >> pool == 1
    file.write_text("def answer(): return 2222\n")
    importlib.reload(edited)
    assert ask() >> pool == 2222


def test_only_the_users_files_count_as_theirs(script: ModuleType) -> None:
    assert all(map(modules.is_own, ("skyown", "skyown.deep.inner", "skyscript", __name__)))
    for name in ("json", "numpy", "pytest", "skyward", "skyward.objects.encoding", "cloudpickle"):
        assert not modules.is_own(name)
    assert not modules.is_own("skyown.not_imported")
    assert not modules.is_own(None)


def test_a_package_that_pip_has_put_into_any_folder_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install --target` does, here beside a module of the user's."""
    for name in ("skytargeted/__init__.py", "skytargeted/inner.py", "skybeside.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    about = tmp_path / "skytargeted-1.0.dist-info"
    about.mkdir()
    (about / "RECORD").write_text("skytargeted/__init__.py,,0\nskytargeted/inner.py,,0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("skytargeted.inner", "skybeside"):
        importlib.import_module(name)
    assert not modules.is_own("skytargeted")
    assert not modules.is_own("skytargeted.inner")
    assert modules.is_own("skybeside")
    for name in ("skytargeted.inner", "skytargeted", "skybeside"):
        del sys.modules[name]


def test_installed_code_travels_by_name(trip: Callable[..., Any]) -> None:
    for thing in (json.dumps, json, np, np.linalg.norm, np.ndarray, sky.shard):
        assert trip(thing, own_modules=True) is thing


def test_no_registry_is_touched_and_threads_do_not_disturb_each_other(
    script: ModuleType, loaded: Callable[[encoding.Encoded], Any]
) -> None:
    start = threading.Barrier(8)

    def alternate(number: int) -> list[bool]:
        start.wait()
        sizes = []
        for turn in range(20):
            by_value = (turn + number) % 2 == 0
            encoded = encoding.encode(script.scaled, own_modules=by_value)
            sizes.append((encoded.pickle_length > 200) == by_value)
            assert cloudpickle.list_registry_pickle_by_value() == set()
            assert loaded(encoded)(1) == 6
        return sizes

    with ThreadPoolExecutor(8) as threads:
        for sizes in threads.map(alternate, range(8)):
            assert all(sizes)


def test_a_function_is_encoded_once_and_the_same_everywhere(script: ModuleType) -> None:
    function: Function[Any, Any] = script.by_relative_imports
    with ThreadPoolExecutor(4) as threads:
        codes = list(threads.map(lambda _: function.code(), range(20)))
    assert len({id(code) for code in codes}) == 1
    assert Function(function.body).code().key == codes[0].key
