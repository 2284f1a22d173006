"""What a pool asks of a cluster, and what it makes of the answers, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import skyward as sky
from skytorch.client.pods import Kubernetes
from skyward.accelerators import Accelerator
from skyward.providers import Request
from skyward.providers.kubernetes import NodePod, PodAllocation, access, manifests, pending, streams
from skyward.providers.kubernetes.manifests import Pod, claim_of, merged

CONFIG = {
    "clusters": [{"name": "one", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "me", "user": {"token": "secret"}}],
    "contexts": [
        {"name": "work", "context": {"cluster": "one", "user": "me", "namespace": "team"}},
        {"name": "home", "context": {"cluster": "one", "user": "me"}},
    ],
    "current-context": "work",
}


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubeconfig with two contexts, where kubectl would look for it."""
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(CONFIG))
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def request(**changed: Any) -> Request:
    given: dict[str, Any] = {"accelerator": None, "vcpus": None, "memory_gb": None}
    return Request(**{**given, "image": sky.Image(), "volumes": (), **changed})


def spec_of(pod: Pod | None = None, **asked: Any) -> dict[str, Any]:
    """The spec of the pods of a pool."""
    made = manifests.job("sky-a", "a", pod or Pod("busybox"), request(**asked), [0, 1])
    return dict(made["spec"]["template"]["spec"])


# Where the cluster is.


def test_another_process_makes_the_same_pods(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("spec: {priorityClassName: low, schedulerName: theirs}")
    monkeypatch.setenv("SKYWARD_KUBERNETES_TEMPLATE", str(site))
    monkeypatch.setenv("SKYWARD_KUBERNETES_IMAGE", "site/python:1")
    provider = sky.Kubernetes(
        pod_template={"schedulerName": "mine"},
        node_selector={"zone": "a"},
        tolerations=[{"key": "gpu"}],
        command=["sleep", "1"],
        job="mnist",
    )
    described = json.loads(json.dumps(provider.describe()))
    for variable in ("TEMPLATE", "IMAGE"):
        monkeypatch.delenv(f"SKYWARD_KUBERNETES_{variable}")
    again = sky.Kubernetes(**described)

    assert again.describe() == described
    assert (again.image, again.job, list(again.command)) == (
        "site/python:1",
        "mnist",
        ["sleep", "1"],
    )
    assert again.pod_template == {"spec": {"priorityClassName": "low", "schedulerName": "mine"}}


def test_a_compute_of_skytorch_describes_its_pods_as_the_provider_does(kubeconfig: Path) -> None:
    provider = Kubernetes(job="mnist", on_pending=print)

    described = json.loads(json.dumps(provider.describe()))
    assert described == sky.Kubernetes(job="mnist").describe()


def test_context_and_namespace_are_pinned_when_the_provider_is_made(kubeconfig: Path) -> None:
    provider = sky.Kubernetes()
    kubeconfig.write_text(yaml.safe_dump(CONFIG | {"current-context": "home"}))

    assert (provider.context, provider.namespace) == ("work", "team")
    place = {"kubeconfig": str(kubeconfig.resolve()), "context": "work", "namespace": "team"}
    assert place.items() <= provider.describe().items()
    assert (sky.Kubernetes().context, sky.Kubernetes().namespace) == ("home", "default")
    assert sky.Kubernetes(context="work", namespace="mine").namespace == "mine"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"context": "nope"}, r"Kubernetes\(context='nope'\): .* has no such context; it has"),
        ({"kubeconfig": "/nowhere"}, "there is no cluster to talk to: /nowhere .*set KUBECONFIG"),
        ({"image": 3}, "image"),
        ({"namespace": ""}, "namespace"),
        ({"command": "run"}, "letter by letter"),
        ({"job": "My Job"}, "small letters, digits and hyphens, at most 59"),
        ({"job": "a" * 60}, "at most 59"),
        ({"timeout": -1}, "timeout"),
        ({"pod_template": ["spec"]}, "not a mapping"),
        ({"context": "work", "kubeconfig": "/nowhere"}, "/nowhere does not exist, or names no"),
    ],
)
def test_wrong_arguments_are_refused(kubeconfig: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=words):
        sky.Kubernetes(**given)


