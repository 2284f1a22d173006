"""JAX on a pool: the devices of all workers are one mesh when the first task starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import skyward as sky
from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.frameworks.jax import variables

from ..conftest import only_in_all

pytest.importorskip("jax", reason="jax is not installed")

QUIET = sky.Options(console=False, fail_grace=0.5)
Eventually = Callable[..., None]
Sharing = Callable[[sky.Compute], AbstractContextManager[sky.Compute]]


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[sky.Compute]:
    """Two nodes, one CPU device each."""
    with sharing(sky.Compute(nodes=2, plugins=[sky.plugins.jax()], options=QUIET)) as compute:
        yield compute


@sky.function
def place() -> dict[str, Any]:
    import jax

    return {
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "local": jax.local_device_count(),
        "devices": jax.device_count(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith("JAX_")},
        "pid": os.getpid(),
    }


@sky.function
def sum_over_devices() -> list[float]:
    import jax
    import jax.numpy as jnp

    mine = jnp.full((jax.local_device_count(), 3), 1.0 + jax.process_index())
    summed = jax.pmap(lambda x: jax.lax.psum(x, "all"), axis_name="all")(mine)
    return [float(value) for value in summed[0]]


@sky.function
def sum_of_shards(values: Any) -> tuple[float, int, int]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mine = sky.shard(values, drop_last=True)
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    whole = jax.make_array_from_process_local_data(everywhere, mine)
    return float(jax.jit(jnp.sum)(whole)), len(mine), len(whole)


def test_every_worker_knows_its_place(pool: sky.Compute) -> None:
    first, second = place() @ pool

    assert (first["process"], second["process"]) == (0, 1)
    for seen in (first, second):
        assert (seen["processes"], seen["local"], seen["devices"]) == (2, 1, 2)
        address = seen["environment"].pop("JAX_COORDINATOR_ADDRESS")
        assert address.startswith("127.0.0.1:")
        assert seen["environment"] == {
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(seen["process"]),
            "JAX_LOCAL_DEVICE_COUNT": "1",
        }


def test_pmap_sums_across_processes(pool: sky.Compute) -> None:
    assert sum_over_devices() @ pool == [[3.0, 3.0, 3.0]] * 2


def test_a_sharded_array_is_summed_as_one(pool: sky.Compute) -> None:
    import numpy as np

    assert sum_of_shards(np.arange(10.0)) @ pool == [(45.0, 5, 10)] * 2


def test_a_jax_array_is_sharded_as_a_jax_array(pool: sky.Compute) -> None:
    @sky.function
    def parts() -> list[tuple[str, list[int]]]:
        import jax
        import jax.numpy as jnp

        values = jnp.arange(5)
        shuffled = sky.shard(values, shuffle=True, seed=1)
        pieces = [sky.shard(values), sky.shard(values, drop_last=True), shuffled]
        return [(isinstance(piece, jax.Array), piece.tolist()) for piece in pieces]

    first, second = parts() @ pool

    assert first[:2] == [(True, [0, 2, 4]), (True, [0, 1])]
    assert second[:2] == [(True, [1, 3]), (True, [2, 3])]
    assert sorted(first[2][1] + second[2][1]) == [0, 1, 2, 3, 4]


@only_in_all
def test_a_lost_worker_is_replaced_and_the_mesh_is_made_anew(
    pool: sky.Compute, eventually: Eventually
) -> None:
    """Slow: both workers start JAX again."""
    before = [seen["pid"] for seen in place() @ pool]
    os.kill(before[1], 9)

    def both_are_new() -> bool:
        try:
            return not {seen["pid"] for seen in place() @ pool} & set(before)
        except (sky.SkywardError, ExceptionGroup):
            return False

    eventually(both_are_new, 60, "a new pair of workers")
    assert sum_over_devices() @ pool == [[3.0, 3.0, 3.0]] * 2


@only_in_all
def test_a_rank_that_raises_ends_the_others_and_is_named_first(pool: sky.Compute) -> None:
    """Slow: both workers start JAX again."""

    @sky.function
    def train() -> None:
        import jax
        import jax.numpy as jnp

        if jax.process_index() == 1:
            raise ValueError("boom")
        jax.pmap(lambda x: jax.lax.psum(x, "all"), axis_name="all")(jnp.ones((1, 1)))

    with pytest.raises(sky.BroadcastError, match=r"rank 1 .* failed first: ValueError: boom") as e:
        train() @ pool
    assert [type(each) for each in e.value.exceptions] == [
        ValueError,
        sky.errors.TaskCancelledError,
    ]
    assert sum_over_devices() @ pool == [[3.0, 3.0, 3.0]] * 2


@only_in_all
def test_one_worker_is_left_alone() -> None:
    @sky.function
    def alone() -> tuple[int, bool, list[str]]:
        import jax

        known = [name for name in os.environ if name.startswith("JAX_")]
        return jax.process_count(), jax.distributed.is_initialized(), known

    with sky.Compute(plugins=[sky.plugins.jax()], options=QUIET) as compute:
        assert alone() >> compute == (1, False, [])


def test_the_image_gets_jax_with_cuda_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    plain = sky.Compute(plugins=[sky.plugins.jax()])
    a100 = sky.accelerators.A100()
    cuda = sky.Compute(plugins=[sky.plugins.jax()], accelerator=a100)
    newer = sky.Compute(plugins=[sky.plugins.jax(cuda="cuda13")], accelerator=a100)

    assert plain._spec.request.image.pip == ("jax",)
    assert cuda._spec.request.image.pip == ("jax[cuda12]",)
    assert newer._spec.request.image.pip == ("jax[cuda13]",)


def test_a_word_that_is_no_extra_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"jax\(cuda='cu128'\): .* such as 'cuda12'"):
        sky.plugins.jax(cuda="cu128")


def test_standalone_workers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'jax' needs one"):
        sky.Compute(nodes=2, plugins=[sky.plugins.jax()], options=sky.Options(cluster=False))


def test_workers_of_a_node_divide_its_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    info = InstanceInfo(total_nodes=2, workers_per_node=2, worker=1, accelerators=4)

    assert variables(info)["JAX_LOCAL_DEVICE_COUNT"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert variables(info)["JAX_LOCAL_DEVICE_COUNT"] == "1"


def test_an_ipv6_head_has_brackets() -> None:
    info = InstanceInfo(head_addr="fd00::1", head_port=1234)

    assert variables(info)["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:1234"
