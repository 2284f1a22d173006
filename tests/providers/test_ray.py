"""Pools on a real Ray cluster: a head and two nodes, through its jobs API and from inside."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.nodes import records as pool_records
from skyward.nodes.records import Journal
from skyward.providers import Order, Request
from skyward.providers.on_node.keeper import VARIABLE
from skyward.providers.ray import DriverDoor, Ray, RayAllocation, driver, records
from skyward.testing import ProviderSuite, plain_request

from ..conftest import only_in_all
from . import kept_pools
from .leftovers import PHASES, Script, press_ctrl_c, show_and_remove_after_a_kill, sky_says
from .ray_cluster import PYTHON, RayCluster, skip_if_absent
from .ssh_hosts import free_port
from .training import device_losses, synchronised

QUIET = sky.Options(console=False)
RETRYING = sky.Options(console=False, retries=2)


@pytest.fixture(scope="module")
def started() -> Iterator[RayCluster]:
    """A cluster for the tests of this file.

    Ray's own limit of 30 s for its parts cannot be changed: if a busy machine misses it, a new
    cluster is started once; if that one misses it, too, this machine is too slow for Ray.
    """
    skip_if_absent()
    for is_last in (False, True):
        made = RayCluster()
        try:
            made.wait()
            break
        except AssertionError as problem:
            made.stop()
            if "timed out during startup" not in str(problem):
                raise
            if is_last:
                pytest.skip("Ray does not start here within the 30 s that it gives itself")
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def ray(started: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The cluster, with a user who may use it."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_HEADERS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in started.variables.items():
        monkeypatch.setenv(name, value)
    return started


@pytest.fixture
def emptied(ray: RayCluster) -> Iterator[RayCluster]:
    """The cluster, in which nothing may be left."""
    yield ray
    ray.until_empty()


class TestRay(ProviderSuite):
    """What every provider must do."""

    @pytest.fixture
    def provider(self, ray: RayCluster) -> sky.Ray:
        """With the driver beside the client."""
        return ray.provider(address="auto")

    @pytest.fixture
    def machine_request(self) -> Request:
        """What any machine has."""
        return plain_request()


@only_in_all
class TestRayJobs(TestRay):
    """The same, with the driver as a job."""

    @pytest.fixture
    def provider(self, ray: RayCluster) -> sky.Ray:
        """Through the jobs API."""
        return ray.provider()


# Pools.


@sky.function
def where() -> tuple[int, str, str]:
    return sky.instance_info().node, os.environ.get("CUDA_VISIBLE_DEVICES", "-"), _raylet()


def _raylet() -> str:
    """The raylet above the actor that keeps this process's machine, by its keeper's folder."""
    return os.environ["SKYWARD_KEEPER"]


@only_in_all
def test_ddp_and_a_device_train_on_two_nodes(emptied: RayCluster, state: Journal) -> None:
    plugins = [sky.plugins.torch(backend="gloo")]
    with sky.Compute(emptied.provider(), nodes=2, plugins=plugins, options=QUIET) as compute:
        first, second = synchronised() @ compute
        assert len(first[1]) == 2
        assert first[2] == second[2]
        assert device_losses(compute.device("cpu", node=1)) == device_losses("cpu")
        raylets = {each["node_id"] for each in emptied.machines()}
        assert len(raylets) == 2, "they are spread"
        assert len(emptied.jobs()) == 1
    assert list((state.path.parent / "ray").glob("*")) == []


@only_in_all
def test_from_inside_the_cluster_no_job_is_needed(emptied: RayCluster) -> None:
    """And its workers on this machine share memory: large arguments are not copied twice."""
    with sky.Compute(emptied.provider(address="auto"), nodes=2, options=QUIET) as compute:
        assert [node for node, _, _ in where() @ compute] == [0, 1]
        assert emptied.jobs() == []
        data = bytes(range(256)) * (1 << 16)
        assert sky.function(len)(data) @ compute == [len(data)] * 2
        assert _shares(compute)


@only_in_all
def test_a_pool_stays_in_the_cluster(
    emptied: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = kept_pools.start(emptied.provider(), "bundles")
    kept_pools.use_elsewhere("bundles", workers)
    file = str(tmp_path / "file")
    kept_pools.says("attach", "bundles", "--export", file)
    with monkeypatch.context() as other_machine:
        other_machine.setenv("SKYWARD_STATE", str(tmp_path / "elsewhere"))
        kept_pools.says("attach", "--import", file)
        kept_pools.use_elsewhere("bundles", workers)
    refused = kept_pools.says("stop", "bundles", code=1)
    assert "bundles: the provider ray cannot stop a pool and keep its machines" in refused
    kept_pools.end("bundles")


@only_in_all
@pytest.mark.parametrize("address", ["auto", None])
def test_gc_ends_a_driver_that_no_record_knows(
    emptied: RayCluster, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {} if address is None else {"address": address}
    kept_pools.start(emptied.provider(**given), "bundles")
    where = address or emptied.dashboard
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", where)
    pool_records.forget("bundles")
    for pool in Journal().pools():
        Journal().forget(pool.id)
    if address is None:
        # As on another machine, which has no keys of the driver.
        for pool_id in records.pools():
            records.remove(pool_id)
    listed = kept_pools.says("gc", "--provider", "ray")
    assert re.search("bundles +ray .* may be in use +(process|job) ", listed)
    assert "1 machine" in kept_pools.says("gc", "--provider", "ray", "--all", "--yes")
    assert kept_pools.says("gc", "--provider", "ray") == f"nothing of any pool: ray at {where}\n"


@only_in_all
@pytest.mark.parametrize("address", ["auto", None])
def test_the_machine_of_an_agent_that_was_killed_is_used_again(
    emptied: RayCluster, address: str | None, eventually: Callable[..., None]
) -> None:
    given = {} if address is None else {"address": address}
    kept_pools.start(emptied.provider(**given), "bundles", nodes=2)
    with sky.attach("bundles") as compute:
        before = pool_records.read("bundles").nodes[1]
        os.kill(before.pid, signal.SIGKILL)
        eventually(
            lambda: pool_records.read("bundles").nodes[1].pid != before.pid, 60, "another agent"
        )
        assert len(kept_pools.pid() @ compute) == 2
    kept_pools.end("bundles", machines=2)


def _shares(compute: sky.Compute) -> bool:
    nodes = compute._open_fleet.nodes
    return all(lane.channel.shares_memory for node in nodes for lane in node.lanes.values())


@only_in_all
def test_gpus_are_those_that_ray_assigns(
    emptied: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    accelerator = sky.accelerators.H100()
    with sky.Compute(
        emptied.provider(), nodes=2, accelerator=accelerator, options=QUIET
    ) as compute:
        assert sorted(gpus for _, gpus, _ in where() @ compute) == ["0", "1"]


@only_in_all
def test_a_client_that_reaches_the_driver_alone_reaches_all_nodes(
    emptied: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a laptop that has two ports of the head forwarded, and no more."""
    reach, relayed_to = RayAllocation.reach, set()

    async def only_relayed(self: RayAllocation, node: int, *given: Any, relayed: bool) -> Any:
        if not relayed:
            raise ConnectionRefusedError("no route")
        relayed_to.add(node)
        return await reach(self, node, *given, relayed=relayed)

    monkeypatch.setattr(RayAllocation, "reach", only_relayed)
    provider = emptied.provider(direct=False, port=free_port())
    with sky.Compute(provider, nodes=2, options=QUIET) as compute:
        assert [node for node, _, _ in where() @ compute] == [0, 1]
        (record,) = map(records.read, records.pools())
        assert record is not None
        assert record.driver is not None
        assert record.driver.port == provider.port
    assert relayed_to == {0, 1}


