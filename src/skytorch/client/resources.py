"""What a compute asks of its machine, in the words of Kubernetes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from skyward import checks

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_FACTORS: dict[str | None, float] = {
    None: 1.0,
    "m": 1e-3,
    **{unit: 1e3**power for power, unit in enumerate("kMGT", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGT", 1)},
}
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True, slots=True)
class Resources:
    """An amount of each; None where nothing was asked."""

    cpus: float | None = None
    memory_gb: float | None = None
    gpus: int = 0

    @classmethod
    def of(cls, owner: object, given: object) -> Resources:
        """Read `{"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}`."""
        if not isinstance(given, Mapping):
            raise checks.refused(
                owner,
                {"resources": given},
                f"resources must be a mapping, not {checks.kind(given)}; "
                "write resources={'cpu': '4', 'memory': '8Gi', 'nvidia.com/gpu': '1'}",
            )
        amounts = {name: _amount(owner, name, given[name]) for name in given}
        gpus = sum(amounts.get(name, 0.0) for name in _GPUS)
        if gpus != int(gpus):
            raise checks.refused(owner, {"resources": given}, "GPUs are whole; ask for 1 or more")
        memory = amounts.get("memory")
        return cls(amounts.get("cpu"), memory and memory / 1e9, int(gpus))

    def check_here(self, owner: object, given: object) -> None:
        """Refuse GPUs that this machine does not have, unless CPUs are to stand in for them."""
        if not self.gpus or os.environ.get("SKYWARD_DEVICE") == "cpu":
            return
        from skyward.device.worker import available

        kinds = available()
        if kinds.get("cuda", 0) < self.gpus:
            has = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            raise checks.refused(
                owner,
                {"resources": given},
                f"this machine has {has}; ask for what is there, or set SKYWARD_DEVICE=cpu to "
                "try GPU code without one",
            )


def _amount(owner: object, name: object, quantity: object) -> float:
    given = {"resources": {name: quantity}}
    if name not in ("cpu", "memory", *_GPUS):
        raise checks.refused(
            owner,
            given,
            f"no such resource here; ask for 'cpu', 'memory', {' or '.join(map(repr, _GPUS))}",
        )
    text = str(quantity) if isinstance(quantity, int | float | str) else ""
    match = _QUANTITY.fullmatch(text)
    if match is None or isinstance(quantity, bool) or not float(match[1]):
        raise checks.refused(
            owner, given, "not an amount above 0; write one such as '2', '500m' or '8Gi'"
        )
    return float(match[1]) * _FACTORS[match[2]]
