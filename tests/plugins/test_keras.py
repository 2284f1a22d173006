"""Keras on a pool: its backend is set before it is imported.

That models are data parallel on JAX is shown by `examples/keras_digits.py`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from skyward.errors import ConfigurationError

from ..conftest import only_in_all

for needed in ("keras", "jax"):
    # Not imported here, where no backend is set.
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

QUIET = sky.Options(console=False)


@sky.function
def setting() -> dict[str, Any]:
    import keras

    distribution = keras.distribution.distribution()
    return {
        "backend": keras.backend.backend(),
        "devices": 0 if distribution is None else distribution.num_model_replicas,
        "sees": len(keras.distribution.list_devices()),
    }


@only_in_all
def test_on_torch_a_model_is_made_parallel_by_torch() -> None:
    """Slow: two processes import both frameworks."""

    @sky.function
    def step() -> tuple[str, float]:
        import keras
        import torch
        from torch.nn.parallel import DistributedDataParallel

        rank = torch.distributed.get_rank()
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        parallel = DistributedDataParallel(model)
        parallel(torch.full((2, 4), 1.0 + rank)).sum().backward()
        kernel = model.layers[0].kernel.value
        return keras.backend.backend(), float(kernel.grad.mean())

    plugins = [sky.plugins.keras(backend="torch"), sky.plugins.torch()]
    with sky.Compute(nodes=2, plugins=plugins, options=QUIET) as compute:
        assert step() @ compute == [("torch", 3.0), ("torch", 3.0)]


@only_in_all
def test_alone_every_worker_trains_by_itself() -> None:
    """Slow: Keras is imported."""
    with sky.Compute(plugins=[sky.plugins.keras()], options=QUIET) as compute:
        assert setting() >> compute == {"backend": "jax", "devices": 0, "sees": 1}


def test_the_backend_is_set_before_anything_else_runs() -> None:
    @sky.function
    def look() -> tuple[str | None, bool]:
        return os.environ.get("KERAS_BACKEND"), "keras" in sys.modules

    plugins = [sky.plugins.keras(backend="torch")]
    with sky.Compute(plugins=plugins, options=QUIET) as compute:
        assert look() >> compute == ("torch", False)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"keras\(backend='theano'\): choose 'jax', 'torch', 'tensorflow'",
    ):
        sky.plugins.keras(backend="theano")  # type: ignore[arg-type]


def test_keras_that_was_imported_too_early_is_an_error() -> None:
    def early(info: object) -> Iterator[None]:
        sys.modules["keras"] = sys
        yield

    plugins = [sky.Plugin.create("early").with_around_process(early), sky.plugins.keras()]
    with pytest.raises(sky.SkywardError, match="imported before its backend could be set to 'jax'"):
        with sky.Compute(plugins=plugins, options=QUIET):
            pass


def test_a_backend_that_is_not_installed_is_named() -> None:
    if importlib.util.find_spec("tensorflow") is not None:
        pytest.skip("tensorflow is installed")

    with pytest.raises(sky.SkywardError, match="tensorflow is not installed"):
        with sky.Compute(plugins=[sky.plugins.keras("tensorflow")], options=QUIET):
            pass


def test_the_image_gets_keras_and_its_backend_once() -> None:
    def pip(*plugins: sky.Plugin) -> tuple[str, ...]:
        return tuple(sky.Compute(plugins=list(plugins))._spec.request.image.pip)

    assert pip(sky.plugins.keras()) == ("keras", "jax")
    assert pip(sky.plugins.jax(), sky.plugins.keras()) == ("jax", "keras")
    pinned = sky.plugins.torch(version="2.9.0")
    assert pip(pinned, sky.plugins.keras("torch")) == ("torch==2.9.0", "keras")
