"""What a compute asks of its machine, in the words of Kubernetes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyward import checks

_QUANTITY = re.compile(
    r"(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d+)|(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei))?"
)
_FACTORS: dict[str | None, float] = {
    None: 1.0,
    **{unit: 1e-3**power for power, unit in enumerate("mun", 1)},
    **{unit: 1e3**power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_HERE = ("cpu", "memory", *_GPUS)
_NAME = re.compile(
    r"cpu|memory|ephemeral-storage|hugepages-\d+[KMG]i"
    r"|[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
_OBJECT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

NAME_RULE = "has small letters, digits and hyphens, at most 63"
"""What a compute, a volume, a claim and a namespace may be called."""


def is_name(name: object) -> bool:
    """Whether Kubernetes would take it as the name of an object.

    >>> is_name("trainer-1"), is_name("My_Node")
    (True, False)
    """
    return isinstance(name, str) and _OBJECT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Resources:
    """The names of resources, and of each the amount as Kubernetes writes it."""

    amounts: Mapping[str, str]

    @classmethod
    def of(cls, owner: object, given: object) -> Resources:
        """Read `{"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}`, or refuse it."""
        if not isinstance(given, Mapping):
            raise checks.refused(
                owner,
                {"resources": given},
                f"resources must be a mapping, not {checks.kind(given)}; "
                "write resources={'cpu': '4', 'memory': '8Gi', 'nvidia.com/gpu': '1'}",
            )
        for name, quantity in given.items():
            _check(owner, name, quantity)
        return cls({name: str(quantity) for name, quantity in given.items()})

    @property
    def cpus(self) -> float | None:
        """How many processors; None if that was not asked."""
        return number(self.amounts["cpu"]) if "cpu" in self.amounts else None

    @property
    def memory_gb(self) -> float | None:
        """How much memory, in 10^9 bytes; None if that was not asked."""
        return number(self.amounts["memory"]) / 1e9 if "memory" in self.amounts else None

    @property
    def devices(self) -> list[str]:
        """The resources that a device plugin offers, such as GPUs."""
        return [name for name in self.amounts if "/" in name]

    # On this machine.

    def check_here(self, owner: object) -> None:
        """Refuse what this machine cannot give, unless CPUs are to stand in for its GPUs."""
        for name, amount in self.amounts.items():
            if name not in _HERE:
                raise checks.refused(
                    owner,
                    {"resources": {name: amount}},
                    f"this machine gives 'cpu', 'memory', {' or '.join(map(repr, _GPUS))}; for "
                    "others, a kubeconfig must name a Kubernetes cluster that has them",
                )
        gpus = sum(number(self.amounts.get(name, "0")) for name in _GPUS)
        if not gpus or os.environ.get("SKYWARD_DEVICE") == "cpu":
            return
        from skyward.device.own_torch import available

        kinds = available()
        if kinds.get("cuda", 0) < gpus:
            has = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            raise checks.refused(
                owner,
                {"resources": self.amounts},
                f"this machine has {has}; ask for what is there, or set SKYWARD_DEVICE=cpu to "
                "try GPU code without one",
            )

    # On Kubernetes.

    def container(self) -> dict[str, dict[str, str]]:
        """The resources of a container: all of them reserved, and no more than that."""
        return {"requests": dict(self.amounts), "limits": dict(self.amounts)}

    def tolerations(self) -> list[dict[str, Any]]:
        """What lets a pod onto machines that are kept for these resources.

        By custom, the taint that keeps other pods off has the name of the resource; machines whose
        NVIDIA GPUs are cut up (MIG) have that of whole ones.
        """
        names = dict.fromkeys(self.devices)
        if any(name.startswith("nvidia.com/") for name in names):
            names["nvidia.com/gpu"] = None
        return [{"key": name, "operator": "Exists"} for name in names]


def is_quantity(text: object) -> bool:
    """Whether Kubernetes would take it for an amount.

    >>> is_quantity("10Gi"), is_quantity("ten")
    (True, False)
    """
    return isinstance(text, str) and _QUANTITY.fullmatch(text) is not None


def number(quantity: str) -> float:
    """The number that a quantity stands for."""
    match = _QUANTITY.fullmatch(quantity)
    assert match is not None, quantity
    digits, power, unit = match.groups()
    return float(digits) * (10.0 ** int(power) if power else _FACTORS[unit])


def _check(owner: object, name: object, quantity: object) -> None:
    given = {"resources": {name: quantity}}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise checks.refused(
            owner,
            given,
            "Kubernetes knows no such resource; ask for 'cpu', 'memory', 'ephemeral-storage', "
            "'hugepages-2Mi', or what a device plugin offers, such as 'nvidia.com/gpu'",
        )
    text = str(quantity) if isinstance(quantity, int | float | str) else ""
    if isinstance(quantity, bool) or not is_quantity(text) or not number(text):
        raise checks.refused(
            owner, given, "not an amount above 0; write one such as '2', '500m' or '8Gi'"
        )
    if "/" in name and not number(text).is_integer():
        raise checks.refused(owner, given, "GPUs and other devices are whole; ask for 1 or more")
