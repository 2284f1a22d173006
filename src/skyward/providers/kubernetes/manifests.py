"""Manifests: the objects of a pool as the API server takes them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError
from skyward.providers import Request
from skyward.spec import Volume

POOL, JOB, NODE = "skyward.dev/pool", "skyward.dev/job", "skyward.dev/node"
"""The labels by which a pool's Job, a Job's pods, and the pod of a node are found."""
NODES, SPEC = "skyward.dev/nodes", "skyward.dev/spec"
"""The annotations of a Job with the nodes that were asked for, and with a hash of its template."""
SIGNATURE = "skyward.dev/"
"""How the annotations of a Job begin with the pool's name, and with its client."""
LEFT_BY = "skyward.dev/left-by"
"""The label of a claim whose Job is being made anew: the name of the Job."""
QUEUE = "kueue.x-k8s.io/queue-name"
CONTAINER = "node"
MARKS = "/tmp/.skyward-"
"""Each command in a container has a file, with the number of its shell; their names begin so."""
IDLE_SECONDS = 120
"""A container ends itself after so long without an agent or a command of the client's."""
AGENTLESS_SECONDS = 30
"""A container ends itself so long after its agent has ended."""
KEPT_AGENTLESS_SECONDS = 75
"""The same in a kept pool: `sky stop` waits for the last agent before it removes the pods. If
a container ended by itself before that, the cluster would take the Job for done."""
LEASE_SECONDS = 300
"""How long a pool's objects outlive a client that no longer extends the Job's deadline."""
TTL_SECONDS = 30
"""How long after its end a Job, with all that it owns, is removed by the cluster."""
LOST_SECONDS = 60
"""How long a pod stays on a machine that the cluster has lost, before it is replaced."""
CACHE_FOLDER = "/var/cache/skyward"

_READY = "/dev/shm/.skyward-ready"
"""A file that is there while an agent runs."""
_MAIN = f"""\
trap 'exit 1' TERM
[ "$#" -eq 0 ] || "$@" &
left={IDLE_SECONDS}
while [ "$left" -gt 0 ]; do
    agent=
    for mark in {MARKS}*; do
        read -r pid 2>/dev/null <"$mark" && [ -d "/proc/$pid" ] && left={IDLE_SECONDS}
    done
    for line in /proc/[0-9]*/cmdline; do
        read -r line 2>/dev/null <"$line"
        case $line in *skyward.worker.agen[t]*) agent=1 ;; esac
    done
    if [ "$agent" ]; then
        left={AGENTLESS_SECONDS}
        : >{_READY}
    elif [ -e {_READY} ]; then
        rm -f {_READY}
    fi
    left=$((left - 2))
    sleep 2 &
    wait $!
done
exit 1
"""
"""The container's first process. Its failure has the Job replace the pod; a success would end the
Job. Commands of the client's leave marks with the numbers of their processes. As process 1 it also
takes up processes whose parents have ended. Its arguments are a command that runs beside the
agent."""
_KEPT_MAIN = (_MAIN.removesuffix("exit 1\n") + "exit 0\n").replace(
    f"left={AGENTLESS_SECONDS}\n", f"left={KEPT_AGENTLESS_SECONDS}\n"
)
"""The same in a kept pool. Nobody may be there who would start an agent in another pod: when
the agents have ended by themselves, the Job is done."""


@dataclass(frozen=True, slots=True)
class Pod:
    """How the pods of a provider are made."""

    image: str
    service_account: str | None = None
    node_selector: Mapping[str, str] | None = None
    tolerations: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Any] | None = None
    """A pod template that is merged into ours."""
    runtime_class: str | None = None
    queue: str | None = None
    storage_class: str | None = None
    cache: str | None = CACHE_FOLDER
    """A folder of the cluster's nodes, or 'pvc://NAME', that keeps the environments of images; None
    if there is nothing to keep, or nothing to keep it in."""
    command: Sequence[str] = ()
    """A command that runs beside the agent."""


def job_name(name: str) -> str:
    """The name of the Job of a pool, or of a compute; the names of its pods begin with it."""
    return f"sky-{name}"


