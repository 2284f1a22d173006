"""Pools as pods of a real Kubernetes cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import urllib3

import skyward as sky
from skyward.nodes.records import Journal
from skyward.providers import Order, Request
from skyward.providers.kubernetes import manifests
from skyward.providers.kubernetes.manifests import merged
from skyward.testing import ProviderSuite, plain_request

from .. import walks
from ..conftest import only_in_all
from ..device.proxy import Proxy
from . import kept_pools, kube
from .leftovers import PHASES, Script, press_ctrl_c, show_and_remove_after_a_kill
from .training import device_losses, synchronised

QUIET = sky.Options(console=False)
RETRYING = sky.Options(console=False, retries=2)
DOCS = Path(__file__).parents[2] / "docs" / "kubernetes.md"


class TestKubernetes(ProviderSuite):
    """What every provider must do."""

    @pytest.fixture
    def provider(self, cluster: str) -> sky.Kubernetes:
        return kube.provider(cluster)

    @pytest.fixture
    def machine_request(self) -> Request:
        return plain_request()


# Pools.


@sky.function
def shared_memory() -> int:
    """How many bytes of shared memory the pod has."""
    shared = os.statvfs("/dev/shm")
    return shared.f_blocks * shared.f_frsize


@only_in_all
def test_ddp_over_two_pods(namespace: kube.Namespace, eventually: Callable[..., None]) -> None:
    provider = namespace.provider()
    with sky.Compute(
        provider, nodes=2, plugins=[sky.plugins.torch()], options=QUIET, memory_gb=4
    ) as compute:
        first, second = synchronised() @ compute

        pods = {pod.metadata.name: pod for pod in namespace.pods()}
        assert [first[0], second[0]] == [
            next(name for name, pod in pods.items() if pod.metadata.labels[key] == node)
            for key, node in (("skyward.dev/node", "0"), ("skyward.dev/node", "1"))
        ]
        addresses = tuple(pods[each[0]].status.pod_ip for each in (first, second))
        assert first[1] == second[1] == addresses
        assert [node.address for node in compute.nodes] == list(addresses)
        assert first[2] == second[2]
        assert (shared_memory() >> compute) > 64 << 20
        eventually(
            lambda: all(
                pod.status.container_statuses[0].ready
                for pod in namespace.core.list_namespaced_pod(namespace.name).items
            ),
            30,
            "pods that are ready",
        )


@only_in_all
def test_a_pool_stays_as_pods_is_stopped_and_starts_again(namespace: kube.Namespace) -> None:
    workers = kept_pools.start(namespace.provider(), "pods")
    assert namespace.deadline() is None
    kept_pools.use_elsewhere("pods", workers)

    assert kept_pools.says("stop", "pods").startswith("pods: stopped; `sky start pods`")

    assert namespace.pods() == []
    assert kept_pools.says("start", "pods") == "pods: 1 node started\n"
    assert namespace.deadline() is None
    with sky.attach("pods") as compute:
        assert kept_pools.pid() >> compute
    kept_pools.says("stop", "pods")
    kept_pools.end("pods")


@sky.function
def doubled(data: bytes) -> bytes:
    return data * 2


@only_in_all
def test_device_training_over_port_forward(namespace: kube.Namespace, tmp_path: Path) -> None:
    """Also when every connection to the API server is cut, and what forwards ports is killed."""

    def cut(step: int) -> None:
        if step == 10:
            proxy.cut()
        if step == 15:
            killed.extend(forwarders())
            for each in killed:
                each.kill()

    def forwarders() -> list[psutil.Process]:
        ours = psutil.Process().children()
        return [each for each in ours if any("streams.serve" in word for word in each.cmdline())]

    def connected() -> set[str]:
        ends = [each.raddr for each in psutil.Process().net_connections("tcp") if each.raddr]
        return {end.ip for end in ends}

    killed: list[psutil.Process] = []
    proxy = Proxy(f"tcp:{_server(namespace.kubeconfig)}")
    try:
        kubeconfig = kube.changed_kubeconfig(
            namespace.kubeconfig,
            tmp_path / "config",
            server=f"https://{proxy.endpoint.removeprefix('tcp:')}",
            namespace=namespace.name,
        )
        provider = kube.provider(kubeconfig, direct=False)
        # The kubeconfig may change afterwards: the pool stays where it is.
        kube.changed_kubeconfig(kubeconfig, Path(kubeconfig), namespace="elsewhere")
        with sky.Compute(provider, options=QUIET) as compute:
            device = compute.device("cpu")
            assert device_losses(device, 20, after=cut) == device_losses("cpu", 20)
            data = os.urandom(1 << 20) * 16
            assert doubled(data) >> compute == data * 2
            assert compute.nodes[0].address not in connected()
            assert proxy.cuts == 1
            assert provider.namespace == namespace.name
            assert len(killed) == len(forwarders()) == 1
        assert not forwarders()
    finally:
        proxy.close()


def _server(kubeconfig: str) -> str:
    (found,) = re.findall(r'server: "?https://([\d.:]+)', Path(kubeconfig).read_text())
    return str(found)


@sky.function
def once(folder: str, seconds: float) -> str:
    """Wait, the first time that it runs anywhere; says on which pod it ended."""
    import socket
    import time

    with contextlib.suppress(FileExistsError):
        Path(folder, "began").touch(exist_ok=False)
        time.sleep(seconds)
    return socket.gethostname()


@pytest.mark.parametrize(
    "way",
    [
        "deleted",
        pytest.param("evicted", marks=only_in_all),
        pytest.param("failed", marks=only_in_all),
    ],
)
def test_a_lost_pod_is_replaced_and_its_task_retried(
    namespace: kube.Namespace,
    state: Journal,
    tmp_path: Path,
    eventually: Callable[..., None],
    way: str,
) -> None:
    volume = sky.Volume(str(tmp_path))
    with sky.Compute(namespace.provider(), options=RETRYING, volumes=[volume]) as compute:
        (pod,) = namespace.pods()
        future = once(str(tmp_path), 100) > compute
        eventually((tmp_path / "began").exists, 30, "the task")
        _lose(namespace, state, pod.metadata.name, way)

        survivor = future.result(60)
        assert survivor != pod.metadata.name
        assert [each.metadata.name for each in namespace.pods() if _runs(each)] == [survivor]
        assert [node.state for node in compute.nodes] == ["ready"]
        jobs = namespace.batch.list_namespaced_job(namespace.name).items
        assert [job.spec.parallelism for job in jobs] == [1]


def _lose(namespace: kube.Namespace, journal: Journal, pod: str, way: str) -> None:
    if way == "deleted":
        namespace.core.delete_namespaced_pod(pod, namespace.name)
    elif way == "evicted":
        path = f"/api/v1/namespaces/{namespace.name}/pods/{pod}/eviction"
        body = {"metadata": {"name": pod}, "apiVersion": "policy/v1beta1", "kind": "Eviction"}
        namespace.call("POST", path, body)
    else:
        provider = namespace.provider()
        (machine,) = asyncio.run(provider.allocate(journal.pools()[0].id).find())
        # The pod may be gone before the command has said how it ended.
        with contextlib.suppress(sky.errors.UnreachableError):
            asyncio.run(machine.run(["sh", "-c", "kill 1"]))


def _runs(pod: Any) -> bool:
    return bool(pod.status.phase == "Running")


@only_in_all
def test_a_lost_machine_of_the_cluster_costs_a_pod(
    namespace: kube.Namespace, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    quickly = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    ]
    spread = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node2"]}
    preferred = {"weight": 100, "preference": {"matchExpressions": [spread]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}
    template = merged(kube.template(), {"tolerations": quickly, "affinity": affinity})
    provider = namespace.provider(pod_template=template)
    volume = sky.Volume(str(tmp_path))
    with contextlib.ExitStack() as stack:
        pool = sky.Compute(provider, options=RETRYING, volumes=[volume])
        compute = stack.enter_context(pool)
        (pod,) = namespace.pods()
        assert pod.spec.node_name == "node2"
        future = once(str(tmp_path), 300) > compute
        eventually((tmp_path / "began").exists, 30, "the task")
        with kube.lost_node2():
            assert future.result(150) != pod.metadata.name
            began = time.monotonic()
            stack.close()
            assert time.monotonic() - began < 60


@only_in_all
def test_a_pool_grows_and_shrinks(
    namespace: kube.Namespace, eventually: Callable[..., None]
) -> None:
    """`Nodes(2, min=1)` begins with what a quota allows, and goes on when there is more."""

    def running() -> int:
        return sum(map(_runs, namespace.pods()))

    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    namespace.make("v1", "resourcequotas", quota)
    eventually(lambda: _quota_counts(namespace), 30, "the quota")
    with sky.Compute(namespace.provider(), nodes=sky.Nodes(2, min=1), options=QUIET) as compute:
        assert len([node for node in compute.nodes if node.state == "ready"]) == 1
        namespace.core.delete_namespaced_resource_quota("few", namespace.name)
        eventually(
            lambda: [node.state for node in compute.nodes] == ["ready", "ready"], 90, "the other"
        )
        assert running() == 2
        compute.resize(1)
        eventually(lambda: running() == 1, 30, "one pod less")
        compute.resize(3)
        eventually(lambda: [node.state for node in compute.nodes] == ["ready"] * 3, 60, "two more")
        assert running() == 3
        assert len(set(doubled(b"a") @ compute)) == 1


def _quota_counts(namespace: kube.Namespace) -> bool:
    (quota,) = namespace.core.list_namespaced_resource_quota(namespace.name).items
    return bool(quota.status.hard)


@only_in_all
def test_a_job_that_was_removed_is_made_again(
    namespace: kube.Namespace, eventually: Callable[..., None]
) -> None:
    """Also when the API server is busy just then, and its watch ends."""
    with sky.Compute(namespace.provider(), options=RETRYING) as compute:
        (job,) = namespace.batch.list_namespaced_job(namespace.name).items
        shared: Any = compute._open_fleet.allocation
        request, refused = shared.access._pools.request, []

        def busy(method: str, url: str, **given: Any) -> Any:
            if "watch" in url and len(refused) < 3:
                refused.append(url)
                raise urllib3.exceptions.ProtocolError("the API server restarts")
            return request(method, url, **given)

        shared.access._pools.request = busy
        shared.access._watching.shutdown()
        eventually(lambda: len(refused) == 3, 30, "the watch's end")
        namespace.batch.delete_namespaced_job(
            job.metadata.name, namespace.name, propagation_policy="Background"
        )
        eventually(lambda: compute.stats().nodes_lost == 1, 60, "the loss")
        eventually(lambda: compute.nodes[0].state == "ready", 60, "another pod")
        assert doubled(b"a") >> compute == b"aa"
        (again,) = namespace.batch.list_namespaced_job(namespace.name).items
        assert again.metadata.uid != job.metadata.uid


# Processes that end in the middle.


def _script(namespace: kube.Namespace) -> Script:
    setup = (
        "from tests.providers import kube\n"
        f"provider = kube.provider({namespace.kubeconfig!r}, namespace={namespace.name!r})"
    )
    return Script("provider", setup)


@only_in_all
@pytest.mark.parametrize("phase", PHASES)
def test_what_a_killed_client_leaves_is_removed_by_sky_down(
    namespace: kube.Namespace, state: Journal, phase: str
) -> None:
    show_and_remove_after_a_kill(_script(namespace), phase, state)


@only_in_all
def test_ctrl_c_leaves_nothing(namespace: kube.Namespace, state: Journal) -> None:
    press_ctrl_c(_script(namespace), "starting the agent", state)


@only_in_all
def test_what_a_killed_client_leaves_ends_at_its_deadline(cluster: str) -> None:
    """With every phase in a namespace of its own, and a deadline that is brought forward."""
    namespaces = {phase: kube.Namespace(cluster) for phase in PHASES}
    try:
        for phase, namespace in namespaces.items():
            with _script(namespace).reaching(phase) as process:
                namespace.until_not_empty()
                process.kill()
                process.wait()
            (job,) = namespace.batch.list_namespaced_job(namespace.name).items
            assert job.spec.active_deadline_seconds == 300
            namespace.until_started(job.metadata.name)
            change = {"spec": {"activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 1}}
            namespace.batch.patch_namespaced_job(job.metadata.name, namespace.name, change)
        for namespace in namespaces.values():
            # A kubelet may look at a pod that was deleted while it started only after two minutes.
            namespace.until_empty(ending=True, seconds=180)
    finally:
        for namespace in namespaces.values():
            namespace.remove()


@only_in_all
def test_a_container_without_a_client_ends_itself(namespace: kube.Namespace) -> None:
    """But not while a command of the client's runs, such as an installation."""
    main = manifests._MAIN.replace(str(manifests.IDLE_SECONDS), "12")
    impatient = {"containers": [{"name": "node", "command": ["sh", "-c", main]}]}
    provider = namespace.provider(pod_template=merged(kube.template(), impatient))

    async def scenario() -> None:
        allocation = provider.allocate("idle")
        machine = await allocation.get(Order("idle", 0, plain_request()))
        assert await machine.run(["sleep", "20"]) == 0
        async with asyncio.timeout(60):
            while await machine.alive():
                await asyncio.sleep(0.2)
        await machine.destroy()
        # A pod that was lost would be ordered again; this one is not.
        await asyncio.to_thread(namespace.until_not_empty)
        await allocation.close()

    asyncio.run(scenario())


