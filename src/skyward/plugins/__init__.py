"""Framework integrations, one module each, found by name when they are asked for.

>>> sky.Compute(nodes=2, plugins=[sky.plugins.torch()])
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyward.plugins.frameworks.accelerate import accelerate as accelerate
    from skyward.plugins.frameworks.huggingface import huggingface as huggingface
    from skyward.plugins.frameworks.jax import jax as jax
    from skyward.plugins.frameworks.joblib import joblib as joblib
    from skyward.plugins.frameworks.keras import keras as keras
    from skyward.plugins.frameworks.mig import mig as mig
    from skyward.plugins.frameworks.mps import mps as mps
    from skyward.plugins.frameworks.ray import ray as ray
    from skyward.plugins.frameworks.sklearn import sklearn as sklearn
    from skyward.plugins.frameworks.torch import torch as torch

GROUP = "skyward.plugins"
"""The group of entry points under which other packages register plugins."""

__all__ = [
    "accelerate",
    "huggingface",
    "jax",
    "joblib",
    "keras",
    "mig",
    "mps",
    "ray",
    "sklearn",
    "torch",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'skyward.plugins' has no attribute {name!r}")
    if name in __all__:
        made = getattr(importlib.import_module(f"skyward.plugins.frameworks.{name}"), name)
        globals()[name] = made
        return made
    if importlib.util.find_spec(f"skyward.plugins.{name}") is not None:
        # One of our modules, and no plugin: Python asks here before it imports the module.
        return importlib.import_module(f"skyward.plugins.{name}")
    # Imported here, as every executor imports this package, and this takes 15 ms.
    from importlib import metadata

    for entry in metadata.entry_points(group=GROUP, name=name):
        made = entry.load()
        globals()[name] = made
        return made
    former = importlib.import_module("skyward.former")
    if name in former.PLUGINS:
        raise former.missing("skyward.plugins", name, former.PLUGINS)
    known = sorted({*__all__, *(entry.name for entry in metadata.entry_points(group=GROUP))})
    raise AttributeError(
        f"there is no plugin {name!r}; there are {', '.join(known)}; others come with packages "
        f"that register an entry point in {GROUP!r}"
    )


def __dir__() -> list[str]:
    from importlib import metadata

    return sorted({*__all__, *(entry.name for entry in metadata.entry_points(group=GROUP))})
