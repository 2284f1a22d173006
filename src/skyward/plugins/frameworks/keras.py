"""Keras 3: its backend chosen before it can be imported, and data parallelism on JAX."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator
from typing import Literal, get_args

from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.frameworks.jax import once_joined
from skyward.plugins.plugin import Cluster, Plugin, check_installed, extended, imported
from skyward.spec import Image

Backend = Literal["jax", "torch", "tensorflow"]
BACKENDS: tuple[str, ...] = get_args(Backend)


def keras(backend: Backend = "jax") -> Plugin:
    """Install Keras and choose its backend.

    With `sky.plugins.jax()` and more than one worker, models are data parallel over the devices of
    all workers. The workers make and fit a model together, in a broadcast: each worker gives its
    own part of every batch, and all parts have the same size. With `sky.plugins.torch()`, the
    process group is ready for `DistributedDataParallel`. Without these plugins, every worker trains
    on its own.

    >>> plugins = [sky.plugins.jax(), sky.plugins.keras(backend="jax")]
    """
    if backend not in BACKENDS:
        raise ConfigurationError(
            f"sky.plugins.keras(backend={backend!r}): choose {', '.join(map(repr, BACKENDS))}"
        )
    return (
        Plugin.create("keras")
        .with_transform(functools.partial(_install, backend))
        .with_around_process(functools.partial(_chosen, backend))
    )


def _install(backend: Backend, image: Image, cluster: Cluster) -> Image:
    # The plugin of that framework chooses the right wheels.
    there = {re.split(r"[^\w.-]", each.strip(), maxsplit=1)[0].lower() for each in image.pip}
    return extended(image, ["keras", *({backend} - there)])


@contextlib.contextmanager
def _chosen(backend: Backend, info: InstanceInfo) -> Iterator[None]:
    if "keras" in sys.modules and os.environ.get("KERAS_BACKEND") != backend:
        raise RuntimeError(
            f"Keras was imported before its backend could be set to {backend!r}; give "
            "sky.plugins.keras() before the plugin that imports it"
        )
    os.environ["KERAS_BACKEND"] = backend
    check_installed(backend)
    check_installed("keras")
    if backend == "jax":
        once_joined(_data_parallel)
    yield


def _data_parallel() -> None:
    """Let every model made from now on live on all workers' devices at once."""
    keras, numpy = imported("keras"), imported("numpy")
    hosts = imported("jax.experimental.multihost_utils")
    # Initial weights are drawn in every process, and have to be the same in all.
    drawn = numpy.frombuffer(os.urandom(4), numpy.uint32)
    keras.utils.set_random_seed(int(hosts.broadcast_one_to_all(drawn)[0]))
    # Each worker shards its data itself.
    everywhere = keras.distribution.DataParallel(
        devices=keras.distribution.list_devices(), auto_shard_dataset=False
    )
    keras.distribution.set_distribution(everywhere)
