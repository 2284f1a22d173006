"""A Kubernetes cluster for tests, with this machine's own programs inside its pods."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import psutil
import pytest

import skyward as sky
from skyward.providers.kubernetes.manifests import merged

from .ssh_hosts import TESTBED

BY_HAND = "by-hand"
"""The class of volumes that tests make."""
IMAGE = "localhost/hostbind:1"
SOURCE = str(Path(sky.__file__).parents[1])
GATES = dict.fromkeys(
    ("kube-apiserver", "kube-controller-manager"), "--feature-gates=TTLAfterFinished=true"
)
"""Jobs that remove themselves are on by default from Kubernetes 1.21 on; the testbed has 1.20."""

_in_use: list[Any] = []
"""A lock, if this process uses the testbed's cluster."""


def skip_if_absent() -> None:
    """Skip where there can be no cluster."""
    if os.environ.get("SKYWARD_KUBECONFIG"):
        return
    if not (TESTBED / "k8s-up").exists():
        pytest.skip("no testbed here; name its folder with SKYWARD_TESTBED")
    if os.geteuid() != 0:
        pytest.skip("the testbed's Kubernetes needs root")


def start() -> str:
    """Bring the cluster up, and return the path of its kubeconfig; skips where it cannot start."""
    if given := os.environ.get("SKYWARD_KUBECONFIG"):
        return given
    with _locked("starting"):
        _in_use.append(_lock_file("in-use").open("w"))
        fcntl.flock(_in_use[0], fcntl.LOCK_SH)
        done = subprocess.run(
            [str(TESTBED / "k8s-up"), "nodes=2", "gpus=2"],
            capture_output=True,
            text=True,
            timeout=400,
            env=os.environ | {"TESTBED_CACHE": str(_gated())},
        )
    if done.returncode != 0:
        pytest.skip(f"Kubernetes does not start here: {done.stderr.strip()[-300:]}")
    return dict(re.findall(r"export (\w+)='(.*)'", done.stdout))["KUBECONFIG"]


def stop() -> None:
    """Take the cluster down, unless another process uses it."""
    while _in_use:
        with _locked("starting"), _in_use.pop() as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            subprocess.run([str(TESTBED / "k8s-down")], capture_output=True, timeout=120)