# What goes wrong, in words.


class Refusals:
    """Orders that cannot be fulfilled, all given at once."""

    def __init__(self, namespace: kube.Namespace) -> None:
        self.told: dict[str, list[str]] = {}
        self.errors: dict[str, str] = {}
        self._namespace = namespace

    def run(self, orders: dict[str, tuple[sky.Kubernetes, Request]]) -> None:
        """Order everything, and wait until all is refused."""

        async def scenario() -> None:
            await asyncio.gather(*(self._order(name, *order) for name, order in orders.items()))
            # A Job whose pod ran and was lost stays for a moment: the node may be ordered again.
            await asyncio.to_thread(self._namespace.until_empty)

        asyncio.run(scenario())

    async def _order(self, name: str, provider: sky.Kubernetes, request: Request) -> None:
        told = self.told[name] = []
        order = Order(f"refused-{name.replace(' ', '-')}", 0, request, tell=told.append)
        try:
            machine = await provider.allocate(order.pool).get(order)
        except (sky.errors.PoolStartError, sky.errors.ConfigurationError) as problem:
            self.errors[name] = str(problem)
            return
        try:
            await machine.run(["sleep", "20"])
        except sky.errors.PoolStartError as problem:
            self.errors[name] = str(problem)
        await machine.destroy()


