"""The catalogue of EC2: what a region sells, what fits a request, what it costs and boots."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import platformdirs

from skyward import accelerators
from skyward.accelerators import Accelerator, Card
from skyward.errors import ConfigurationError, UnavailableError, UnreachableError
from skyward.providers import Offer, Request, money

if TYPE_CHECKING:
    from skyward.providers.aws.account import Account
    from skyward.providers.aws.settings import Settings

_log = logging.getLogger("skyward")


# Types of instances.

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


def _read_type(said: Mapping[str, Any]) -> InstanceType:
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


# What they cost.

_MOST_NAMED = 100
"""How many types a request may name."""
_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}


def _on_demand_prices(account: Account) -> dict[str, float]:
    """The price of an hour in US dollars, by type."""
    filters = {**_FILTERS, "regionCode": account.region}
    # The price list of all regions is served in few of them.
    home = "cn-northwest-1" if account.region.startswith("cn-") else "us-east-1"
    listed = account.pages(
        "pricing",
        "get_products",
        "PriceList",
        region=home,
        # Machines can be bought without it: a service that fails must not keep the user waiting.
        attempts=2,
        ServiceCode="AmazonEC2",
        Filters=[
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in filters.items()
        ],
    )
    found: dict[str, float] = {}
    for entry in listed:
        # A price that is written in a way of its own is unknown, and no reason to sell nothing.
        with contextlib.suppress(KeyError, ValueError, TypeError, AttributeError):
            product = json.loads(entry)
            name = product["product"]["attributes"]["instanceType"]
            found |= {str(name): price for price in _hourly(product)}
    return found


def _hourly(product: Any) -> Iterator[float]:
    for term in product["terms"]["OnDemand"].values():
        for rate in term["priceDimensions"].values():
            dollars = float(rate["pricePerUnit"].get("USD", 0))
            # Capacity that is paid for by a reservation is listed with a price of nothing.
            if rate["unit"] == "Hrs" and dollars > 0:
                yield dollars


def _spot_prices(account: Account, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """What an hour costs now in US dollars, by type and zone; not for types that no zone sells."""
    named: dict[str, Any] = {"InstanceTypes": list(names)} if len(names) <= _MOST_NAMED else {}
    listed = account.pages(
        "ec2",
        "describe_spot_price_history",
        "SpotPriceHistory",
        StartTime=datetime.now(UTC),
        ProductDescriptions=["Linux/UNIX"],
        **named,
    )
    latest: dict[tuple[str, str], tuple[Any, float]] = {}
    for entry in listed:
        key = entry["InstanceType"], entry["AvailabilityZone"]
        said = entry["Timestamp"], float(entry["SpotPrice"])
        latest[key] = max(latest.get(key, said), said)
    found: dict[str, dict[str, float]] = {}
    for (name, zone), (_, price) in latest.items():
        found.setdefault(name, {})[zone] = price
    return found


# What AWS said, kept in a file with the time at which it was said.

_FORMAT = 1


class SpotPrices(msgspec.Struct):
    """The spot prices of a type, by zone."""

    at: float
    zones: dict[str, float]


class Remembered(msgspec.Struct):
    """The catalogue of a region; a time of 0 means that AWS was not asked yet."""

    format: int = _FORMAT
    types: list[InstanceType] = []
    types_at: float = 0.0
    zones: dict[str, list[str]] = {}
    zones_at: float = 0.0
    on_demand: dict[str, float] = {}
    """Empty if AWS did not say."""
    on_demand_at: float = 0.0
    spot: dict[str, SpotPrices] = {}
    spot_refused_at: float = 0.0
    """When AWS did not say what spot instances cost."""


def place(account: Account) -> Path:
    """The file for a region and a profile: zones may have other names in another account."""
    folder = os.environ.get("SKYWARD_CACHE") or platformdirs.user_cache_dir("skyward")
    profile = account.profile or os.environ.get("AWS_PROFILE") or ""
    other = f"{account.endpoint}\n{profile}".strip()
    suffix = f"-{hashlib.sha256(other.encode()).hexdigest()[:12]}" if other else ""
    return Path(folder, "aws", f"{account.region}{suffix}.json")


def _read(path: Path) -> Remembered:
    """What the file has; nothing if there is none, or one that cannot be read."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Remembered)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return Remembered()
    return found if found.format == _FORMAT else Remembered()


