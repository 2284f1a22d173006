"""Resources: the options of `sbatch` that a pool's request becomes on a given cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from skyward.accelerators import Accelerator
from skyward.providers import Request

FORMAT = "%N|%c|%m|%G|%f"
_GRES = re.compile(r"(?:^|,)gpu(?::(?P<type>[^:,()]+))?:(?P<count>\d+)")
_SHARE = 0.95
"""How much of a node's memory is divided by its GPUs: sites keep some for the system."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """What one node of the cluster has, as `sinfo` shows it."""

    name: str
    cpus: int
    memory_mb: int
    gpus: tuple[tuple[str, int], ...]
    """The types of its GPUs and how many there are; a site may give them no type."""
    features: tuple[str, ...]


def read_nodes(output: str) -> list[NodeKind]:
    """The nodes in an answer of `sinfo`; one that is in several partitions comes once."""
    found = {}
    for line in output.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 5:
            continue
        name, cpus, memory, gres, features = parts
        gpus = tuple((each["type"] or "", int(each["count"])) for each in _GRES.finditer(gres))
        found[name] = NodeKind(
            name,
            _number(cpus),
            _number(memory),
            gpus,
            () if features == "(null)" else tuple(re.split(r"[,&|]", features)),
        )
    return list(found.values())


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_called(wanted: Accelerator, name: str) -> bool:
    """Whether a site's name, such as "nvidia_h100_80gb_hbm3", means an accelerator."""
    words = re.findall(r"[a-z]*[0-9]*", wanted.name.lower())
    model = r"[^a-z0-9]*".join(word for word in words if word)
    # "l4" is no "l40s", and "a10" no "a100".
    return re.search(rf"(?<![a-z0-9]){model}(?![a-z0-9])", name.lower()) is not None


def gpu_type(wanted: Accelerator, nodes: Sequence[NodeKind]) -> str | None:
    """The site's type for an accelerator: empty if its GPUs have no types, None if it has none."""
    types = {name for node in nodes for name, _ in node.gpus}
    fitting = sorted(name for name in types if name and _is_called(wanted, name))
    sized = [name for name in fitting if re.search(r"\d+gb", name.lower())]
    exact = [name for name in sized if re.search(rf"(?<!\d){wanted.memory_gb}gb", name.lower())]
    plain = [name for name in fitting if name not in sized]
    # One of another size is not what was asked for, and may be a slice of a card.
    if found := exact or plain:
        return found[0]
    return "" if "" in types else None


def described(nodes: Sequence[NodeKind]) -> str:
    """The GPUs of a cluster, for people: "h100:2 on 2 nodes"."""
    counts: dict[str, int] = {}
    for node in nodes:
        for name, count in node.gpus:
            each = f"{name or 'gpu'}:{count}"
            counts[each] = counts.get(each, 0) + 1
    words = [f"{each} on {n} {'node' if n == 1 else 'nodes'}" for each, n in counts.items()]
    return ", ".join(words) or "no GPUs"


def options(request: Request, nodes: Sequence[NodeKind]) -> list[str]:
    """The options for one node of a pool; where none are asked for, processors and memory go with
    the share of the node's GPUs."""
    found = []
    cpus: int | None = math.ceil(request.vcpus) if request.vcpus else None
    memory = math.ceil(request.memory_gb * 1024) if request.memory_gb else None
    wanted = request.accelerator
    if wanted is not None:
        kind = gpu_type(wanted, nodes)
        name = _key(wanted.name) if kind is None else kind
        found.append(f"--gres=gpu:{name}:{wanted.count}" if name else f"--gres=gpu:{wanted.count}")
        shares = [
            (node.cpus * wanted.count // count, node.memory_mb * _SHARE * wanted.count / count)
            for node in nodes
            for each, count in node.gpus
            if each == name and count >= wanted.count
        ]
        if shares:
            cpus = cpus or max(1, min(cpu for cpu, _ in shares))
            share = int(min(size for _, size in shares))
            # A site that does not book memory says 1 for it.
            memory = memory or (share if share > 1024 else None)
    if cpus:
        found.append(f"--cpus-per-task={cpus}")
    if memory:
        found.append(f"--mem={memory}M")
    if request.disk_gb:
        found.append(f"--tmp={math.ceil(request.disk_gb)}G")
    return found