def _asking(volumes: tuple[sky.Volume, ...] = (), accelerator: Any = None) -> Request:
    return Request(accelerator, None, None, sky.Image(), volumes)


@pytest.fixture(scope="module")
def refusals(cluster: str) -> Iterator[Refusals]:
    """What the user is told of each thing that can be wrong with a pod."""
    namespace, full = kube.Namespace(cluster), kube.Namespace(cluster)
    try:
        refused = Refusals(namespace)
        quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
        full.make("v1", "resourcequotas", quota)
        full.until(lambda: _quota_counts(full))
        soon = {"timeout": 20}
        template = kube.template()
        lost = {
            "volumes": [{"name": "lost", "secret": {"secretName": "nowhere"}}],
            "containers": [
                {"name": "node", "volumeMounts": [{"name": "lost", "mountPath": "/lost"}]}
            ],
        }
        last_words = ["sh", "-c", "echo no such model >&2; exit 3"]
        dying = {"containers": [{"name": "node", "command": last_words}]}
        refused.run(
            {
                "gpu": (
                    namespace.provider(**soon),
                    _asking(accelerator=sky.accelerators.A100(count=64)),
                ),
                "image": (
                    namespace.provider(image="localhost/nowhere:1", timeout=60),
                    _asking(),
                ),
                "quota": (full.provider(**soon), _asking()),
                "missing claim": (
                    namespace.provider(**soon),
                    _asking((sky.Volume("pvc://nowhere", "/data"),)),
                ),
                "unbound claim": (
                    namespace.provider(**soon, storage_class="nowhere"),
                    _asking((sky.Volume("pvc://data?size=1Gi&remove=yes", "/data"),)),
                ),
                "mount": (
                    namespace.provider(**soon, pod_template=merged(template, lost)),
                    _asking(),
                ),
                "last words": (
                    namespace.provider(**soon, pod_template=merged(template, dying)),
                    _asking(),
                ),
                "invalid": (
                    namespace.provider(**soon, pod_template={"nodeSelector": {"a b": "c"}}),
                    _asking(),
                ),
            }
        )
        yield refused
        namespace.until_empty()
    finally:
        namespace.remove()
        full.remove()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu", r"did not run within 20 s: 0/2 nodes.*Insufficient nvidia.com/gpu.*; ask for less"),
        ("image", r"the image 'localhost/nowhere:1' cannot be pulled: .*; see that it exists"),
        ("quota", r"did not run within 20 s: .*exceeded quota: none.*; ask for less"),
        ("missing claim", r"there is no claim 'nowhere' in the namespace 'test-.*; make it, or"),
        ("unbound claim", r"did not run within 20 s: .*unbound .*; look at `kubectl describe pvc`"),
        ("mount", r'did not run within 20 s: .*secret "nowhere" not found.*; look at `kubectl'),
        ("last words", r"ended: exit status 3.*; it said:\nno such model"),
        ("invalid", r"making job .*nodeSelector.*; correct pod_template="),
    ],
)
def test_the_error_names_the_reason_and_the_next_step(
    refusals: Refusals, name: str, words: str
) -> None:
    assert re.search(words, refusals.errors[name], re.DOTALL), refusals.errors[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [("gpu", "Insufficient nvidia.com/gpu"), ("quota", "exceeded quota"), ("image", "ImagePull")],
)
def test_a_pending_pod_is_explained_while_it_waits(
    refusals: Refusals, name: str, words: str
) -> None:
    assert any(words in each for each in refusals.told[name]), refusals.told[name]


