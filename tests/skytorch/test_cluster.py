"""Several computes as one, and one per call of a decorated coroutine."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
import sys
import threading
from importlib.resources import files

import pytest
import torch

import skyward as sky
from skytorch import client
from skytorch.client import Cluster, Compute, compute
from skytorch.events import Event


def process() -> int:
    return os.getpid()


def test_the_client_exports_exactly_this() -> None:
    assert client.__all__ == ["Cluster", "Compute", "compute", "init", "log_event"]
    assert all(getattr(client, name).__doc__ for name in client.__all__)


def test_the_package_declares_its_types() -> None:
    assert files("skytorch").joinpath("py.typed").is_file()


def test_importing_the_client_does_not_import_torch() -> None:
    code = "import sys, skytorch.client; sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr or "import skytorch.client imports torch"


def test_a_cluster_yields_its_computes_in_order_each_a_machine_of_its_own(
    nothing_left: None,
) -> None:
    async def main() -> None:
        async with Cluster(Compute(name="trainer"), Compute(name="judge")) as (trainer, judge):
            assert (trainer.name, judge.name) == ("trainer", "judge")
            assert await trainer.execute(process) != await judge.execute(process)

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


def test_copies_between_computes_are_refused_and_go_by_way_of_the_host(nothing_left: None) -> None:
    async def main() -> None:
        async with Cluster(Compute(name="trainer"), Compute(name="judge")) as (trainer, judge):
            model = torch.nn.Linear(3, 2).to(trainer.device("cuda"))
            with pytest.raises(RuntimeError, match=r"through the host with \.cpu\(\)"):
                copy.deepcopy(model).to(judge.device("cuda"))

            ref_model = copy.deepcopy(model).cpu().to(judge.device("cuda"))
            with pytest.raises(RuntimeError, match=r"through the host with \.cpu\(\)"):
                ref_model.weight.data.copy_(model.weight.data)
            ref_model.weight.data.copy_(2 * model.weight.data.cpu())
            torch.testing.assert_close(ref_model.weight.cpu(), 2 * model.weight.cpu())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("computes", "message"),
    [
        ([], "give at least one Compute"),
        (["trainer"], r"Cluster\('trainer'\): expected Compute\(name=\.\.\.\)"),
    ],
)
def test_a_cluster_of_what_is_no_compute_is_refused(computes: list[Compute], message: str) -> None:
    with pytest.raises(sky.ConfigurationError, match=message):
        Cluster(*computes)


def test_two_computes_of_one_name_are_refused() -> None:
    with pytest.raises(sky.ConfigurationError, match="two computes are named 'twin'"):
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
    with pytest.raises(sky.ConfigurationError, match=r"write @compute\(name='mnist'\) above it"):
        compute(threading.get_ident)  # type: ignore[arg-type]
    with pytest.raises(sky.ConfigurationError, match="write `async def`"):
        compute(name="a")(lambda node: None)  # type: ignore[arg-type,return-value]

    async def alone() -> None: ...

    with pytest.raises(sky.ConfigurationError, match=r"write `async def alone\(node: Compute\)`"):
        compute(name="a")(alone)  # type: ignore[arg-type]