def _write(path: Path, remembered: Remembered) -> None:
    """Replace the file; what cannot be written is asked for again the next time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(remembered))
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


# Which types have what a request asks for.

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


Requirement = tuple[Callable[[InstanceType], bool], Callable[[Sequence[InstanceType]], str]]
"""What a type must have; and what to say if no type has it, of those that had everything before."""


def _is_usual(kind: InstanceType) -> bool:
    """Whether a type is bought without being named."""
    return kind.current and not (kind.bare_metal or kind.burstable or kind.fractional)


def _requirements(
    request: Request, region: str, architecture: str | None, named: bool
) -> Iterator[Requirement]:
    """What a request asks of a type, in the order in which a person would ask."""
    wanted = request.accelerator
    if not named:
        yield _is_usual, lambda left: f"EC2 sells nothing in {region}"
    if wanted is not None:
        yield from _of_accelerator(wanted, region, named)
    elif not named:
        yield (
            lambda kind: not kind.card and not kind.special,
            lambda left: f"every type in {region} has accelerators",
        )
    if architecture is None and wanted is None and not named:
        architecture = "x86_64"
    if architecture is not None:
        yield (
            lambda kind: architecture in kind.architectures,
            lambda left: (
                f"{_names(left)}: sold with "
                f"{' or '.join(sorted({each for kind in left for each in kind.architectures}))}, "
                f"not with {architecture}"
            ),
        )
    vcpus, memory_gb = request.vcpus or 0, request.memory_gb or 0
    if not (named or wanted or vcpus or memory_gb):
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

    yield lambda kind: kind.vcpus >= vcpus, few_vcpus
    yield lambda kind: kind.memory_gb >= memory_gb, little_memory
    if request.allocation == "spot":
        yield (
            lambda kind: "spot" in kind.usages,
            lambda left: f"{_names(left)}: not sold as a spot instance; use on-demand",
        )
    elif not named:
        yield (
            lambda kind: bool({"on-demand", "spot"} & set(kind.usages)),
            lambda left: (
                f"{_names(left)}: sold in capacity blocks alone; buy one and name it with "
                "AWS(reservation=...)"
            ),
        )


def _of_accelerator(wanted: Accelerator, region: str, named: bool) -> Iterator[Requirement]:
    each = f"{wanted.name}-{wanted.memory}"

    def no_model(left: Sequence[InstanceType]) -> str:
        if named:
            return f"{_names(left)} has {left[0].accelerator or 'no accelerator'}, not {each}"
        known = _ELSEWHERE.get(wanted.name)
        hint = f"; types of {wanted.name}: {', '.join(known)}" if known else ""
        return f"{wanted.name} is not sold in {region}{hint}"

    def no_memory(left: Sequence[InstanceType]) -> str:
        there = sorted(
            f"{found.name}-{found.memory} ({kind.name})"
            for kind in left
            if (found := kind.accelerator)
        )
        return f"no type in {region} has {each}; there is {', '.join(there)}"

    def too_many(left: Sequence[InstanceType]) -> str:
        most = max(left, key=lambda kind: (kind.cards, kind.name))
        return f"no type has {wanted.count} x {each}; the most is {most.cards} ({most.name})"

    yield lambda kind: kind.has_model(wanted), no_model
    yield lambda kind: kind.matching(wanted) > 0, no_memory
    yield lambda kind: kind.matching(wanted) >= wanted.count, too_many


def _names(kinds: Sequence[InstanceType]) -> str:
    names = [kind.name for kind in kinds]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# Images: which AMI an instance boots, and what it takes to log in.

CANONICAL = "099720109477"
_Names = tuple[str, tuple[str, ...]]
_PLAIN: _Names = (
    CANONICAL,
    (
        "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-{arch}-server-*",
        "ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-{arch}-server-*",
        "ubuntu/images/hvm-ssd*/ubuntu-*-{arch}-server-*",
    ),
)
_NVIDIA: _Names = (
    "amazon",
    (
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)*",
        "Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)*",
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04)*",
        "Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04)*",
        "Deep Learning*Ubuntu*",
    ),
)
_NVIDIA_OLD: _Names = (
    "amazon",
    ("Deep Learning Base Proprietary Nvidia Driver GPU AMI (Ubuntu*", "Deep Learning*Ubuntu*"),
)
"""NVIDIA's open kernel modules begin with Turing."""
_TURING = (7, 5)
_NEURON: _Names = (
    "amazon",
    ("Deep Learning Base Neuron AMI (Ubuntu 22.04)*", "Deep Learning*Neuron*Ubuntu*"),
)
"""Whose AMIs, and their names, the best first. Ubuntu, since images may ask for packages of apt."""
_NEURON_MODELS = ("TRAINIUM", "TRAINIUM2", "INFERENTIA", "INFERENTIA2")
_DEBIAN_ARCH = {"x86_64": "amd64", "arm64": "arm64"}
_USERS = (
    (re.compile("ubuntu", re.IGNORECASE), "ubuntu"),
    (re.compile("debian", re.IGNORECASE), "admin"),
    (re.compile("rocky", re.IGNORECASE), "rocky"),
    (re.compile("fedora", re.IGNORECASE), "fedora"),
)