# Rights.


def test_without_rights_the_error_names_what_is_forbidden(
    namespace: kube.Namespace, tmp_path: Path
) -> None:
    kubeconfig = kube.changed_kubeconfig(
        namespace.kubeconfig,
        tmp_path / "config",
        user={"token": namespace.user()},
        namespace=namespace.name,
    )
    order = Order("denied", 0, plain_request())
    with pytest.raises(
        sky.errors.PoolStartError, match=r"cannot create resource .*jobs.* has the Role"
    ):
        asyncio.run(kube.provider(kubeconfig).allocate("denied").get(order))


def test_a_right_that_is_needed_later_is_missed_at_once(
    namespace: kube.Namespace, tmp_path: Path
) -> None:
    """Without it the cluster would end the pool at its first deadline; the Job is gone again."""
    rules = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "patch"]}
        if "jobs" in rule["resources"]
        else rule
        for rule in _documented_rules()
    ]
    kubeconfig = kube.changed_kubeconfig(
        namespace.kubeconfig,
        tmp_path / "config",
        user={"token": namespace.user(*rules)},
        namespace=namespace.name,
    )
    order = Order("denied", 0, plain_request())
    with pytest.raises(
        sky.errors.PoolStartError, match=r"cannot patch resource .*jobs.* has the Role"
    ):
        asyncio.run(kube.provider(kubeconfig).allocate("denied").get(order))
    assert namespace.objects(ending=False) == set()