def job(
    name: str,
    pool: str,
    pod: Pod,
    request: Request,
    nodes: Sequence[int],
) -> Any:
    """The Job that keeps as many pods running as there are nodes, and owns all else."""
    labels = {"app.kubernetes.io/managed-by": "skyward", JOB: name}
    manifest: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": labels | {POOL: pool} | ({QUEUE: pod.queue} if pod.queue else {}),
            "annotations": {NODES: listed(nodes)},
        },
        "spec": {
            "parallelism": len(nodes),
            # Pods that fail, or are evicted, are replaced for as long as the pool lives.
            "backoffLimit": 1_000_000,
            "activeDeadlineSeconds": LEASE_SECONDS,
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "template": {
                "metadata": {"labels": dict(labels)},
                "spec": _pod_spec(pod, request),
            },
        },
    }
    if pod.queue:
        # Kueue unsuspends a Job when there is room for all of its pods.
        manifest["spec"]["suspend"] = True
    if pod.template:
        manifest["spec"]["template"] = merged(manifest["spec"]["template"], pod.template)
    return manifest


def listed(nodes: Sequence[int]) -> str:
    """Nodes as the Job's annotation has them."""
    return ",".join(str(each) for each in sorted(nodes))


def template(file: str | None, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The pod template to merge into ours: a site's, in a file, and in it the user's."""
    site = _read_template(file) if file else {}
    whole: Mapping[str, Any] = merged(_as_template(site), _as_template(given or {}))
    return whole


def _read_template(file: str) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(file).expanduser().read_text())
    except (OSError, yaml.YAMLError) as problem:
        raise ConfigurationError(f"the pod template {file}: {problem}") from problem
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"the pod template {file}: it is no mapping; begin with 'spec:'")
    return found


def _as_template(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A raw override: a pod template, or the spec of one."""
    return given if "spec" in given or "metadata" in given else {"spec": given}


def _pod_spec(pod: Pod, request: Request) -> dict[str, Any]:
    volumes, mounts = _volumes(pod, request)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": pod.image,
        "command": ["sh", "-c", _KEPT_MAIN if request.keep else _MAIN, "sh", *pod.command],
        "readinessProbe": {"exec": {"command": ["test", "-e", _READY]}, "periodSeconds": 5},
        "env": [{"name": "SKYWARD_CACHE", "value": CACHE_FOLDER}],
        "resources": _resources(request),
        "volumeMounts": mounts,
        # The last lines stand in the pod's status then, though its log may be gone.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "automountServiceAccountToken": pod.service_account is not None,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": volumes,
    }
    if pod.service_account:
        spec["serviceAccountName"] = pod.service_account
    if pod.runtime_class:
        spec["runtimeClassName"] = pod.runtime_class
    if pod.node_selector:
        spec["nodeSelector"] = dict(pod.node_selector)
    tolerations = [dict(each) for each in pod.tolerations]
    tolerations += [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_SECONDS}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    ]
    if request.accelerator is not None:
        # Clouds keep other pods off their GPU nodes with a taint of the resource's name.
        resource = gpu_resource(request.accelerator)
        tolerations.append({"key": resource, "operator": "Exists"})
        if affinity := gpu_affinity(request.accelerator):
            spec["affinity"] = affinity
    spec["tolerations"] = tolerations
    return spec


def _resources(request: Request) -> dict[str, Any]:
    wanted: dict[str, str] = {}
    limits: dict[str, str] = {}
    if request.vcpus:
        wanted["cpu"] = limits["cpu"] = f"{round(request.vcpus * 1000)}m"
    if request.memory_gb:
        wanted["memory"] = limits["memory"] = f"{round(request.memory_gb * 1024)}Mi"
    if request.accelerator is not None:
        limits[gpu_resource(request.accelerator)] = str(request.accelerator.count)
    return {"requests": wanted, "limits": limits}


# GPUs: the resource that a vendor's plugin offers, and the labels of the cluster's nodes.

