"""The choice of types that have what a request asks for, and why there may be none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyward.accelerators import Accelerator
from skyward.providers import Request
from skyward.providers.aws.instance_types import InstanceType

USUAL_VCPUS, USUAL_MEMORY_GB = 4, 8
"""What a machine has at least, if the user asks for nothing."""
_ELSEWHERE = {
    "V100": ("p3dn.24xlarge",),
    "T4": ("g4dn.xlarge",),
    "A10G": ("g5.xlarge",),
    "A100": ("p4d.24xlarge", "p4de.24xlarge"),
    "L4": ("g6.xlarge",),
    "L40S": ("g6e.xlarge",),
    "H100": ("p5.4xlarge", "p5.48xlarge"),
    "H200": ("p5e.48xlarge", "p5en.48xlarge"),
    "B200": ("p6-b200.48xlarge",),
    "B300": ("p6-b300.48xlarge",),
    "TRAINIUM": ("trn1.2xlarge", "trn1.32xlarge"),
    "TRAINIUM2": ("trn2.48xlarge",),
    "INFERENTIA": ("inf1.xlarge",),
    "INFERENTIA2": ("inf2.xlarge",),
}
"""The smallest types of each model, for a region that has none."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a type must have, and what to say if no type has it."""

    holds: Callable[[InstanceType], bool]
    explain: Callable[[Sequence[InstanceType]], str]
    """Given the types that had everything before."""


def suitable(
    types: Sequence[InstanceType], requirements: Sequence[Requirement]
) -> tuple[list[InstanceType], str]:
    """The types that have everything; if there are none, also why."""
    left = list(types)
    for requirement in requirements:
        found = [kind for kind in left if requirement.holds(kind)]
        if not found:
            return [], requirement.explain(left)
        left = found
    return left, ""


def is_usual(kind: InstanceType) -> bool:
    """Whether a type is bought without being named."""
    return kind.current and not (kind.bare_metal or kind.burstable or kind.fractional)


def requirements(
    request: Request,
    region: str,
    *,
    architecture: str | None,
    named: bool,
) -> list[Requirement]:
    """What a request asks of a type, in the order in which a person would ask."""
    wanted = request.accelerator
    found = []
    if not named:
        found.append(Requirement(is_usual, lambda left: f"EC2 sells nothing in {region}"))
    if wanted is not None:
        found += _accelerator(wanted, region, named)
    elif not named:
        found.append(
            Requirement(
                lambda kind: not kind.card and not kind.special,
                lambda left: f"every type in {region} has accelerators",
            )
        )
    if architecture is None and wanted is None and not named:
        architecture = "x86_64"
    if architecture is not None:
        found.append(_architecture(architecture))
    found += _size(request, named)
    if request.allocation == "spot":
        found.append(
            Requirement(
                lambda kind: "spot" in kind.usages,
                lambda left: f"{_names(left)}: not sold as a spot instance; use on-demand",
            )
        )
    elif not named:
        found.append(
            Requirement(
                lambda kind: bool({"on-demand", "spot"} & set(kind.usages)),
                lambda left: (
                    f"{_names(left)}: sold in capacity blocks alone; buy one and name it with "
                    "AWS(reservation=...)"
                ),
            )
        )
    return found


def _accelerator(wanted: Accelerator, region: str, named: bool) -> list[Requirement]:
    each = f"{wanted.name}-{wanted.memory}"

    def no_model(left: Sequence[InstanceType]) -> str:
        if named:
            return f"{_names(left)} has {left[0].accelerator or 'no accelerator'}, not {each}"
        known = _ELSEWHERE.get(wanted.name)
        hint = f"; types of {wanted.name}: {', '.join(known)}" if known else ""
        return f"{wanted.name} is not sold in {region}{hint}"

    def no_memory(left: Sequence[InstanceType]) -> str:
        there = sorted({f"{_one(kind)} ({kind.name})" for kind in left})
        return f"no type in {region} has {each}; there is {', '.join(there)}"

    def too_many(left: Sequence[InstanceType]) -> str:
        most = max(left, key=lambda kind: (kind.cards, kind.name))
        return f"no type has {wanted.count} x {each}; the most is {most.cards} ({most.name})"

    return [
        Requirement(lambda kind: kind.has_model(wanted), no_model),
        Requirement(lambda kind: kind.matching(wanted) > 0, no_memory),
        Requirement(lambda kind: kind.matching(wanted) >= wanted.count, too_many),
    ]


def _one(kind: InstanceType) -> str:
    found = kind.accelerator
    return f"{found.name}-{found.memory}" if found else ""


def _architecture(wanted: str) -> Requirement:
    def explain(left: Sequence[InstanceType]) -> str:
        there = sorted({each for kind in left for each in kind.architectures})
        return f"{_names(left)}: sold with {' or '.join(there)}, not with {wanted}"

    return Requirement(lambda kind: wanted in kind.architectures, explain)


def _size(request: Request, named: bool) -> list[Requirement]:
    vcpus, memory_gb = request.vcpus or 0, request.memory_gb or 0
    if not (named or request.accelerator or vcpus or memory_gb):
        vcpus, memory_gb = USUAL_VCPUS, USUAL_MEMORY_GB

    def few_vcpus(left: Sequence[InstanceType]) -> str:
        most = max(left, key=lambda kind: kind.vcpus)
        return f"no such type has {vcpus:g} vCPUs; the most is {most.vcpus} ({most.name})"

    def little_memory(left: Sequence[InstanceType]) -> str:
        most = max(left, key=lambda kind: kind.memory_gb)
        return (
            f"no such type has {memory_gb:g} GB of memory; the most is {most.memory_gb:g} GB "
            f"({most.name})"
        )

    return [
        Requirement(lambda kind: kind.vcpus >= vcpus, few_vcpus),
        Requirement(lambda kind: kind.memory_gb >= memory_gb, little_memory),
    ]


def _names(kinds: Sequence[InstanceType]) -> str:
    names = [kind.name for kind in kinds]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