@only_in_all
def test_the_documented_role_is_enough(namespace: kube.Namespace, tmp_path: Path) -> None:
    """For a user whose kubeconfig has a program that gives the token, as those of clouds do."""
    token = namespace.user(*_documented_rules())
    program = tmp_path / "login"
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "kind": "ExecCredential",
        "status": {"token": token},
    }
    program.write_text(f"#!/bin/sh\ncat <<'end'\n{json.dumps(credential)}\nend\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    login = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": str(program),
        "interactiveMode": "Never",
    }
    kubeconfig = kube.changed_kubeconfig(
        namespace.kubeconfig,
        tmp_path / "config",
        user={"exec": login},
        namespace=namespace.name,
    )
    volume = sky.Volume("pvc://kept?size=1Mi", "/kept")
    provider = kube.provider(kubeconfig, direct=False, storage_class=kube.BY_HAND)
    with (
        namespace.bindable("kept", tmp_path),
        sky.Compute(provider, volumes=[volume], options=QUIET) as compute,
    ):
        compute.resize(2)
        assert doubled(b"ab") @ compute == [b"abab", b"abab"]
        namespace.core.delete_namespaced_pod(namespace.pods()[0].metadata.name, namespace.name)
        namespace.until(lambda: compute.stats().nodes_lost == 1, 30)
        namespace.until(lambda: all(node.state == "ready" for node in compute.nodes), 60)
    assert namespace.objects(ending=False) == {"persistentvolumeclaims/kept"}
    namespace.core.delete_namespaced_persistent_volume_claim("kept", namespace.name)