@only_in_all
def test_a_driver_out_of_reach_is_said_with_the_next_step(
    emptied: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> Any:
        raise ConnectionRefusedError("no route")

    monkeypatch.setattr(DriverDoor, "open", refuse)
    with pytest.raises(sky.errors.UnreachableError) as caught:
        sky.Compute(emptied.provider(), options=QUIET).__enter__()
    assert "the driver runs in the cluster, but this machine cannot connect to it" in str(
        caught.value
    )
    assert "ssh -L 8265:localhost:8265 -L 8266:localhost:8266" in str(caught.value)


# Losses.


@sky.function
def once(folder: str) -> str:
    """Wait, the first time that it runs anywhere; says on which machine it ended."""
    label = os.path.basename(os.environ["SKYWARD_KEEPER"])
    with contextlib.suppress(FileExistsError), Path(folder, "began").open("x") as file:
        file.write(label)
        file.flush()
        time.sleep(100)
    return label


@only_in_all
@pytest.mark.parametrize("way", ["actor", "keeper", "job"])
def test_a_lost_machine_is_replaced_and_its_task_retried(
    emptied: RayCluster, tmp_path: Path, eventually: Callable[..., None], way: str
) -> None:
    """Its actor is killed, or its keeper; or the job is stopped from outside."""
    began = tmp_path / "began"
    with sky.Compute(emptied.provider(), nodes=2, options=RETRYING) as compute:
        (job,) = emptied.jobs()
        future = once(str(tmp_path)) > compute
        eventually(lambda: began.exists() and began.read_text(), 30, "the task")
        label = began.read_text()
        if way == "actor":
            os.kill(_actor(label), signal.SIGKILL)
        elif way == "keeper":
            os.kill(_keeper(label), signal.SIGKILL)
        else:
            emptied.get(f"/api/jobs/{job}/stop", "POST")
        assert future.result(60) != label
        eventually(lambda: label not in _labels(), 60, "the end of what was lost")
        eventually(lambda: [n.state for n in compute.nodes] == ["ready"] * 2, 60, "another node")
        assert compute.stats().nodes_lost == (2 if way == "job" else 1)
        assert (emptied.jobs() == [job]) == (way != "job")


def _labels() -> set[str]:
    """The machines that have processes."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.add(os.path.basename(process.environ().get(VARIABLE, "")))
    return found - {""}


def _actor(label: str) -> int:
    """The process of the actor that holds the keeper's pipe."""
    pipe = os.readlink(f"/proc/{_keeper(label)}/fd/0")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ends = {os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()}
            if pipe in ends and process.pid != _keeper(label):
                return process.pid
    raise AssertionError(f"{label} has no actor")


def _keeper(label: str) -> int:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-1:] == [label]:
                return process.pid
    raise AssertionError(f"{label} has no keeper")