@dataclass(frozen=True, slots=True)
class MachineImage:
    """An AMI."""

    id: str
    name: str
    architecture: str
    root_device: str
    disk_gb: int
    more_devices: tuple[str, ...] = ()
    """The names of its other volumes."""

    @property
    def user(self) -> str:
        """The user to log in as: what images of that kind have."""
        return next((user for names, user in _USERS if names.search(self.name)), "ec2-user")


@functools.lru_cache(maxsize=32)
def given_image(account: Account, ami: str) -> MachineImage:
    """The AMI that the user named; asked for once, since an AMI never changes."""
    found = account.call("ec2", "describe_images", ImageIds=[ami])["Images"]
    if not found:
        raise ConfigurationError(
            f"AWS(ami={ami!r}): {account.region} has no such AMI, or it is not shared with you; "
            "AMIs have other names in other regions"
        )
    return _image(found[0])


def _usual_image(
    account: Account, architecture: str, accelerator: Accelerator | None
) -> MachineImage:
    """The newest AMI that has what the accelerator needs: a driver, if any."""
    owner, names = _PLAIN
    if accelerator is not None:
        old = accelerator.cuda is not None and accelerator.cuda.compute_capability < _TURING
        nvidia = _NVIDIA_OLD if old else _NVIDIA
        if not accelerator.is_nvidia and accelerator.name not in _NEURON_MODELS:
            raise UnavailableError(
                f"AWS: there is no usual AMI with a driver for {accelerator.name}; name one with "
                "ami="
            )
        owner, names = nvidia if accelerator.is_nvidia else _NEURON
    patterns = [name.format(arch=_DEBIAN_ARCH.get(architecture, architecture)) for name in names]
    found = account.pages(
        "ec2",
        "describe_images",
        "Images",
        Owners=[owner],
        Filters=[
            {"Name": "name", "Values": patterns},
            {"Name": "architecture", "Values": [architecture]},
            {"Name": "state", "Values": ["available"]},
        ],
    )
    for pattern in patterns:
        matching = [each for each in found if fnmatch.fnmatchcase(each["Name"], pattern)]
        if matching:
            return _image(max(matching, key=lambda each: str(each.get("CreationDate", ""))))
    raise UnavailableError(
        f"AWS: {account.region} has no AMI called {patterns[0]!r} for {architecture}; name one "
        "with ami="
    )