def _documented_rules() -> list[dict[str, Any]]:
    import yaml

    for block in re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL):
        for document in yaml.safe_load_all(block):
            if document.get("kind") == "Role":
                return list(document["rules"])
    raise AssertionError(f"{DOCS} has no Role")


@sky.function
def from_inside(arguments: dict[str, Any]) -> tuple[str | None, str | None, bytes]:
    """A pool that a pod makes, with nothing but its own service account."""
    provider = sky.Kubernetes(**arguments)
    with sky.Compute(provider, options=sky.Options(console=False)) as compute:
        return provider.kubeconfig, provider.namespace, doubled(b"ab") >> compute


@only_in_all
def test_a_client_in_the_cluster_uses_its_own_account(
    namespace: kube.Namespace, tmp_path: Path
) -> None:
    """On the network of its machine, since this cluster's API server is on loopback."""
    if os.environ.get("SKYWARD_KUBERNETES_IMAGE"):
        pytest.skip("only pods of the testbed's cluster have this machine's files")
    host, _, port = _server(namespace.kubeconfig).rpartition(":")
    variables = {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": port,
        "KUBECONFIG": "/nowhere",
        "SKYWARD_STATE": str(tmp_path),
    }
    outer = {
        "hostNetwork": True,
        "containers": [
            {"name": "node", "env": [{"name": k, "value": v} for k, v in variables.items()]}
        ],
    }
    provider = namespace.provider(
        pod_template=merged(kube.template(), outer),
        service_account=namespace.account(*_documented_rules()),
    )
    inner = {"image": kube.IMAGE, "python": sys.executable, "pod_template": kube.template()}
    image, volume = sky.Image(env=variables), sky.Volume(str(tmp_path))
    with sky.Compute(provider, image=image, volumes=[volume], options=QUIET) as compute:
        assert from_inside({**inner, "cache": None}) >> compute == (
            "in-cluster",
            namespace.name,
            b"abab",
        )


@only_in_all
def test_where_spdy_is_refused_ports_are_forwarded_over_websockets(
    namespace: kube.Namespace, tmp_path: Path
) -> None:
    """Here by the rights, which differ for the two; elsewhere by a proxy."""
    rules = [
        {**rule, "verbs": ["get"]} if "pods/portforward" in rule["resources"] else rule
        for rule in _documented_rules()
    ]
    kubeconfig = kube.changed_kubeconfig(
        namespace.kubeconfig,
        tmp_path / "config",
        user={"token": namespace.user(*rules)},
        namespace=namespace.name,
    )
    data = os.urandom(1 << 20) * 4
    provider = kube.provider(kubeconfig, direct=False)
    with sky.Compute(provider, options=QUIET) as compute:
        assert doubled(data) >> compute == data * 2


@only_in_all
def test_what_the_first_pod_installed_the_second_one_finds(
    namespace: kube.Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @sky.function
    def interpreter() -> str:
        return sys.executable

    told = []
    for _ in range(2):
        provider = namespace.provider(python=None, cache=str(tmp_path / "cache"))
        with sky.Compute(provider, image=sky.Image(pip=["six"])) as compute:
            assert (interpreter() >> compute).startswith("/var/cache/skyward/envs/")
        told.append(capsys.readouterr().err)
    assert "installing packages" in told[0]
    assert "installing packages" not in told[1]


@only_in_all
def test_a_start_enters_no_file_that_is_not_listed(namespace: kube.Namespace) -> None:
    walks.check(walks.KUBERNETES, namespace.provider())
