"""Types of instances: what EC2 says about each, as far as it matters here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from skyward import accelerators
from skyward.accelerators import Accelerator, Card

_OTHER_HARDWARE = ("FpgaInfo", "MediaAcceleratorInfo", "InferenceAcceleratorInfo")


class InstanceType(msgspec.Struct, frozen=True):
    """A type of instances, such as g6.xlarge."""

    name: str
    vcpus: int
    memory_gb: float
    architectures: tuple[str, ...]
    card: str = ""
    """The name of its accelerators; empty if it has none."""
    card_mib: int | None = None
    """The memory of each; None where EC2 counts it in ways that differ from type to type."""
    cards: int = 0
    fractional: bool = False
    """Whether it has only a part of a GPU."""
    special: bool = False
    """Whether it has hardware that a machine without accelerators would pay for in vain."""
    current: bool = True
    burstable: bool = False
    bare_metal: bool = False
    usages: tuple[str, ...] = ("on-demand", "spot")
    """How it is sold: "on-demand", "spot", "capacity-block"."""
    efa_interfaces: int = 0
    network_cards: int = 1
    placement_strategies: tuple[str, ...] = ()

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerators that it has, by the catalog's name if the catalog lists them."""
        if not self.card:
            return None
        card = Card(self.card, self.card_mib)
        for model in accelerators.models():
            for memory in model.memories:
                known = model(self.cards, memory=memory)
                if accelerators.matching(known, [card]):
                    return known
        memory_gb = max(1, round((self.card_mib or 0) / 1024))
        return Accelerator(self.card, f"{memory_gb}GB", self.cards)

    def has_model(self, wanted: Accelerator) -> bool:
        """Whether its accelerators are of the model, whatever their memory."""
        return bool(self.card and accelerators.matching(wanted, [Card(self.card)]))

    def matching(self, wanted: Accelerator) -> int:
        """How many of its accelerators are of the model and the memory asked for."""
        card = Card(self.card, self.card_mib)
        return self.cards if self.card and accelerators.matching(wanted, [card]) else 0


def read_type(said: Mapping[str, Any]) -> InstanceType:
    """A type, from what `describe_instance_types` says about it."""
    network = said.get("NetworkInfo", {})
    efa = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1)
    return InstanceType(
        name=said["InstanceType"],
        vcpus=said["VCpuInfo"]["DefaultVCpus"],
        memory_gb=said["MemoryInfo"]["SizeInMiB"] / 1024,
        architectures=tuple(said.get("ProcessorInfo", {}).get("SupportedArchitectures", ())),
        **_cards(said),
        special=any(kind in said for kind in _OTHER_HARDWARE),
        current=said.get("CurrentGeneration", True),
        burstable=said.get("BurstablePerformanceSupported", False),
        bare_metal=said.get("BareMetal", False),
        usages=tuple(said.get("SupportedUsageClasses", ("on-demand",))),
        efa_interfaces=efa if network.get("EfaSupported") else 0,
        network_cards=network.get("MaximumNetworkCards", 1),
        placement_strategies=tuple(
            said.get("PlacementGroupInfo", {}).get("SupportedStrategies", ())
        ),
    )


def _cards(said: Mapping[str, Any]) -> dict[str, Any]:
    for gpu in said.get("GpuInfo", {}).get("Gpus", ()):
        count = gpu.get("Count", 0)
        return {
            "card": gpu["Name"],
            "card_mib": gpu.get("MemoryInfo", {}).get("SizeInMiB"),
            "cards": count or gpu.get("LogicalGpuCount", 1),
            # A part of a GPU has the count 0, and says which part it is.
            "fractional": count == 0 or gpu.get("GpuPartitionSize", 1) < 1,
        }
    # EC2 says 512 GB of a Trainium2, which has 96: the name alone counts.
    for device in said.get("NeuronInfo", {}).get("NeuronDevices", ()):
        return {"card": device["Name"], "cards": device.get("Count", 1)}
    for other in said.get("InferenceAcceleratorInfo", {}).get("Accelerators", ()):
        memory = other.get("MemoryInfo", {}).get("SizeInMiB")
        return {"card": other["Name"], "card_mib": memory, "cards": other.get("Count", 1)}
    return {}