NVIDIA = "nvidia.com/gpu"
_VENDORS = (
    (re.compile(r"^MI\d", re.IGNORECASE), "amd.com/gpu"),
    (re.compile(r"^Gaudi", re.IGNORECASE), "habana.ai/gaudi"),
    (re.compile(r"^(Trainium|Inferentia|trn|inf)", re.IGNORECASE), "aws.amazon.com/neuron"),
    (re.compile(r"^TPU", re.IGNORECASE), "google.com/tpu"),
    (re.compile(r"^(Max|Flex|Arc)", re.IGNORECASE), "gpu.intel.com/i915"),
)
_PRODUCTS = {
    "K80": ["Tesla-K80"],
    "P100": ["Tesla-P100-SXM2-16GB", "Tesla-P100-PCIE-16GB", "Tesla-P100-PCIE-12GB"],
    "T4": ["Tesla-T4"],
    "L4": ["NVIDIA-L4"],
    "L40": ["NVIDIA-L40"],
    "L40S": ["NVIDIA-L40S"],
    "A10": ["NVIDIA-A10"],
    "A10G": ["NVIDIA-A10G"],
    "A40": ["NVIDIA-A40"],
    "V100-16GB": ["Tesla-V100-SXM2-16GB", "Tesla-V100-PCIE-16GB"],
    "V100-32GB": ["Tesla-V100-SXM2-32GB", "Tesla-V100-PCIE-32GB", "Tesla-V100-SXM3-32GB"],
    "A100-40GB": ["NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"],
    "A100-80GB": ["NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"],
    "H100-80GB": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"],
    "H100-94GB": ["NVIDIA-H100-NVL"],
    "H200": ["NVIDIA-H200", "NVIDIA-H200-NVL"],
    "GH200": ["NVIDIA-GH200-480GB", "NVIDIA-GH200-144G-HBM3e"],
    "B200": ["NVIDIA-B200"],
    "B300": ["NVIDIA-B300-SXM6-AC", "NVIDIA-B300"],
    "RTX-3090": ["NVIDIA-GeForce-RTX-3090"],
    "RTX-4090": ["NVIDIA-GeForce-RTX-4090"],
    "RTX-5090": ["NVIDIA-GeForce-RTX-5090"],
    "RTX-A6000": ["NVIDIA-RTX-A6000"],
}
"""What NVIDIA's GPU feature discovery calls a model in its label."""
_GOOGLE = {
    "A100-40GB": ["nvidia-tesla-a100"],
    "A100-80GB": ["nvidia-a100-80gb"],
    "H100-80GB": ["nvidia-h100-80gb", "nvidia-h100-mega-80gb"],
    "H200": ["nvidia-h200-141gb"],
}
"""What Google calls a model in its label, where that does not follow from the name."""
_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/class",
)


def gpu_resource(accelerator: Accelerator) -> str:
    """The name of the resource that pods ask for."""
    return next((name for known, name in _VENDORS if known.match(accelerator.name)), NVIDIA)


def gpu_affinity(accelerator: Accelerator) -> dict[str, Any] | None:
    """Nodes whose labels name the model, by whoever labelled them, or that have no such label."""
    if gpu_resource(accelerator) != NVIDIA:
        return None
    name, memory = accelerator.name.replace("_", "-"), accelerator.memory
    products = _PRODUCTS.get(f"{name}-{memory}") or _PRODUCTS.get(name) or []
    google = _GOOGLE.get(f"{name}-{memory}") or _GOOGLE.get(name)
    google = google or [f"nvidia-{name.lower()}", f"nvidia-tesla-{name.lower()}"]
    values = {
        "nvidia.com/gpu.product": [*products, *(f"{each}-SHARED" for each in products)],
        "cloud.google.com/gke-accelerator": google,
        "karpenter.k8s.aws/instance-gpu-name": [name.lower()],
        "gpu.nvidia.com/class": [name],
    }
    terms: list[dict[str, Any]] = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": wanted}]}
        for key, wanted in values.items()
        if wanted
    ]
    unlabelled = [{"key": key, "operator": "DoesNotExist"} for key in _LABELS]
    if not products:
        # The label's value is not known: whatever it is, the node itself says what it has.
        terms[0:0] = [{"matchExpressions": [{"key": _LABELS[0], "operator": "Exists"}]}]
    terms.append({"matchExpressions": unlabelled})
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


# Volumes.


def _volumes(pod: Pod, request: Request) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    # NCCL and the workers of a DataLoader share memory there; a pod's own has 64 MB.
    shared: dict[str, Any] = {"medium": "Memory"}
    if request.memory_gb:
        shared["sizeLimit"] = f"{round(request.memory_gb * 512)}Mi"
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": shared}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if pod.cache is not None:
        source: dict[str, Any] = {"hostPath": {"path": pod.cache, "type": "DirectoryOrCreate"}}
        if pod.cache.startswith("pvc://"):
            source = {"persistentVolumeClaim": {"claimName": pod.cache.removeprefix("pvc://")}}
        volumes.append({"name": "cache", **source})
        mounts.append({"name": "cache", "mountPath": CACHE_FOLDER})
    for number, volume in enumerate(request.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name, **_source(volume)})
        mounts.append({"name": name, "mountPath": volume.target, "readOnly": volume.read_only})
    return volumes, mounts


