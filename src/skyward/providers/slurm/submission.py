"""The submission: what `sbatch` gets, which is the options of a request and the job's script."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from skyward.accelerators import Accelerator
from skyward.providers import Request
from skyward.providers.piped import program

FORMAT = "%N|%c|%m|%G|%f"
_GRES = re.compile(r"(?:^|,)gpu(?::(?P<type>[^:,()]+))?:(?P<count>\d+)")
_SHARE = 0.95
"""How much of a node's memory is divided by its GPUs: sites keep some for the system."""
WARNING_SECONDS = 120
"""How long before the end of the time limit the warning comes; Slurm may send it 60 s earlier."""
SIGNAL = f"--signal=B:USR1@{WARNING_SECONDS}"
"""To the script alone: a signal to the steps would end the user's processes."""
# The system's own first: what comes first on the path may be a script that looks for a Python.
_START = """\
for python in /usr/bin/python3 python3 /usr/libexec/platform-python python3.13 python3.12 \\
    python3.11 python3.10 python3.9 python3.8 python3.7 python3.6
do
    if command -v "$python" >/dev/null 2>&1; then exec "$python" -I -c "$@"; fi
done
printf 'skyward: there is no Python 3 on %s\\n' "$(uname -n)" >&2
exit 78
"""
_SCRIPT = """\
#!/bin/sh
start={start}
relay={relay}
keeper={keeper}

# Slurm says that it will soon end the job: tell every keeper how much time is left.
warn() {{
    left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%L 2>/dev/null)
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N 2>/dev/null)
    told="{{\\"ask\\": \\"notice\\", \\"left\\": \\"$left\\", \\"reason\\": \\"{reason}\\"}}"
    nodes=${{nodes:-$SLURM_JOB_NODELIST}}
    count=$(scontrol show hostnames "$nodes" | wc -l)
    srun {step} --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$nodes" \\
        sh -c "$start" sh "$relay" keeper "$told" &
}}

trap warn USR1
# The keepers get this signal, too, and need a moment.
trap : TERM
# TMPDIR may name a folder that only the login node has. Without a name, the file leaves nothing.
if words=$(mktemp /tmp/sky.XXXXXX 2>/dev/null); then
    exec 3<>"$words"
    rm -f "$words"
else
    exec 3>/dev/null
fi
srun {launch} sh -c "$start" sh "$keeper" {config} 2>&3 &
keepers=$!
status=0
while :; do
    wait "$keepers"
    status=$?
    kill -0 "$keepers" 2>/dev/null || break
done
if [ "$status" != 0 ] && [ -s /proc/self/fd/3 ]; then
    # The client reads why, where it cannot read a file of this node.
    scontrol update JobId="$SLURM_JOB_ID" Comment="$(tail -c 400 /proc/self/fd/3 | tr '\\n|' '  ')"
fi
exit "$status"
"""


# What a request becomes.


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


def minutes(seconds: float | None) -> str | None:
    """A time to live as a time limit, which Slurm counts in minutes."""
    return None if seconds is None else str(math.ceil(seconds / 60) + 1)


def apptainer_image(image: str) -> str:
    """A file, or an address; a bare name is one of Docker's."""
    if "://" in image or image.startswith(("/", "./", "~")) or image.endswith(".sif"):
        return image
    return f"docker://{image}"


# The script: it starts a keeper on every node, and passes on Slurm's warning.


def batch_script(config: dict[str, object], launch: Sequence[str], step: Sequence[str]) -> bytes:
    """The script; `launch` has the options of the keepers' step, `step` those of later ones."""
    text = _SCRIPT.format(
        start=shlex.quote(_START),
        relay=shlex.quote(program("relay")),
        keeper=shlex.quote(program("keeper")),
        reason="Slurm ends the job: its time limit, or a preemption",
        launch=shlex.join(launch),
        step=shlex.join(step),
        config=shlex.quote(json.dumps(config)),
    )
    return text.encode()


def relay_command(*arguments: str) -> list[str]:
    """The command of a step that is a relay."""
    return ["sh", "-c", _START, "sh", program("relay"), *arguments]