@only_in_all
def test_a_lost_node_of_the_cluster_costs_a_machine(emptied: RayCluster) -> None:
    """Ray puts the bundle elsewhere."""
    provider = emptied.provider(spread="STRICT_SPREAD")
    with sky.Compute(provider, nodes=3, options=RETRYING) as compute:
        with emptied.without_a_node():
            emptied.until(lambda: compute.stats().nodes_lost == 1, 60)
        emptied.until(lambda: [n.state for n in compute.nodes] == ["ready"] * 3, 90)
        assert len({each["node_id"] for each in emptied.machines()}) == 3


@only_in_all
def test_a_pool_grows_and_shrinks(emptied: RayCluster) -> None:
    """A node that is added has a placement group of its own, which goes with it."""
    with sky.Compute(emptied.provider(), nodes=(1, 3), options=QUIET) as compute:
        assert len(_groups(emptied)) == 1
        compute.resize(3)
        emptied.until(lambda: [n.state for n in compute.nodes] == ["ready"] * 3)
        assert len(_groups(emptied)) == 3
        compute.resize(1)
        emptied.until(lambda: len(_groups(emptied)) == 1)
        assert [node for node, _, _ in where() @ compute] == [0]


def _groups(ray: RayCluster) -> list[Any]:
    return [each for each in ray._listed("placement_groups") if each["state"] == "CREATED"]


