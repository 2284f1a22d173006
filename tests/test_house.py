"""The house: imports point down CONTRIBUTING's list and never in a circle."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from skyward.providers import BUILT_IN

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
LINE = re.compile(r"^(?: {4}src/| {8})(\S+/|\S+\.py(?: \S+\.py)*) +\S", re.MULTILINE)


def modules() -> dict[str, Path]:
    """Every module by its dotted name; a package is its `__init__.py`."""
    found = {}
    for path in SOURCES.rglob("*.py"):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def rooms() -> list[str]:
    """The rooms as CONTRIBUTING lists them, from the top down."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = LINE.findall(text.split("## The house")[1].split("\n## ")[0])
    return re.findall(r"(\w+)(?:/|\.py)", " ".join(lines))


def room_of(module: str) -> str:
    """The room of a module: a folder or file below `skyward`, or `skytorch` as a whole."""
    package, _, rest = module.partition(".")
    if package == "skytorch":
        return package
    room = rest.partition(".")[0]
    return {"": "__init__", "__main__": "cli"}.get(room, room)


@functools.cache
def statements(path: Path) -> list[ast.stmt]:
    """The imports and classes of a file, wherever they are: it is read once for all tests."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [each for each in nodes if isinstance(each, ast.Import | ast.ImportFrom | ast.ClassDef)]


def imports(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports: at its top, for types alone, or in a function."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name:
                yield name


ARROWS = {name: set(imports(path)) - {name} for name, path in MODULES.items()}


def test_the_reader_of_imports_sees_all_three_kinds() -> None:
    assert "skyward.wire.frames" in ARROWS["skyward.wire.channel"]
    assert "skyward.store.models" in ARROWS["skyward"], "one under TYPE_CHECKING"
    assert "skyward.nodes.cleanup" in ARROWS["skyward.cli.pools"], "one inside a function"


def test_every_room_is_listed_once() -> None:
    listed = rooms()
    assert sorted(listed) == sorted({room_of(module) for module in MODULES})


def test_no_import_points_up_the_list() -> None:
    order = {room: number for number, room in enumerate(rooms())}
    up = [
        f"{module} imports {target}"
        for module, targets in ARROWS.items()
        for target in targets
        if order[room_of(target)] < order[room_of(module)]
    ]
    assert not up, "\n".join(sorted(up))


def test_no_provider_imports_another() -> None:
    homes = {where.partition(":")[0] for where in BUILT_IN.values()}

    def provider(module: str) -> str:
        return next((home for home in homes if f"{module}.".startswith(f"{home}.")), "")

    crossing = [
        f"{module} imports {target}"
        for module, targets in ARROWS.items()
        for target in targets
        if provider(module) and provider(target) not in ("", provider(module))
    ]
    assert not crossing, "\n".join(sorted(crossing))


def test_no_files_import_each_other_in_a_circle() -> None:
    # The root package only names the others; nobody below it may import it, as the list says.
    try:
        TopologicalSorter(ARROWS).prepare()
    except CycleError as circle:
        raise AssertionError(" -> ".join(circle.args[1])) from None


def test_no_constructor_takes_more_than_eight_things() -> None:
    """But that of `Compute`, whose arguments are the user's, in both its shapes."""
    wide = []
    for module, path in MODULES.items():
        for node in statements(path):
            if isinstance(node, ast.ClassDef) and node.name != "Compute":
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                        given = [*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]
                        if len(given) - 1 > 8:
                            wide.append(f"{module}.{node.name}")
    assert not wide


def test_a_name_means_one_class() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in statements(path):
            # The names of SkyTorch's interface are not ours to choose.
            if isinstance(node, ast.ClassDef) and room_of(module) != "skytorch":
                homes.setdefault(node.name, []).append(module)
    assert not {name: where for name, where in homes.items() if len(where) > 1}
