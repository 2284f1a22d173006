"""Several computes as one, and one per call of a decorated coroutine."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import subprocess
import sys
import threading
from importlib.resources import files
from typing import Any

import pytest
import torch

import skyward as sky
from skytorch import client
from skytorch.client import Cluster, Compute, compute
from skytorch.client.event import Event

from ..conftest import only_in_all


def process() -> int:
    return os.getpid()


def test_the_client_exports_exactly_this() -> None:
    assert client.__all__ == [
        "Cluster",
        "Compute",
        "StateDict",
        "compute",
        "default_namespace",
        "init",
        "log_event",
    ]
    assert all(getattr(client, name).__doc__ for name in client.__all__)


def test_the_submodules_have_skytorchs_names() -> None:
    names = {
        "compute": "Compute",
        "cluster": "Cluster",
        "decorator": "compute",
        "event": "log_event",
        "init": "init, default_namespace",
        "state_dict": "StateDict",
    }
    # A submodule that is imported becomes an attribute of its package, and must hide no function.
    code = "".join(
        f"from skytorch.client.{module} import {each}\ndeep = {each},\n"
        f"from skytorch.client import {each}\nassert deep == ({each},), '{module}'\n"
        for module, each in names.items()
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_the_package_declares_its_types() -> None:
    assert files("skytorch").joinpath("py.typed").is_file()


def test_importing_the_client_does_not_import_torch() -> None:
    code = "import sys, skytorch.client; sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr or "import skytorch.client imports torch"


def test_a_cluster_yields_its_computes_in_order_each_a_machine_of_its_own(
    nothing_left: None,
) -> None:
    async def main() -> None:
        async with Cluster(Compute(name="trainer"), Compute(name="judge")) as (trainer, judge):
            assert (trainer.name, judge.name) == ("trainer", "judge")
            assert trainer.is_ready()
            assert judge.is_ready()
            assert await trainer.execute(process) != await judge.execute(process)

    asyncio.run(main())


def test_a_cluster_is_a_sequence_of_its_computes() -> None:
    one, two = Compute(name="one"), Compute(name="two")
    cluster = Cluster(one, two)

    assert len(cluster) == 2
    assert list(cluster) == [one, two]
    assert (cluster[0], cluster[-1], cluster[:1]) == (one, two, (one,))
    assert not cluster.is_ready()
    with pytest.raises(IndexError):
        cluster[2]


def test_a_cluster_is_made_ready_and_deleted_without_a_block(nothing_left: None) -> None:
    async def main() -> None:
        cluster = Cluster(Compute(name="one"), Compute(name="two"))
        assert await cluster.ready(timeout=120) is cluster
        assert cluster.is_ready()
        await cluster.delete()
        assert not cluster.is_ready()

    asyncio.run(main())


def test_a_cluster_starts_its_computes_concurrently(nothing_left: None) -> None:
    heard: list[str] = []

    def listen(event: Event) -> None:
        heard.append(event.reason)

    async def main() -> None:
        async with Cluster(
            Compute(name="one", on_events=listen), Compute(name="two", on_events=listen)
        ):
            pass

    asyncio.run(main())

    assert heard[:2] == ["Starting", "Starting"]


def test_when_one_compute_cannot_start_the_others_are_taken_down(nothing_left: None) -> None:
    def refuse(event: Event) -> None:
        if event.reason == "Starting":
            raise RuntimeError("no room")

    async def main() -> Compute:
        good = Compute(name="good")
        with pytest.raises(RuntimeError, match="no room"):
            async with Cluster(good, Compute(name="bad", on_events=refuse)):
                pass
        return good

    assert "deleted" in repr(asyncio.run(main()))


@only_in_all
def test_copies_between_computes_go_from_node_to_node(nothing_left: None) -> None:
    async def main() -> None:
        async with Cluster(Compute(name="trainer"), Compute(name="judge")) as (trainer, judge):
            model = torch.nn.Linear(3, 2).to(trainer.device("cuda"))
            ref_model = copy.deepcopy(model).to(judge.device("cuda"))
            torch.testing.assert_close(ref_model.weight.cpu(), model.weight.cpu())

            ref_model.weight.data.copy_(2 * model.weight.data)
            torch.testing.assert_close(ref_model.weight.cpu(), 2 * model.weight.cpu())
            assert sky.device_stats(trainer.device("cuda")).bytes_to_devices > 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("computes", "message"),
    [
        ([], "give at least one Compute"),
        (["trainer"], r"Cluster\('trainer'\): expected Compute\(name=\.\.\.\)"),
    ],
)
def test_a_cluster_of_what_is_no_compute_is_refused(computes: list[Compute], message: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=message):
        Cluster(*computes)


def test_two_computes_of_one_name_are_refused() -> None:
    with pytest.raises(sky.errors.ConfigurationError, match="two computes are named 'twin'"):
        Cluster(Compute(name="twin"), Compute(name="twin"))


def test_the_decorator_injects_a_node_and_takes_it_down(nothing_left: None) -> None:
    @compute(name="mnist", image="ghcr.io/some/image:latest", resources={"nvidia.com/gpu": "1"})
    async def train(node: Compute, epochs: int = 10, *, lr: float) -> tuple[Compute, int, float]:
        """Train."""
        assert await node.execute(process) != os.getpid()
        return node, epochs, lr

    node, epochs, lr = asyncio.run(train(3, lr=0.1))

    assert (node.name, node.image) == ("mnist", "ghcr.io/some/image:latest")
    assert (epochs, lr) == (3, 0.1)
    assert "deleted" in repr(node)
    assert (train.__name__, train.__doc__) == ("train", "Train.")


async def after(x: int, node: Compute) -> tuple[int, str]:
    return x, node.name


async def keyword_only(x: int, *, node: Compute) -> tuple[int, str]:
    return x, node.name


async def positional_only(x: int, y: int = 4, node: Compute | None = None, /) -> tuple[int, str]:
    assert node is not None
    return x + y - 4, node.name


async def between(x: int, node: Compute, *more: int, **rest: int) -> tuple[int, str]:
    assert (more, rest) == ((), {})
    return x, node.name


async def without_annotation(node, x):  # type: ignore[no-untyped-def]
    return x, node.name


async def unannotated_after(x, node: client.Compute):  # type: ignore[no-untyped-def]
    return x, node.name


@pytest.mark.parametrize(
    "body",
    [after, keyword_only, positional_only, between, without_annotation, unannotated_after],
    ids=lambda body: body.__name__,
)
def test_the_decorator_gives_the_node_to_the_parameter_annotated_compute(
    body: Any, nothing_left: None
) -> None:
    assert asyncio.run(compute(name="here")(body)(3)) == (3, "here")


def test_the_annotation_may_name_what_only_a_type_checker_imports(nothing_left: None) -> None:
    async def train(x: int, node: nowhere.Compute) -> tuple[int, str]:  # type: ignore[name-defined]  # noqa: F821
        return x, node.name

    assert asyncio.run(compute(name="here")(train)(3)) == (3, "here")


def test_the_caller_sees_and_passes_only_the_other_parameters() -> None:
    decorated = compute(name="here")(after)

    assert list(inspect.signature(decorated).parameters) == ["x"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'node'"):
        asyncio.run(decorated(3, node=None))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        asyncio.run(decorated())


def test_the_node_is_taken_down_also_when_the_function_raises(nothing_left: None) -> None:
    seen: list[Compute] = []

    @compute()
    async def train_it(node: Compute) -> None:
        seen.append(node)
        raise LookupError("no data")

    with pytest.raises(LookupError, match="no data"):
        asyncio.run(train_it())

    assert repr(seen[0]) == "<skytorch.Compute train-it: deleted>"


def test_the_decorator_refuses_what_it_cannot_wrap() -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"write @compute\(name='mnist'\) above it"
    ):
        compute(threading.get_ident)  # type: ignore[arg-type]
    with pytest.raises(sky.errors.ConfigurationError, match="write `async def`"):
        compute(name="a")(lambda node: None)  # type: ignore[arg-type,return-value]

    async def alone() -> None: ...

    with pytest.raises(
        sky.errors.ConfigurationError, match=r"write `async def alone\(node: Compute\)`"
    ):
        compute(name="a")(alone)

    async def number(x: int) -> None: ...

    with pytest.raises(sky.errors.ConfigurationError, match=r"no parameter is annotated Compute"):
        compute(name="a")(number)