def _image(found: Mapping[str, Any]) -> MachineImage:
    root = str(found.get("RootDeviceName") or "/dev/sda1")
    sizes = [
        int(each.get("Ebs", {}).get("VolumeSize") or 0)
        for each in found.get("BlockDeviceMappings", ())
        if each.get("DeviceName") == root
    ]
    return MachineImage(
        str(found["ImageId"]),
        str(found.get("Name", "")),
        str(found.get("Architecture", "x86_64")),
        root,
        max(sizes, default=0),
        tuple(
            str(each["DeviceName"])
            for each in found.get("BlockDeviceMappings", ())
            if "Ebs" in each and each.get("DeviceName") != root
        ),
    )


# What can be bought.

_HOUR = 3600.0
TYPES_SECONDS = 7 * 24 * _HOUR
ON_DEMAND_SECONDS = 24 * _HOUR
SPOT_SECONDS, FRESH_SPOT_SECONDS = _HOUR, 600.0
"""How old a spot price may be in a listing, and before a purchase."""
REFUSED_SECONDS = _HOUR
"""After how long to ask again for prices that AWS did not tell."""
DEARER = 2.0
"""How many times the quoted price another offer may cost, unless the user sets a limit."""
STRATEGIES = ("cluster", "spread", "partition")
"""What a placement group that is made with the pool may be."""