def test_a_kubeconfig_without_a_current_context_names_those_it_has(kubeconfig: Path) -> None:
    kubeconfig.write_text(yaml.safe_dump(CONFIG | {"current-context": ""}))

    with pytest.raises(
        sky.errors.ConfigurationError, match="no current context; name one of home, work"
    ):
        sky.Kubernetes()


def test_in_a_pod_its_own_credentials_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "namespace").write_text("team\n")
    monkeypatch.setattr(access, "_NAMESPACE", folder / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")

    place = {"kubeconfig": access.IN_CLUSTER, "context": None, "namespace": "team"}
    assert place.items() <= sky.Kubernetes().describe().items()


def test_a_token_shows_in_no_error(kubeconfig: Path) -> None:
    reached = access.Access(access.resolve(None, None, None))

    with pytest.raises(sky.errors.UnreachableError, match="does not answer") as caught:
        reached.get("pods")
    assert reached.token == "secret"
    assert "secret" not in str(caught.value)


def test_a_user_may_act_for_another(kubeconfig: Path) -> None:
    user = {"token": "secret", "as": "robot", "as-groups": ["a", "b"]}
    kubeconfig.write_text(yaml.safe_dump(CONFIG | {"users": [{"name": "me", "user": user}]}))

    assert access.Access(access.resolve(None, None, None)).identity() == [
        ("Authorization", "Bearer secret"),
        ("Impersonate-User", "robot"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
    ]


def test_a_proxy_is_not_used_for_those_it_is_not_for(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    reached = access.Access(access.resolve(None, None, None))
    assert reached.stream_server().proxy == "http://proxy.example:3128"

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert access.Access(access.resolve(None, None, None)).stream_server().proxy == ""


# What a pod is to have.


def test_processors_memory_and_shared_memory() -> None:
    spec = spec_of(vcpus=1.5, memory_gb=8)

    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"cpu": "1500m", "memory": "8192Mi"}
    assert container["resources"]["requests"] == {"cpu": "1500m", "memory": "8192Mi"}
    shared = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4096Mi"}}
    assert shared in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_gpus_by_resource_label_and_taint() -> None:
    spec = spec_of(accelerator=sky.accelerators.H100(count=8))

    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    wanted = {
        expression["key"]: expression.get("values", [])
        for term in required["nodeSelectorTerms"]
        for expression in term["matchExpressions"]
        if expression["operator"] == "In"
    }
    assert "NVIDIA-H100-80GB-HBM3" in wanted["nvidia.com/gpu.product"]
    assert "nvidia-h100-80gb" in wanted["cloud.google.com/gke-accelerator"]
    assert wanted["karpenter.k8s.aws/instance-gpu-name"] == ["h100"]
    unlabelled = required["nodeSelectorTerms"][-1]["matchExpressions"]
    assert {each["operator"] for each in unlabelled} == {"DoesNotExist"}


@pytest.mark.parametrize(
    ("accelerator", "resource"),
    [
        (sky.accelerators.MI300X(), "amd.com/gpu"),
        (sky.accelerators.TRAINIUM2(), "aws.amazon.com/neuron"),
        (sky.accelerators.TPU_V5E(), "google.com/tpu"),
        (sky.accelerators.Custom("Gaudi2", "96GB"), "habana.ai/gaudi"),
        (sky.accelerators.Custom("Whatever", "8GB"), "nvidia.com/gpu"),
    ],
    ids=str,
)
def test_other_vendors_have_resources_of_their_own(accelerator: Accelerator, resource: str) -> None:
    assert manifests.gpu_resource(accelerator) == resource


def test_every_nvidia_model_has_a_product_label() -> None:
    for model in sky.accelerators.models():
        accelerator = model()
        if accelerator.cuda is not None:
            assert manifests.gpu_resource(accelerator) == "nvidia.com/gpu", accelerator
            assert '"operator": "Exists"' not in json.dumps(manifests.gpu_affinity(accelerator)), (
                accelerator
            )


def test_where_a_pod_may_run() -> None:
    pod = Pod(
        "busybox",
        service_account="me",
        node_selector={"disk": "ssd"},
        tolerations=[{"key": "mine", "operator": "Exists"}],
        runtime_class="nvidia",
        queue="team",
    )
    made = manifests.job("sky-a", "a", pod, request(), [0, 2])
    spec = made["spec"]["template"]["spec"]

    assert spec["serviceAccountName"] == "me"
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert spec["tolerations"][0] == {"key": "mine", "operator": "Exists"}
    assert spec["runtimeClassName"] == "nvidia"
    # Kueue admits all pods of a Job at once: a gang.
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert made["spec"]["suspend"] is True
    assert made["spec"]["parallelism"] == 2
    assert made["metadata"]["annotations"]["skyward.dev/nodes"] == "0,2"


def test_a_pod_has_no_token_unless_an_account_is_named() -> None:
    assert spec_of()["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec_of()
    named = spec_of(Pod("busybox", service_account="trainer"))
    assert named["automountServiceAccountToken"] is True
    assert named["serviceAccountName"] == "trainer"


def test_volumes_of_every_kind() -> None:
    volumes = (
        sky.Volume("/scratch"),
        sky.Volume("pvc://data", "/data", read_only=True),
        sky.Volume("pvc://made?size=10Gi&remove=yes&mode=rox", "/made"),
        sky.Volume("emptydir://?size=1Gi", "/empty"),
    )
    spec = spec_of(volumes=volumes)

    sources = {each.pop("name"): each for each in copy.deepcopy(spec["volumes"])}
    assert sources["volume-0"] == {"hostPath": {"path": "/scratch"}}
    claim = {"claimName": "data", "readOnly": True}
    assert sources["volume-1"] == {"persistentVolumeClaim": claim}
    assert sources["volume-2"]["persistentVolumeClaim"]["claimName"] == "made"
    assert sources["volume-3"] == {"emptyDir": {"sizeLimit": "1Gi"}}
    made = claim_of(volumes[2])
    assert made is not None
    assert made.remove
    wanted = made.manifest("fast", 2, {"name": "sky-a"})
    assert wanted["spec"] == {
        "accessModes": ["ReadOnlyMany"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
    }
    assert wanted["metadata"]["ownerReferences"] == [{"name": "sky-a"}]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("s3://bucket", "on Kubernetes a source is a path of the nodes"),
        ("pvc://", "name the claim as in 'pvc://data'"),
        ("pvc://a?sise=1Gi", "no option 'sise'; there are size, remove, mode"),
        ("pvc://a?size=1Gi&remove=maybe", "remove=maybe: say 'yes' or 'no'"),
        ("pvc://a?size=1Gi&mode=all", "mode=all: say one of rwo, rwx, rox, rwop"),
    ],
)
def test_volumes_that_no_pod_can_have(kubeconfig: Path, source: str, words: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=words):
        sky.Kubernetes().check(request(volumes=(sky.Volume(source, "/data"),)))


def test_a_template_is_merged_last() -> None:
    template = {
        "metadata": {"annotations": {"sidecar": "no"}},
        "spec": {
            "hostIPC": True,
            "enableServiceLinks": None,
            "containers": [
                {"name": "node", "env": [{"name": "A", "value": "b"}], "image": "other"},
                {"name": "logs", "image": "fluent"},
            ],
        },
    }
    made = manifests.job("sky-a", "a", Pod("busybox", template=template), request(), [0])
    about, spec = made["spec"]["template"]["metadata"], made["spec"]["template"]["spec"]

    assert about["annotations"] == {"sidecar": "no"}
    assert about["labels"]["skyward.dev/job"] == "sky-a"
    assert spec["hostIPC"] is True
    assert "enableServiceLinks" not in spec
    node, logs = spec["containers"]
    assert (node["image"], logs["image"]) == ("other", "fluent")
    assert [each["name"] for each in node["env"]] == ["SKYWARD_CACHE", "A"]
    assert node["command"][:2] == ["sh", "-c"]


def test_merging_leaves_what_it_merges_alone() -> None:
    base, override = {"a": [1], "b": {"c": 1}}, {"a": [2], "b": {"d": 2}}
    kept = json.dumps([base, override])

    assert merged(base, override) == {"a": [2], "b": {"c": 1, "d": 2}}
    assert json.dumps([base, override]) == kept


# Why a pod is pending.


def pod_with(status: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "sky-a-1"}, "status": status}


def event(about: str, why: str, message: str, at: str) -> dict[str, Any]:
    return {
        "involvedObject": {"name": about},
        "reason": why,
        "message": message,
        "lastTimestamp": at,
    }


def test_the_scheduler_the_kubelet_and_the_job_are_heard() -> None:
    unscheduled = pod_with(
        {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: no"}]}
    )
    assert pending.reason(unscheduled, "sky-a", []) == "0/3 nodes: no"
    waiting = {"state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
    assert (
        pending.reason(pod_with({"containerStatuses": [waiting]}), "sky-a", [])
        == "ErrImagePull: not found"
    )
    events = [
        event("sky-a-1", "FailedMount", "first", "2026-01-01T00:00:00Z"),
        event("sky-a-1", "FailedMount", "last", "2026-01-01T00:00:09Z"),
        event("sky-b-1", "FailedMount", "another pod's", "2026-01-01T00:00:10Z"),
        event("sky-a", "FailedCreate", "Error creating: exceeded quota: q", "2026-01-01T00:00:00Z"),
    ]
    scheduled = {"conditions": [{"type": "PodScheduled", "status": "True"}]}
    assert pending.reason(pod_with(scheduled), "sky-a", events) == "last"
    assert pending.reason(pod_with(scheduled), "sky-a", []) == "its container is being made"
    assert pending.reason(pod_with({}), "sky-a", []) == "waiting for the scheduler"
    assert pending.reason(None, "sky-a", events) == "exceeded quota: q"
    assert pending.reason(None, "sky-a", []) == ""


def test_what_a_scheduler_says_of_a_pod_that_has_a_node_is_not_the_reason() -> None:
    twice = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulerError",
        "message": "pod 1 is in the cache, so can't be assumed",
    }
    pod = pod_with({"conditions": [twice]}) | {"spec": {"nodeName": "here"}}
    mount = event("sky-a-1", "FailedMount", "no secret", "2026-01-01T00:00:00Z")

    assert pending.reason(pod, "sky-a", [mount]) == "no secret"
    assert pending.reason(pod, "sky-a", []) == "its container is being made"


def test_a_first_failure_to_pull_is_not_the_end() -> None:
    def waiting(why: str) -> dict[str, Any]:
        state = {"waiting": {"reason": why, "message": "no route"}}
        return pod_with({"containerStatuses": [{"image": "a/b:1", "state": state}]})

    assert pending.hopeless(waiting("ErrImagePull")) == ""
    assert "the image 'a/b:1' cannot be pulled: no route" in pending.hopeless(
        waiting("ImagePullBackOff")
    )
    assert "its container cannot be made" in pending.hopeless(waiting("CreateContainerConfigError"))
    assert pending.hopeless(pod_with({})) == ""


def test_last_words_are_in_the_status_when_the_log_is_gone() -> None:
    def ended(why: str, message: str, log: str) -> str:
        state = {"terminated": {"exitCode": 3, "reason": why, "message": message}}
        return pending.ended(pod_with({"containerStatuses": [{"state": state}]}), log)

    said = "pod sky-a-1 ended: exit status 3 (Error); it said:\nno model"
    assert ended("Error", "no model\n", "") == said
    lost = 'failed to try resolving symlinks in path "/var/log/pods/a/0.log": no such file'
    assert ended("Error", "no model\n", lost) == said
    unread = f"Error on reading termination message from logs: {lost}"
    assert ended("Error", unread, "no model\n") == said
    assert ended("Error", unread, lost).endswith("; it said nothing")
    assert ended("Error", "", "") == "pod sky-a-1 ended: exit status 3 (Error); it said nothing"
    assert "(no such shell); it said nothing" in ended("StartError", "no such shell", "")


# Nodes that leave.


class Notes:
    """Takes the place of an API server for an allocation with three pods."""

    def __init__(self, provider: sky.Kubernetes) -> None:
        self.done: list[str] = []
        self.allocation = PodAllocation(provider, "p")
        vars(self.allocation).update(
            _connection=self,
            _started_at=0.0,
            _applied=[0, 1, 2],
            _nodes={node: NodePod(f"pod-{node}") for node in range(3)},
            _pods={f"pod-{node}": pod_with({"phase": "Running"}) for node in range(3)},
            others={0, 1, 2},
        )

    def delete(self, kind: str, name: str, **_: Any) -> None:
        self.done.append(f"{name} goes")
        del self.allocation._pods[name]

    def patch(self, kind: str, name: str, change: dict[str, Any]) -> None:
        nodes = change["metadata"]["annotations"][manifests.NODES]
        self.done.append(f"{change['spec']['parallelism']} pods, for {nodes}")

    def stop_watching(self) -> None: ...

    def close(self) -> None: ...


def test_a_node_that_leaves_takes_its_own_pod_and_its_own_place(kubeconfig: Path) -> None:
    """Its pod first: of those that are too many, a Job chooses one itself."""
    notes = Notes(sky.Kubernetes())

    async def scenario() -> None:
        await notes.allocation.release(1)
        await notes.allocation.close()

    asyncio.run(scenario())
    assert notes.done == ["pod-1 goes", "2 pods, for 0,2"]


# Streams.


class Pair:
    """Both ends of a forwarded port: the user's socket, and what the API server would see."""

    def __init__(self) -> None:
        ours, self.server = socket.socketpair()
        self.copying = streams._Forwarding(streams.Spdy(ours, b""))
        self.user = self.copying.start("test")

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *problem: object) -> None:
        self.user.close()
        self.server.close()

    def ends(self) -> bool:
        """Whether the thread that copies ends soon."""
        deadline = time.monotonic() + 10
        while self.copying._far.fileno() >= 0:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def fill(end: socket.socket) -> None:
    """Send until nothing more is taken."""
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            end.send(bytes(1 << 16))


def test_the_end_of_a_connection_ends_its_thread_with_bytes_unsent() -> None:
    with Pair() as pair:
        fill(pair.user)
        pair.server.sendall(struct.pack(">HHII", 0x8003, 7, 4, 0))

        assert pair.ends()


def test_what_was_sent_before_the_user_closed_its_end_arrives() -> None:
    with Pair() as pair:
        pair.user.sendall(b"last words")
        pair.user.close()

        assert pair.ends()
        assert pair.server.recv(100) == struct.pack(">II", streams.DATA, 10) + b"last words"


def test_a_peer_that_does_not_read_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LINGER_SECONDS", 0.0)
    with Pair() as pair:
        fill(pair.user)
        pair.user.close()

        assert pair.ends()


def test_pings_of_the_other_end_are_answered_and_pieces_put_together() -> None:
    with Pair() as pair:
        message = struct.pack(">II", streams.DATA, 5) + b"hello"
        ping = struct.pack(">HHII", 0x8003, 6, 4, 2)
        pair.server.sendall(ping + message[:7])
        assert pair.server.recv(100) == ping
        pair.server.sendall(message[7:] + struct.pack(">II", streams.DATA, 1 << 24))

        assert pair.user.recv(100) == b"hello"
        assert pair.user.recv(100) == b""
        assert pair.ends()


class PortForward:
    """An API server that forwards every port to a program that sends back what it gets."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.server = streams.Server(self.url, "", "", True, None, None, None, None)
        self.refusal = ""
        self.heads: list[str] = []
        self.received = b""
        self.ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                self.ends.append(end)
                self._threads.append(threading.Thread(target=self._answer, args=(end,)))
                self._threads[-1].start()

    def _answer(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError), end:
            got = b""
            while b"\r\n\r\n" not in got:
                got += end.recv(4096)
            head, _, got = got.partition(b"\r\n\r\n")
            self.heads.append(head.decode())
            if self.refusal:
                body = json.dumps({"message": self.refusal}).encode()
                length = f"Content-Length: {len(body)}"
                end.sendall(f"HTTP/1.1 403 Forbidden\r\n{length}\r\n\r\n".encode() + body)
                return
            end.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
            while data := end.recv(1 << 16):
                got = self._echo(end, got + data)

    def _echo(self, end: socket.socket, got: bytes) -> bytes:
        while len(got) >= 8:
            stream, size = struct.unpack_from(">II", got)
            size &= 0xFFFFFF
            if len(got) < 8 + size:
                break
            if stream == streams.DATA:
                self.received += got[8 : 8 + size]
                end.sendall(got[: 8 + size])
            got = got[8 + size :]
        return got


@pytest.fixture
def port_forward() -> Iterator[PortForward]:
    made = PortForward()
    yield made
    made.close()


@pytest.fixture
def forwarder() -> Iterator[streams.Forwarder]:
    made = streams.Forwarder()
    yield made
    made.close()


def said_back(end: socket.socket, data: bytes) -> bytes:
    """What comes back of bytes."""
    sending = threading.Thread(target=end.sendall, args=(data,))
    sending.start()
    got = b""
    while len(got) < len(data) and (more := end.recv(1 << 16)):
        got += more
    sending.join()
    return got


def test_what_forwards_ports_listens_nowhere_and_is_started_again_if_it_was_killed(
    port_forward: PortForward, forwarder: streams.Forwarder
) -> None:
    with forwarder.connect(port_forward.server, [], "/pod", 80) as end:
        much = bytes(range(256)) * (1 << 13)
        assert said_back(end, b"hello") == b"hello"
        assert said_back(end, much) == much
        assert forwarder.pid is not None
        process = psutil.Process(forwarder.pid)
        assert not [each for each in process.net_connections("inet") if each.status == "LISTEN"]
        process.kill()
        assert end.recv(1) == b""

    with forwarder.connect(port_forward.server, [], "/pod", 80) as end:
        assert forwarder.pid != process.pid
        assert said_back(end, b"again") == b"again"


def test_what_was_sent_before_the_pool_ended_arrives_and_nothing_is_left(
    port_forward: PortForward, forwarder: streams.Forwarder
) -> None:
    with forwarder.connect(port_forward.server, [], "/pod", 80) as end:
        assert forwarder.pid is not None
        process = psutil.Process(forwarder.pid)
        end.sendall(b"last words")
    forwarder.close()

    assert not process.is_running()
    port_forward.close()
    assert port_forward.received == b"last words"
    with pytest.raises(ConnectionError, match="was closed"):
        forwarder.connect(port_forward.server, [], "/pod", 80)


def test_a_client_that_is_killed_takes_what_forwards_its_ports_with_it(
    port_forward: PortForward,
) -> None:
    text = (
        "import json, sys, time; sys.path.append(sys.argv[1]); from streams import *; "
        "made, server = Forwarder(), Server(*json.loads(sys.argv[2])); "
        "end = made.connect(server, [], '/pod', 80); print(made.pid, flush=True); time.sleep(600)"
    )
    folder = Path(streams.__file__).parent
    started = [sys.executable, "-S", "-c", text, folder, json.dumps(port_forward.server)]
    with subprocess.Popen(started, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        forwarder = psutil.Process(int(client.stdout.readline()))
        client.kill()
        forwarder.wait(60)


def test_a_port_that_may_not_be_forwarded_is_told_with_the_servers_words(
    kubeconfig: Path, port_forward: PortForward
) -> None:
    clusters = [{"name": "one", "cluster": {"server": port_forward.url}}]
    kubeconfig.write_text(yaml.safe_dump(CONFIG | {"clusters": clusters}))
    port_forward.refusal = 'pods "a" is forbidden'
    with contextlib.closing(access.Access(access.resolve(None, None, None))) as reached:
        with pytest.raises(sky.errors.UnreachableError) as caught:
            reached.forward("a", 80)
        assert str(caught.value) == 'pod a, port 80: pods "a" is forbidden'
        assert all("Authorization: Bearer secret" in head for head in port_forward.heads)
        port_forward.refusal = ""
        with reached.forward("a", 80) as end:
            assert said_back(end, b"hello") == b"hello"
        port_forward.close()
        with pytest.raises(sky.errors.UnreachableError, match=r"does not answer.*is it up"):
            reached.forward("a", 80)