def _source(volume: Volume) -> dict[str, Any]:
    if volume.source.startswith("/"):
        return {"hostPath": {"path": volume.source}}
    if claim := claim_of(volume):
        return {"persistentVolumeClaim": {"claimName": claim.name, "readOnly": volume.read_only}}
    parts = urlsplit(volume.source)
    if parts.scheme == "emptydir":
        options = _options(volume, "size", "medium")
        empty = {"sizeLimit": options.get("size"), "medium": options.get("medium")}
        return {"emptyDir": {key: value for key, value in empty.items() if value}}
    raise ConfigurationError(
        f"{volume}: on Kubernetes a source is a path of the nodes ('/data'), 'pvc://NAME' for a "
        "claim that exists, 'pvc://NAME?size=100Gi' for one that is made if it does not, with "
        "'&remove=yes' if it goes with the pool and '&mode=rwx' for its access mode, or "
        "'emptydir://?size=10Gi'"
    )


_MODES = {
    "rwo": "ReadWriteOnce",
    "rwx": "ReadWriteMany",
    "rox": "ReadOnlyMany",
    "rwop": "ReadWriteOncePod",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim that a volume names."""

    name: str
    size: str | None
    """How large to make it; None if it must exist."""
    remove: bool
    """Whether it goes with the pool."""
    mode: str | None

    def manifest(self, storage_class: str | None, nodes: int, owner: Any) -> Any:
        """The claim as the API server takes it."""
        usual = "ReadWriteOnce" if nodes == 1 else "ReadWriteMany"
        spec: dict[str, Any] = {
            "accessModes": [_MODES[self.mode] if self.mode else usual],
            "resources": {"requests": {"storage": self.size}},
        }
        if storage_class is not None:
            spec["storageClassName"] = storage_class
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": self.name,
                "labels": {"app.kubernetes.io/managed-by": "skyward"},
                "ownerReferences": [] if owner is None else [owner],
            },
            "spec": spec,
        }


def claim_of(volume: Volume) -> Claim | None:
    """The claim that a volume names, if it names one."""
    parts = urlsplit(volume.source)
    if parts.scheme != "pvc":
        return None
    options = _options(volume, "size", "remove", "mode")
    remove, mode = options.get("remove", "no"), options.get("mode")
    if not parts.netloc or parts.path.strip("/"):
        raise ConfigurationError(f"{volume}: name the claim as in 'pvc://data'")
    if remove not in ("yes", "no"):
        raise ConfigurationError(f"{volume}: remove={remove}: say 'yes' or 'no'")
    if mode is not None and mode not in _MODES:
        raise ConfigurationError(f"{volume}: mode={mode}: say one of {', '.join(_MODES)}")
    return Claim(parts.netloc, options.get("size"), remove == "yes", mode)


def _options(volume: Volume, *known: str) -> dict[str, str]:
    given = {key: values[-1] for key, values in parse_qs(urlsplit(volume.source).query).items()}
    for key in given:
        if key not in known:
            raise ConfigurationError(f"{volume}: no option {key!r}; there are {', '.join(known)}")
    return given


def check_volumes(volumes: Sequence[Volume]) -> None:
    """Refuse volumes that no pod can have."""
    for volume in volumes:
        _source(volume)


# Overrides.


def merged(base: Any, override: Any) -> Any:
    """A manifest with a raw override merged in.

    Mappings are merged key by key, and None removes a key. Lists of mappings with names, such as
    containers, volumes and variables, are merged name by name; other lists are replaced.
    """
    if isinstance(base, Mapping) and isinstance(override, Mapping):
        result = {key: copy.deepcopy(value) for key, value in base.items()}
        for key, value in override.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(result[key], value) if key in result else copy.deepcopy(value)
        return result
    if _is_named(base) and _is_named(override):
        by_key = {_key(each): each for each in base}
        for each in override:
            key = _key(each)
            by_key[key] = merged(by_key[key], each) if key in by_key else copy.deepcopy(each)
        return list(by_key.values())
    return copy.deepcopy(override)


def _key(item: Mapping[str, Any]) -> str:
    # Mounts are told apart by their paths: one volume may be mounted twice.
    return str(item.get("mountPath") or item.get("name"))


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, Mapping) and ("name" in each or "mountPath" in each) for each in value
    )