@pytest.mark.parametrize(
    ("kinds", "grows"),
    [
        ({"fff0": "ray.head.default"}, True),
        ({"a" * 56: f"node_{'a' * 56}"}, False),
        ({"a" * 56: f"node_{'a' * 56}", "b": "workergroup"}, True),
    ],
)
def test_whether_a_cluster_grows_is_known_from_its_kinds_of_nodes(
    kinds: dict[str, str], grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray 2.60 reports them: without an autoscaler, each node is a kind of its own."""
    told = json.dumps({"autoscaler_report": {"active_nodes": {}, "node_type_mapping": kinds}})
    store = types.SimpleNamespace(_internal_kv_get=lambda key: told.encode())
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", store)
    assert driver.grows(None) is grows


@only_in_all
def test_a_cluster_that_grows_is_asked_for_what_it_does_not_have_yet(emptied: RayCluster) -> None:
    provider = emptied.provider(address="auto", autoscales=True)
    request = dataclasses.replace(plain_request(), vcpus=64)

    async def scenario() -> str:
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def tell(reason: str) -> None:
            if "the cluster may grow" in reason and not told.done():
                told.set_result(reason)

        allocation = provider.allocate("grows")
        creating = asyncio.create_task(allocation.get(Order("grows", 0, request, tell=tell)))
        await asyncio.wait({creating, told}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        creating.cancel()
        await asyncio.wait({creating})
        for machine in await allocation.find():
            await machine.destroy()
        return told.result()

    said = "reserve 64 CPU: 6 of 6 CPU free; the cluster may grow"
    assert said in asyncio.run(scenario())


@only_in_all
def test_the_example_trains_on_two_nodes(
    emptied: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_RAY_PYTHON", sys.executable)
    example = Path(__file__).parents[2] / "examples" / "ray_pool.py"
    done = subprocess.run(
        [sys.executable, str(example), emptied.dashboard],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"rank 1 on [\d.]+: 128 samples, (9\d|100)% right", done.stdout)
    assert re.search(r"on sky:\d of node 1: (9\d|100)% right", done.stdout)


# Clients that end in the middle.


def _script(ray: RayCluster, options: str = "") -> Script:
    provider = f"sky.Ray({ray.dashboard!r}, python={sys.executable!r})"
    return Script(provider, options=options)


@only_in_all
@pytest.mark.parametrize("phase", PHASES)
def test_sky_down_removes_what_a_killed_client_had(
    emptied: RayCluster, state: Journal, phase: str
) -> None:
    show_and_remove_after_a_kill(_script(emptied), phase, state)


@only_in_all
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_leaves_nothing(emptied: RayCluster, state: Journal, phase: str) -> None:
    press_ctrl_c(_script(emptied), phase, state)


@only_in_all
@pytest.mark.parametrize("address", ["dashboard", "auto"])
def test_without_its_client_a_pool_ends_itself(
    emptied: RayCluster, state: Journal, address: str
) -> None:
    script = _script(emptied, "orphan_timeout=5")
    if address == "auto":
        script.code = script.code.replace(emptied.dashboard, "auto")
    with script.reaching("ready") as process:
        assert len(emptied.machines()) == 2
        process.kill()
        process.wait()
    emptied.until(lambda: not emptied.machines(), 90)
    sky_says("down")


@only_in_all
def test_another_machine_of_the_user_can_end_the_job(emptied: RayCluster, state: Journal) -> None:
    """It has the journal, from a shared home for example, but not the keys."""
    with _script(emptied).reaching("ready") as process:
        process.kill()
        process.wait()
    records.remove(state.pools()[0].id)
    sky_says("down")


# What the cluster does not have.


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"vcpus": 64}, r"never have 1 x 64 CPU; it does not grow .* 2 x \(2 CPU"),
        pytest.param({"nodes": 4, "vcpus": 2}, r"never have 4 x 2 CPU", marks=only_in_all),
        pytest.param(
            {"accelerator": sky.accelerators.H100(count=8)},
            r"never have 1 x 1 CPU and 8 GPU; .*2 GPU",
            marks=only_in_all,
        ),
    ],
)
def test_what_the_cluster_can_never_have_is_refused_at_once(
    emptied: RayCluster, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(sky.errors.PoolStartError, match=words):
        sky.Compute(emptied.provider(), **asked, options=QUIET).__enter__()


@only_in_all
def test_what_a_node_waits_for_is_told(
    emptied: RayCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = emptied.provider(resources={"big": 2}, timeout=12)
    with sky.Compute(emptied.provider(resources={"big": 2}), options=QUIET):
        with pytest.raises(sky.errors.PoolStartError) as caught:
            sky.Compute(provider, options=sky.Options(console=True)).__enter__()
    said = "waiting for Ray to reserve 1 CPU and 2 big"
    assert said in capsys.readouterr().err
    assert "Ray did not have it within 12 s" in str(caught.value)
    assert "0 of 2 big free" in str(caught.value)


# What is wrong.


def test_a_wrong_token_is_said(ray: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(
        sky.errors.PoolStartError, match=r"the cluster refuses this user .*RAY_AUTH_TOKEN"
    ):
        sky.Compute(ray.provider(), options=QUIET).__enter__()


@only_in_all
def test_another_ray_than_the_clusters_is_said_by_name(
    emptied: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        f"if sys.prefix == {str(PYTHON.parent.parent)!r} and len(sys.argv[0]) < 3:\n"
        "    import ray\n"
        "    ray.__version__ = '2.9.9'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(sky.errors.PoolStartError) as caught:
        sky.Compute(emptied.provider(address="auto"), options=QUIET).__enter__()
    assert "the Ray or the Python here is not the cluster's" in str(caught.value)
    assert "Ray: 2.9.9" in str(caught.value)
    assert "which needs no Ray here" in str(caught.value)


def test_where_nobody_answers_the_address_is_named() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        sky.errors.UnreachableError, match=rf"Ray\('{address}'\): nobody answers there"
    ):
        sky.Compute(sky.Ray(address), options=QUIET).__enter__()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"address": "ray://head:10001"}, "'http://head:8265', 'auto' or 'head:6379'; ray:// is"),
        ({"address": "head"}, "give 'http://head:8265'"),
        ({"spread": "WIDE"}, "choose True, False or SPREAD"),
        ({"resources": {"CPU": 2}}, r"write Compute\(vcpus="),
        ({"port": 70000}, "write a port from 1 to 65535"),
        ({"headers": "a"}, "not a mapping: str"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=words):
        sky.Ray(**given)


def test_the_address_is_that_of_rays_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert sky.Ray().address == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert sky.Ray().address == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265")
    assert sky.Ray().address == "http://head:8265"


def test_a_secret_header_is_not_described() -> None:
    provider = Ray("http://head:8265", headers={"Authorization": "Bearer secret"})
    assert "secret" not in json.dumps(dict(provider.describe()))


def test_keys_that_no_other_machine_can_use_are_not_exported() -> None:
    with pytest.raises(
        sky.errors.PoolError, match="is a process of this machine, so no other machine"
    ):
        Ray("auto").export_keys("p1")
    with pytest.raises(sky.errors.PoolError, match="export its record on the machine that made it"):
        Ray("http://head:8265").export_keys("p1")
    with pytest.raises(sky.errors.PoolError, match="the keys to the driver are damaged"):
        Ray("http://head:8265").import_keys("p1", {"driver": "{"})
    assert records.pools() == []


def test_the_program_of_the_cluster_needs_the_standard_library_alone() -> None:
    """Ray's Python has no skyward: whatever it imports must be there."""
    text = Path(driver.__file__).read_text()
    modules = re.findall(r"^\s*(?:import|from) ([\w.]+)", text, re.MULTILINE)
    assert {each.split(".")[0] for each in modules} <= {*sys.stdlib_module_names, "__future__"}