def _lock_file(name: str) -> Path:
    return Path(tempfile.gettempdir(), f"skyward-kubernetes-{name}.lock")


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    with _lock_file(name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def lost_node2() -> Iterator[None]:
    """The testbed's second machine without power: its containers end, and its kubelet is silent."""
    folder = Path("/var/tmp/skyward-testbed/k8s")
    if not (folder / "pids" / "kubelet2").exists():
        pytest.skip("only the testbed's machines can be taken away")
    kubelet = int((folder / "pids" / "kubelet2").read_text().split()[0])
    os.kill(kubelet, signal.SIGSTOP)
    try:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if "containerd-shim" in line and str(folder / "node2") in line:
                    for child in process.children(recursive=True):
                        child.kill()
        yield
    finally:
        os.kill(kubelet, signal.SIGCONT)


def _gated() -> Path:
    """A folder of programs as `k8s-up` wants it, in which two of them get a feature gate more."""
    usual = Path.home() / ".cache" / "skyward-testbed"
    name = f"k8s-1.20.2-{platform.machine()}"
    real = usual / name
    if not (real / "kubectl").exists():
        # The testbed unpacks its archive when it starts something, and then has it.
        archive = TESTBED / f"k8s-1.20.2-linux-{platform.machine()}.tar.xz"
        if not archive.exists():
            pytest.skip(f"the testbed has no Kubernetes for {platform.machine()}")
        part = Path(tempfile.mkdtemp(dir=_made(usual)))
        subprocess.run(["tar", "-C", str(part), "-xJf", str(archive)], check=True)
        part.rename(real)
    folder = _made(Path(tempfile.gettempdir(), "skyward-k8s-programs", name))
    for program in real.iterdir():
        path = folder / program.name
        path.unlink(missing_ok=True)
        path.write_text(f'#!/bin/sh\nexec {program} "$@" {GATES.get(program.name, "")}\n')
        path.chmod(0o755)
    return folder.parent


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def template() -> dict[str, Any]:
    """What makes this machine's Python run in a container that has nothing."""
    told = subprocess.run(
        [str(TESTBED / "hostbind-mounts"), "k8s", sys.prefix, SOURCE],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = json.loads(told)
    container = {"name": "node", "volumeMounts": found["volumeMounts"]}
    return {"volumes": found["volumes"], "containers": [container]}


def provider(kubeconfig: str, **changed: Any) -> sky.Kubernetes:
    """Pods in which this very environment is ready.

    On a cluster of one's own, with images of its own, `SKYWARD_KUBERNETES_IMAGE` names one.
    """
    if os.environ.get("SKYWARD_KUBERNETES_IMAGE"):
        return sky.Kubernetes(**{"kubeconfig": kubeconfig, **changed})
    given: dict[str, Any] = {
        "kubeconfig": kubeconfig,
        "image": IMAGE,
        "python": sys.executable,
        "cache": os.environ.get("SKYWARD_CACHE") or platformdirs.user_cache_dir("skyward"),
        "pod_template": template(),
        "timeout": 120,
    }
    return sky.Kubernetes(**{**given, **changed})


def site(folder: Path) -> dict[str, str]:
    """What the administrator of a cluster without a registry sets for all users."""
    if os.environ.get("SKYWARD_KUBERNETES_IMAGE"):
        return {}
    cache = os.environ.get("SKYWARD_CACHE") or platformdirs.user_cache_dir("skyward")
    mount = {"name": "cache", "mountPath": "/var/cache/skyward"}
    own = {
        "volumes": [{"name": "cache", "hostPath": {"path": cache}}],
        "containers": [{"name": "node", "image": IMAGE, "volumeMounts": [mount]}],
    }
    path = folder / "site.json"
    path.write_text(json.dumps({"spec": merged(template(), own)}))
    return {
        "SKYWARD_KUBERNETES_TEMPLATE": str(path),
        "SKYWARD_KUBERNETES_PYTHON": sys.executable,
    }


# What the administrator of a cluster does, with the official client and not with ours.


class Namespace:
    """A namespace for one test."""

    def __init__(self, kubeconfig: str) -> None:
        from kubernetes import client, config

        self.kubeconfig, self.name = kubeconfig, f"test-{uuid.uuid4().hex[:8]}"
        self._client: Any = config.new_client_from_config(kubeconfig)
        self.core: Any = client.CoreV1Api(self._client)
        self.batch: Any = client.BatchV1Api(self._client)
        self.core.create_namespace({"metadata": {"name": self.name}})
        self.is_there: set[str] = set()
        self.until(lambda: "serviceaccounts/default" in self.objects())
        self.is_there = self.objects()

    def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, sorted(self.objects())
            time.sleep(0.25)

    def provider(self, **changed: Any) -> sky.Kubernetes:
        """Pods of this namespace."""
        return provider(self.kubeconfig, **{"namespace": self.name, **changed})

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """A request to the API server, by path."""
        answer = self._client.call_api(
            path,
            method,
            header_params={"Accept": "application/json", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
        )
        return json.loads(answer.data)

    def make(self, group: str, kind: str, manifest: dict[str, Any]) -> None:
        """Make an object of the namespace, in a group such as 'rbac.authorization.k8s.io/v1'."""
        prefix = f"/apis/{group}" if "/" in group else f"/api/{group}"
        self.call("POST", f"{prefix}/namespaces/{self.name}/{kind}", manifest)

    @functools.cached_property
    def _kinds(self) -> list[str]:
        """The paths of every kind that can be listed in a namespace, but for events."""
        groups = ["/api/v1"] + [
            f"/apis/{group['preferredVersion']['groupVersion']}"
            for group in self.call("GET", "/apis")["groups"]
        ]
        return [
            f"{group}/namespaces/{self.name}/{kind['name']}"
            for group in groups
            for kind in self.call("GET", group)["resources"]
            if kind["namespaced"] and "list" in kind["verbs"] and kind["name"] != "events"
        ]

    def objects(self, *, ending: bool = True) -> set[str]:
        """Everything in the namespace that was not there in the beginning, but for events.

        Without `ending`, what is being deleted does not count.
        """
        found = set()
        for path in self._kinds:
            kind = path.rpartition("/")[2]
            for each in self.call("GET", path)["items"]:
                if ending or "deletionTimestamp" not in each["metadata"]:
                    found.add(f"{kind}/{each['metadata']['name']}")
        return found - self.is_there

    def pods(self) -> list[Any]:
        """The pods that are not being deleted."""
        there = self.core.list_namespaced_pod(self.name).items
        return [pod for pod in there if pod.metadata.deletion_timestamp is None]

    def deadline(self) -> int | None:
        """After how many seconds the cluster ends the only Job; None if it does not."""
        (job,) = self.batch.list_namespaced_job(self.name).items
        found: int | None = job.spec.active_deadline_seconds
        return found

    def until_empty(self, *, ending: bool = False, seconds: float = 60) -> None:
        """Wait until nothing is left that was not there in the beginning."""
        self.until(lambda: not self.objects(ending=ending), seconds)

    def until_not_empty(self) -> None:
        """Wait until something is there."""
        self.until(lambda: bool(self.objects()))

    def until_started(self, job: str) -> None:
        """Wait until the cluster has taken note of a Job: its deadline is counted from then on."""

        def started() -> bool:
            found = self.batch.read_namespaced_job(job, self.name)
            return found.status.start_time is not None

        self.until(started)

    def account(self, *rules: dict[str, Any]) -> str:
        """A service account with these rights and no others in the namespace."""
        name = f"user-{uuid.uuid4().hex[:6]}"
        rbac = "rbac.authorization.k8s.io"
        subject = {"kind": "ServiceAccount", "name": name, "namespace": self.name}
        reference = {"apiGroup": rbac, "kind": "Role", "name": name}
        self.make("v1", "serviceaccounts", {"metadata": {"name": name}})
        self.make(f"{rbac}/v1", "roles", {"metadata": {"name": name}, "rules": list(rules)})
        binding = {"metadata": {"name": name}, "subjects": [subject], "roleRef": reference}
        self.make(f"{rbac}/v1", "rolebindings", binding)
        # Old versions make a token for every account, and pods wait for it.
        with contextlib.suppress(AssertionError):
            self.until(lambda: bool(self._account(name).secrets), 3)
        self.is_there |= self.objects()
        return name

    def _account(self, name: str) -> Any:
        return self.core.read_namespaced_service_account(name, self.name)

    def user(self, *rules: dict[str, Any]) -> str:
        """A user with these rights and no others in the namespace; gives the user's token."""
        path = f"/api/v1/namespaces/{self.name}/serviceaccounts/{self.account(*rules)}/token"
        answer = self.call("POST", path, {"spec": {"expirationSeconds": 3600}})
        return str(answer["status"]["token"])

    @contextlib.contextmanager
    def bindable(self, claim: str, folder: Path) -> Iterator[None]:
        """A volume of the cluster's, of the class `BY_HAND`, to which a claim will be bound."""
        name = f"{self.name}-{claim}"
        spec = {
            "capacity": {"storage": "1Mi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "hostPath": {"path": str(folder)},
            "storageClassName": BY_HAND,
            "claimRef": {"namespace": self.name, "name": claim},
        }
        self.core.create_persistent_volume({"metadata": {"name": name}, "spec": spec})
        try:
            yield
        finally:
            self.core.delete_persistent_volume(name)

    def remove(self) -> None:
        """Remove the namespace with all that is in it."""
        self.core.delete_namespace(self.name)


def changed_kubeconfig(
    kubeconfig: str,
    path: Path,
    *,
    server: str | None = None,
    user: dict[str, Any] | None = None,
    namespace: str = "default",
) -> str:
    """A copy of a kubeconfig for another address of the server, or another user."""
    import yaml

    found = yaml.safe_load(Path(kubeconfig).read_text())
    current = next(
        each["context"] for each in found["contexts"] if each["name"] == found["current-context"]
    )
    current["namespace"] = namespace
    if server is not None:
        found["clusters"][0]["cluster"]["server"] = server
    if user is not None:
        found["users"] = [{"name": current["user"], "user": user}]
    path.write_text(yaml.safe_dump(found))
    return str(path)
