"""What `import skyward` offers, and what it costs; a change of either is made here on purpose."""

import builtins
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import skyward as sky
from skyward import errors

PUBLIC = [
    # what to run
    "function",
    "Function",
    "cls",
    "remote",
    "Pending",
    "Group",
    "gather",
    "plugins",
    "Plugin",
    "put",
    "Handle",
    "Future",
    # where to run it
    "Compute",
    "attach",
    "post_mortem",
    "NodeView",
    "AWS",
    "offers",
    "Spec",
    "Offer",
    "Container",
    "Kubernetes",
    "Local",
    "Ray",
    "SSH",
    "Slurm",
    "Image",
    "PipIndex",
    "Nodes",
    "Worker",
    "Options",
    "Volume",
    "Project",
    "accelerators",
    "events",
    "device_stats",
    "loader",
    "profile",
    "replay",
    # what a function sees on its node
    "instance_info",
    "is_head",
    "InstanceInfo",
    "shard",
    "stdout",
    "stderr",
    "silent",
    "redirect_output",
    "Output",
    # what a pool shares
    "dict",
    "set",
    "counter",
    "queue",
    "lock",
    "log",
    "barrier",
    "event",
    # models at rest
    "ModelStore",
    "ModelVersion",
    "checkpoint",
    "restore",
    # what can go wrong
    "errors",
    "SkywardError",
    "TaskTimeoutError",
    "WorkerDiedError",
    "NodeLostError",
    "RemoteError",
    "BroadcastError",
]

ROOMS = ("src", "tests", "docs", "examples", "bench", "tools")
ERRORS = [name for name in vars(errors) if name.endswith("Error")]


def test_the_public_surface_is_one_screen() -> None:
    assert len(sky.__all__) <= 70


def test_the_public_surface_is_exactly_this() -> None:
    assert sorted(sky.__all__) == sorted(PUBLIC)


def test_no_public_name_is_listed_twice() -> None:
    assert len(sky.__all__) == len(set(sky.__all__))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(sky, name)

    if inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, ModuleType):
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own, f"skyward.{name} has no docstring"
        # dataclasses and structs fill a missing docstring with their signature
        assert not own.startswith(f"{name}("), f"skyward.{name} has a generated docstring"


def test_dir_lists_the_public_surface() -> None:
    assert set(PUBLIC) <= set(dir(sky))


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_the_one_root(name: str) -> None:
    assert issubclass(getattr(errors, name), sky.SkywardError)


@pytest.mark.parametrize("name", [*sorted(set(ERRORS) - set(PUBLIC)), *sky._MOVED])
def test_a_name_that_has_left_the_top_works_and_says_where_it_is(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"sky.{name} is (sky.*{name}) now") as warned:
        value = getattr(sky, name)

    assert warned[0].filename == __file__
    written = str(warned[0].message).split()[2].replace("sky.errors", "skyward.errors")
    assert pkgutil.resolve_name(written) is value


def test_a_name_that_has_left_the_top_can_be_imported() -> None:
    with pytest.warns(DeprecationWarning, match="sky.errors.PoolError"):
        from skyward import PoolError
    assert PoolError is errors.PoolError


def test_the_module_that_offers_have_left_works_and_says_where_they_are() -> None:
    """A provider of somebody else's imports it: `docs/providers.md` named it."""
    with pytest.warns(DeprecationWarning, match=r"skyward\.market is skyward\.providers") as warned:
        from skyward.market import Offer
    assert Offer is sky.Offer
    assert warned[0].filename == __file__


def test_the_module_that_reach_has_left_works_and_says_where_it_is() -> None:
    """`docs/pools.md` named it, for programs that ask agents."""
    with pytest.warns(DeprecationWarning, match=r"attaching is skyward\.compute now") as warned:
        from skyward.compute.attaching import reach
    assert reach is sys.modules["skyward.compute"].reach
    assert warned[0].filename == __file__


def test_nothing_of_ours_uses_a_name_that_has_left_the_top() -> None:
    left = "|".join([*sorted(set(ERRORS) - set(PUBLIC)), *sky._MOVED])
    old = re.compile(rf"\bsky\.(?:{left})\b")
    root = Path(__file__).parents[1]
    written = [each for room in ROOMS for each in (root / room).rglob("*.*")]
    found = {
        str(each.relative_to(root)): names
        for each in [*written, root / "README.md"]
        if each.suffix in (".py", ".md", ".ipynb") and (names := old.findall(each.read_text()))
    }
    assert not found


def test_no_module_hides_one_of_python() -> None:
    """`import numbers` in a folder of ours, or a traceback, would leave open which one it is."""
    ours = {module.name for module in pkgutil.iter_modules(sky.__path__)}
    assert not ours & {*sys.stdlib_module_names, *dir(builtins)}


def test_public_classes_say_they_live_in_skyward() -> None:
    for name in PUBLIC:
        value = getattr(sky, name)
        if inspect.isclass(value):
            assert value.__module__.split(".")[0] == "skyward", name


def test_no_public_name_is_hidden_by_a_submodule() -> None:
    """Importing `skyward.x` binds `x` in the package, over a lazily loaded `skyward.x`."""
    submodules = {module.name for module in pkgutil.iter_modules(sky.__path__)}

    hidden = {name for name in PUBLIC if name in submodules}

    assert {name for name in hidden if not isinstance(getattr(sky, name), ModuleType)} == set()


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        sky.no_such_name


@pytest.mark.parametrize("module", ["torch", "numpy", "rich", "cryptography", "pandas", "asyncssh"])
def test_import_skyward_does_not_import(module: str) -> None:
    """A pool of numpy functions never pays for torch, and `sky --help` for neither."""
    code = f"import sys, skyward; sys.exit({module!r} in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr or f"import skyward imports {module}"


def test_describing_a_call_does_not_import_torch() -> None:
    code = (
        "import sys, skyward as sky\n"
        "@sky.function\n"
        "def double(x): return 2 * x\n"
        "pending = double(3)\n"
        "assert double.local(3) == 6\n"
        "sys.exit('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr or "describing a call imports torch"


def test_the_package_declares_its_types() -> None:
    from importlib.resources import files

    assert files("skyward").joinpath("py.typed").is_file()
