"""What holds for every framework's plugin: it is a light value, and says what a node lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.errors import PluginError
from skyward.plugins.plugin import check_installed

from ..conftest import other_case

QUIET = sky.Options(console=False)

# The plugin, the module it needs on a worker, and the package that module comes in.
FRAMEWORKS = [
    ("accelerate", "accelerate", "accelerate"),
    ("huggingface", "transformers", "transformers"),
    ("jax", "jax", "jax"),
    ("joblib", "joblib", "joblib"),
    ("keras", "keras", "keras"),
    ("sklearn", "sklearn", "scikit-learn"),
]


def test_to_make_a_plugin_imports_no_framework() -> None:
    script = f"""if True:
        import sys, skyward as sky
        for plugin, module, _ in {FRAMEWORKS!r}:
            sky.Compute(nodes=2, plugins=[getattr(sky.plugins, plugin)()])
            for name in (module, "torch", "numpy"):
                assert name not in sys.modules, f"{{plugin}} imports {{name}}"
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def hide(module: str) -> sky.Plugin:
    """Have workers look for a module in vain, as if it were not installed."""

    def hidden(info: object) -> Iterator[None]:
        import importlib.util

        with pytest.MonkeyPatch.context() as patch:
            find = importlib.util.find_spec
            patch.setattr(importlib.util, "find_spec", lambda n: None if n == module else find(n))
            yield

    return sky.Plugin.create("hide").with_around_process(hidden)


@pytest.mark.parametrize(
    ("plugin", "module", "package"),
    [FRAMEWORKS[0], *(pytest.param(*each, marks=other_case) for each in FRAMEWORKS[1:])],
)
def test_a_worker_without_the_framework_says_so(plugin: str, module: str, package: str) -> None:
    plugins = [hide(module), getattr(sky.plugins, plugin)()]

    with pytest.raises(PluginError) as caught:
        with sky.Compute(plugins=plugins, options=QUIET):
            pass

    assert f"plugin {plugin!r}" in str(caught.value)
    assert f"{package} is not installed for {sys.executable}" in str(caught.value)
    assert f"Image(pip=['{package}'])" in str(caught.value)


def test_what_is_installed_is_not_complained_about() -> None:
    check_installed("json")
