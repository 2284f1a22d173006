"""Metrics: the numbers of pools in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from skyward.worker.task_board import BUCKETS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAMILIES = {
    "skyward_calls_total": ("counter", "Calls that ended, by how they ended."),
    "skyward_calls_submitted_total": ("counter", "Calls that were made."),
    "skyward_calls_retried_total": ("counter", "Calls that lost their worker and ran again."),
    "skyward_calls_waiting": ("gauge", "Calls that wait for a worker."),
    "skyward_calls_running": ("gauge", "Calls that a worker has."),
    "skyward_call_seconds": (
        "histogram",
        "How long functions ran, since the nodes were started.",
    ),
    "skyward_nodes": ("gauge", "Nodes, by state."),
    "skyward_nodes_lost_total": ("counter", "How often a node was lost."),
    "skyward_bytes_total": ("counter", "Bytes between the client and executors, over sockets."),
    "skyward_node_cpu_ratio": ("gauge", "The load of a node's processors, from 0 to 1."),
    "skyward_node_memory_bytes": ("gauge", "A node's memory, used and total."),
    "skyward_node_network_bytes_total": ("counter", "A node's network, received and sent."),
    "skyward_gpu_load_ratio": ("gauge", "The load of a GPU, from 0 to 1."),
    "skyward_gpu_memory_bytes": ("gauge", "A GPU's memory, used and total."),
    "skyward_device_operations_total": ("counter", "Operations sent to a torch device."),
    "skyward_device_waits_total": ("counter", "How often the client waited for a torch device."),
    "skyward_device_bytes_total": ("counter", "Bytes to and from a torch device."),
    "skyward_cost_dollars_total": ("counter", "What the machines have cost, in US dollars."),
    "skyward_cost_dollars_per_hour": ("gauge", "What the machines cost in an hour."),
}

Labels = Mapping[str, object]


class _Families:
    """The lines of each family, in the order in which they were added."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {name: [] for name in _FAMILIES}

    def add(self, name: str, value: float | None, labels: Labels, suffix: str = "") -> None:
        if value is not None:
            pairs = ",".join(f'{key}="{_escaped(each)}"' for key, each in labels.items())
            self._lines[name].append(f"{name}{suffix}{{{pairs}}} {value!r}")

    def text(self) -> str:
        parts = []
        for name, lines in self._lines.items():
            if lines:
                kind, meaning = _FAMILIES[name]
                parts += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *lines]
        return "\n".join([*parts, ""])


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def text(pools: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """The metrics of pools, each given by its snapshot and a sample."""
    families = _Families()
    for snapshot, sample in pools:
        pool = {"pool": snapshot["name"], "id": snapshot["pool"]}
        _calls(families, pool, snapshot, sample)
        _nodes(families, pool, snapshot, sample)
        _devices(families, pool, sample)
        families.add("skyward_cost_dollars_total", sample["cost"], pool)
        families.add("skyward_cost_dollars_per_hour", sample["hourly_cost"], pool)
    return families.text()


def _calls(
    families: _Families, pool: Labels, snapshot: Mapping[str, Any], sample: Mapping[str, Any]
) -> None:
    for outcome in ("succeeded", "failed", "cancelled"):
        families.add("skyward_calls_total", sample[outcome], {**pool, "outcome": outcome})
    families.add("skyward_calls_submitted_total", sample["submitted"], pool)
    families.add("skyward_calls_retried_total", sample["retried"], pool)
    families.add("skyward_calls_waiting", sample["waiting"], pool)
    families.add("skyward_calls_running", len(snapshot["running"]), pool)
    total = 0
    for bound, count in zip((*BUCKETS, "+Inf"), sample["buckets"], strict=True):
        total += count
        families.add("skyward_call_seconds", total, {**pool, "le": bound}, "_bucket")
    families.add("skyward_call_seconds", sample["call_seconds"], pool, "_sum")
    families.add("skyward_call_seconds", total, pool, "_count")
    for direction in ("sent", "received"):
        families.add("skyward_bytes_total", sample[direction], {**pool, "direction": direction})


def _nodes(
    families: _Families, pool: Labels, snapshot: Mapping[str, Any], sample: Mapping[str, Any]
) -> None:
    for state, count in sorted(Counter(row[1] for row in snapshot["nodes"]).items()):
        families.add("skyward_nodes", count, {**pool, "state": state})
    families.add("skyward_nodes_lost_total", sample["nodes_lost"], pool)
    for node, cpu, used, total, _, _, gpus, received, sent in sample["usage"]:
        at = {**pool, "node": node}
        families.add("skyward_node_cpu_ratio", round(cpu / 100, 4), at)
        families.add("skyward_node_memory_bytes", used, {**at, "kind": "used"})
        families.add("skyward_node_memory_bytes", total, {**at, "kind": "total"})
        name = "skyward_node_network_bytes_total"
        families.add(name, received, {**at, "direction": "received"})
        families.add(name, sent, {**at, "direction": "sent"})
        for index, (model, percent, memory, there) in enumerate(gpus):
            gpu = {**at, "gpu": index, "model": model}
            families.add("skyward_gpu_load_ratio", percent and percent / 100, gpu)
            families.add("skyward_gpu_memory_bytes", memory, {**gpu, "kind": "used"})
            families.add("skyward_gpu_memory_bytes", there, {**gpu, "kind": "total"})


def _devices(families: _Families, pool: Labels, sample: Mapping[str, Any]) -> None:
    for row in sample["devices"]:
        at = {**pool, "device": f"sky:{row['device']}", "node": row["node"], "kind": row["kind"]}
        if "process" in row:
            # Several clients of a pool have a device of the same name.
            at["process"] = row["process"]
        families.add("skyward_device_operations_total", row["operations"], at)
        families.add("skyward_device_waits_total", row["waits"], at)
        families.add("skyward_device_bytes_total", row["sent"], {**at, "direction": "sent"})
        families.add("skyward_device_bytes_total", row["fetched"], {**at, "direction": "fetched"})