class Catalogue:
    """What EC2 sells in a region that fits the settings of a provider; any thread may ask.

    Answers of AWS are kept in a file below the user's cache directory, or `SKYWARD_CACHE`.
    """

    def __init__(self, account: Account, settings: Settings) -> None:
        self._account, self._settings = account, settings
        self._path = place(account)
        self._lock = threading.Lock()
        self._known: Remembered | None = None
        self._images: dict[tuple[str, str], MachineImage] = {}
        self.reservation: Mapping[str, Any] | None = None
        """The reservation that the last offers are of, as AWS describes it."""

    def offers(self, request: Request, *, fresh: bool = False) -> list[Offer]:
        """What fulfils a request, in the order in which to try it; empty if nothing does.

        Cheapest first: spot instances zone by zone, others in any zone. With `fresh`, spot prices
        are those of the last minutes. Raises `UnavailableError` if there is a limit to the price,
        and AWS does not say what anything costs.
        """
        settings = self._settings
        if settings.reservation is not None:
            return self._reserved(request, settings.reservation)
        found = self._listed(request, settings.instance_type, self._architecture(), fresh=fresh)
        return self._affordable(request, self._equipped(found))

    def why_none(self, request: Request) -> str:
        """Why nothing fulfils a request, in a sentence."""
        named, image, architecture = (
            self._settings.instance_type,
            self._given_image(),
            self._architecture(),
        )
        if named is not None and image is not None:
            self._check_architecture(image, self.type(named))
        found, why = self._chosen(request, named, architecture)
        if why:
            return why
        offers = self._priced(request, found, architecture, fresh=False)
        if not offers:
            return f"no zone of {self._account.region} sells {found[0].name} as a spot instance now"
        cheapest = min(offers, key=_rank)
        if cheapest.hourly_cost is None or request.max_hourly_cost is None:
            return f"EC2 sells {cheapest.instance_type}, but says no price for it"
        how = " as a spot instance" if cheapest.allocation == "spot" else ""
        return (
            f"the cheapest is {cheapest.instance_type}{how} at {money(cheapest.hourly_cost)} an "
            f"hour, above max_hourly_cost={money(request.max_hourly_cost)}"
        )

    def type(self, name: str) -> InstanceType:
        """What EC2 says about a type; raises `ConfigurationError` if it sells none of that name."""
        types = self._up_to_date().types
        for kind in types:
            if kind.name == name:
                return kind
        names = [kind.name for kind in types]
        close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
        hint = f"; there is {', '.join(close)}" if close else ""
        raise ConfigurationError(
            f"AWS(instance_type={name!r}): EC2 sells no such type in {self._account.region}{hint}"
        )

    def zones_of(self, offer: Offer) -> Sequence[str]:
        """The zones in which an offer can be had."""
        known = self._up_to_date().zones
        return [offer.zone] if offer.zone else known.get(offer.instance_type, ())

    def image(self, offer: Offer) -> MachineImage:
        """The image that a machine boots: the user's, or the usual one for such machines."""
        given = self._given_image()
        if given is not None:
            self._check_architecture(given, self.type(offer.instance_type))
            return given
        key = offer.architecture, offer.accelerator.name if offer.accelerator else ""
        if key not in self._images:
            self._images[key] = _usual_image(self._account, key[0], offer.accelerator)
        return self._images[key]

    # What the settings leave of it.

    def _reserved(self, request: Request, named: str) -> list[Offer]:
        """The one offer that uses capacity that the user has reserved."""
        told = f"AWS(reservation={named!r})"
        held = self.reservation = next(
            iter(
                self._account.call(
                    "ec2", "describe_capacity_reservations", CapacityReservationIds=[named]
                )["CapacityReservations"]
            ),
            None,
        )
        if held is None:
            raise ConfigurationError(f"{told}: {self._account.region} has no such reservation")
        if request.allocation != "on-demand":
            raise ConfigurationError(
                f"{told}: reserved capacity is no spot capacity; leave "
                f"allocation={request.allocation!r} out"
            )
        if held["State"] != "active":
            when = f", and begins at {held['StartDate']}" if held.get("StartDate") else ""
            raise UnavailableError(
                f"{told}: it is {held['State']}, not active{when}; try again when it is"
            )
        if not held.get("AvailableInstanceCount"):
            raise UnavailableError(
                f"{told}: all its {held['InstanceType']} are in use; end another pool first, or "
                "name another reservation"
            )
        found = self._listed(
            replace(request, allocation="on-demand", max_hourly_cost=None), held["InstanceType"]
        )
        if not found:
            raise ConfigurationError(
                f"{told}: it is for {held['InstanceType']}, which is not what this pool asks for; "
                "leave accelerator, vcpus and memory_gb out, or name another reservation"
            )
        offer = replace(found[0], zone=held["AvailabilityZone"])
        # A block was paid for when it was bought.
        return [replace(offer, hourly_cost=0.0) if is_block(held) else offer]

    def _equipped(self, offers: list[Offer]) -> list[Offer]:
        """The offers that have what the settings need of the type itself."""
        settings = self._settings
        if settings.efa and offers:
            found = [each for each in offers if self.type(each.instance_type).efa_interfaces]
            if not found:
                raise ConfigurationError(
                    f"AWS(efa=True): {offers[0].instance_type} has no Elastic Fabric Adapter; ask "
                    "for a machine that has one, such as accelerator=sky.accelerators.H100(8), or "
                    "leave efa out"
                )
            offers = found
        strategy = settings.placement_group
        if strategy in STRATEGIES and offers:
            found = [
                each
                for each in offers
                if strategy in self.type(each.instance_type).placement_strategies
            ]
            if not found:
                raise ConfigurationError(
                    f"AWS(placement_group={strategy!r}): {offers[0].instance_type} cannot be in "
                    "such a group; leave placement_group out, or name another instance_type"
                )
            offers = found
        return offers

    def _affordable(self, request: Request, offers: list[Offer]) -> list[Offer]:
        """Without offers that cost much more than was quoted, if the user has set no limit."""
        if request.max_hourly_cost is not None or self._settings.instance_type or not offers:
            return offers
        # Spot capacity falls back to machines on demand, which cost more by their nature.
        usual = next((each for each in offers if each.allocation == "on-demand"), offers[0])
        if usual.hourly_cost is None:
            return [each for each in offers if each.vcpus <= DEARER * usual.vcpus]
        limit = DEARER * usual.hourly_cost
        return [each for each in offers if each.hourly_cost is None or each.hourly_cost <= limit]

    def _architecture(self) -> str | None:
        image = self._given_image()
        return self._settings.architecture or (image.architecture if image else None)

    def _given_image(self) -> MachineImage | None:
        ami = self._settings.ami
        return given_image(self._account, ami) if ami is not None else None

    def _check_architecture(self, image: MachineImage, kind: InstanceType) -> None:
        if image.architecture not in kind.architectures:
            raise ConfigurationError(
                f"AWS(ami={image.id!r}): that AMI is for {image.architecture}, and {kind.name} is "
                f"{' or '.join(kind.architectures)}; name an AMI for it, or leave ami out"
            )

    # What fulfils a request.

    def _listed(
        self,
        request: Request,
        instance_type: str | None = None,
        architecture: str | None = None,
        *,
        fresh: bool = False,
    ) -> list[Offer]:
        """All that fulfils a request, cheapest first."""
        found, _ = self._chosen(request, instance_type, architecture)
        offers = self._priced(request, found, architecture, fresh)
        limit = request.max_hourly_cost
        if limit is None:
            return offers
        if not _any_price(offers):
            # The user may have got the permission meanwhile.
            self._forget_refusals()
            offers = self._priced(request, found, architecture, fresh)
        if offers and not _any_price(offers):
            raise UnavailableError(
                f"AWS does not say what {offers[0].instance_type} costs, so max_hourly_cost="
                f"{money(limit)} cannot be kept: allow pricing:GetProducts and "
                "ec2:DescribeSpotPriceHistory, as docs/aws.md says, or leave max_hourly_cost out"
            )
        return [
            each for each in offers if each.hourly_cost is not None and each.hourly_cost <= limit
        ]

    def _chosen(
        self, request: Request, instance_type: str | None, architecture: str | None
    ) -> tuple[list[InstanceType], str]:
        """The types that have what is asked for; if there are none, also why."""
        named = instance_type is not None
        left = self._up_to_date().types if instance_type is None else [self.type(instance_type)]
        region = self._account.region
        for holds, explain in _requirements(request, region, architecture, named):
            found = [kind for kind in left if holds(kind)]
            if not found:
                return [], explain(left)
            left = found
        return left, ""

    def _priced(
        self,
        request: Request,
        kinds: Sequence[InstanceType],
        architecture: str | None,
        fresh: bool,
    ) -> list[Offer]:
        known = self._up_to_date()

        def offer(
            kind: InstanceType,
            allocation: Literal["on-demand", "spot"],
            zone: str | None,
            cost: float | None,
        ) -> Offer:
            usual = "x86_64" if "x86_64" in kind.architectures else kind.architectures[0]
            return Offer(
                provider="aws",
                region=self._account.region,
                zone=zone,
                instance_type=kind.name,
                accelerator=kind.accelerator,
                vcpus=kind.vcpus,
                memory_gb=kind.memory_gb,
                architecture=architecture or usual,
                allocation=allocation,
                hourly_cost=cost,
            )

        offers: list[Offer] = []
        if request.allocation != "on-demand":
            sold = [kind for kind in kinds if "spot" in kind.usages]
            costs = self._spot([kind.name for kind in sold], fresh)
            for kind in sold:
                there: Mapping[str, float | None]
                if costs is None:
                    there = dict.fromkeys(known.zones.get(kind.name, ()))
                else:
                    there = costs[kind.name]
                offers += [offer(kind, "spot", zone, cost) for zone, cost in there.items()]
            offers.sort(key=_rank)
        if request.allocation != "spot":
            usual = [
                offer(kind, "on-demand", None, known.on_demand.get(kind.name)) for kind in kinds
            ]
            offers += sorted(usual, key=_rank)
        return offers

    # What AWS says.

    def _up_to_date(self) -> Remembered:
        """Types, zones and on-demand prices, as old as they may be."""
        with self._lock:
            if self._known is None:
                self._known = _read(self._path)
            known, now = self._known, time.time()
            told = ON_DEMAND_SECONDS if known.on_demand else REFUSED_SECONDS
            due: list[Callable[[], None]] = []
            if not 0 <= now - known.types_at < TYPES_SECONDS:
                due.append(self._fetch_types)
            if not 0 <= now - known.zones_at < TYPES_SECONDS:
                due.append(self._fetch_zones)
            if not 0 <= now - known.on_demand_at < told:
                due.append(self._fetch_on_demand)
            if due:
                with ThreadPoolExecutor(len(due), "aws-catalogue") as threads:
                    for done in [threads.submit(fetch) for fetch in due]:
                        done.result()
                _write(self._path, known)
            return known

    def _forget_refusals(self) -> None:
        with self._lock:
            if self._known is not None:
                self._known.spot_refused_at = 0.0
                if not self._known.on_demand:
                    self._known.on_demand_at = 0.0

    def _fetch_types(self) -> None:
        assert self._known is not None
        listed = self._account.pages("ec2", "describe_instance_types", "InstanceTypes")
        self._known.types = sorted((_read_type(each) for each in listed), key=lambda k: k.name)
        self._known.types_at = time.time()

    def _fetch_zones(self) -> None:
        assert self._known is not None
        listed = self._account.pages(
            "ec2",
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
        )
        found: dict[str, list[str]] = {}
        for each in listed:
            # Local and wavelength zones have longer names, and networks of their own.
            if len(each["Location"]) == len(self._account.region) + 1:
                found.setdefault(each["InstanceType"], []).append(each["Location"])
        self._known.zones = {name: sorted(zones) for name, zones in sorted(found.items())}
        self._known.zones_at = time.time()

    def _fetch_on_demand(self) -> None:
        assert self._known is not None
        try:
            self._known.on_demand = _on_demand_prices(self._account)
        except (UnavailableError, UnreachableError) as problem:
            self._known.on_demand = {}
            _log.warning(
                "prices of AWS are unknown, so its machines are chosen by size: %s", problem
            )
        self._known.on_demand_at = time.time()

    def _spot(self, names: Sequence[str], fresh: bool) -> dict[str, dict[str, float]] | None:
        """Spot prices by type and zone; None if AWS does not say them."""
        known = self._up_to_date()
        age = FRESH_SPOT_SECONDS if fresh else SPOT_SECONDS
        with self._lock:
            now = time.time()
            if 0 <= now - known.spot_refused_at < REFUSED_SECONDS:
                return None
            due = [
                name
                for name in names
                if name not in known.spot or not 0 <= now - known.spot[name].at < age
            ]
            if due:
                try:
                    found = _spot_prices(self._account, due)
                except (UnavailableError, UnreachableError) as problem:
                    known.spot_refused_at = now
                    _write(self._path, known)
                    _log.warning("spot prices of AWS are unknown: %s", problem)
                    return None
                known.spot |= {name: SpotPrices(now, found.get(name, {})) for name in due}
                _write(self._path, known)
            return {name: known.spot[name].zones for name in names}


def is_block(reservation: Mapping[str, Any]) -> bool:
    """Whether capacity is reserved, and paid for, for a time alone."""
    return reservation.get("ReservationType") == "capacity-block"


def _any_price(offers: Sequence[Offer]) -> bool:
    return any(offer.hourly_cost is not None for offer in offers)


def _rank(offer: Offer) -> tuple[bool, float, float, str, str]:
    cost = offer.hourly_cost
    name = offer.instance_type
    return cost is None, cost or 0.0, offer.vcpus, name, offer.zone or ""
