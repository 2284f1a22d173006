"""The assortment: what AWS sells that fits the user's settings, and what each machine boots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skyward.errors import ConfigurationError
from skyward.market import Offer
from skyward.providers import Request
from skyward.providers.aws import images
from skyward.providers.aws.account import Account
from skyward.providers.aws.catalogue import Catalogue
from skyward.providers.aws.images import MachineImage
from skyward.providers.aws.instance_types import InstanceType
from skyward.providers.aws.reservations import Reservation, reserved
from skyward.providers.aws.site import STRATEGIES, Settings

DEARER = 2.0
"""How many times the quoted price another offer may cost, unless the user sets a limit."""


class Assortment:
    """What can be bought with the settings of one provider; any thread may ask."""

    def __init__(self, account: Account, settings: Settings) -> None:
        self._account, self._settings = account, settings
        self._catalogue = Catalogue(account)
        self._images: dict[tuple[str, str], MachineImage] = {}
        self.reservation: Reservation | None = None
        """The reservation that the last offers are of."""

    def offers(self, request: Request, *, fresh: bool = False) -> list[Offer]:
        """What fulfils a request, in the order in which to try it; empty if nothing does.

        With `fresh`, spot prices are those of the last minutes.
        """
        settings = self._settings
        if settings.reservation is not None:
            return self._reserved(request, settings.reservation)
        found = self._catalogue.offers(
            request,
            architecture=self._architecture(),
            instance_type=settings.instance_type,
            fresh=fresh,
        )
        return self._affordable(request, self._equipped(found))

    def why_none(self, request: Request) -> str:
        """Why nothing fulfils a request, in a sentence."""
        settings, image = self._settings, self._given_image()
        if settings.instance_type is not None and image is not None:
            self._check_architecture(image, self.kind(settings.instance_type))
        return self._catalogue.why_none(
            request, architecture=self._architecture(), instance_type=settings.instance_type
        )

    def kind(self, instance_type: str) -> InstanceType:
        """What AWS says about a type."""
        return self._catalogue.type(instance_type)

    def zones_of(self, offer: Offer) -> Sequence[str]:
        """The zones in which an offer can be had."""
        return [offer.zone] if offer.zone else self._catalogue.zones_of(offer.instance_type)

    def image(self, offer: Offer) -> MachineImage:
        """The image that a machine boots: the user's, or the usual one for such machines."""
        given = self._given_image()
        if given is not None:
            self._check_architecture(given, self.kind(offer.instance_type))
            return given
        key = offer.architecture, offer.accelerator.name if offer.accelerator else ""
        if key not in self._images:
            self._images[key] = images.usual_image(self._account, key[0], offer.accelerator)
        return self._images[key]

    def _reserved(self, request: Request, named: str) -> list[Offer]:
        held = self.reservation = reserved(self._account, named)
        held.check(request)
        found = self._catalogue.offers(
            replace(request, allocation="on-demand", max_hourly_cost=None),
            instance_type=held.instance_type,
        )
        if not found:
            raise ConfigurationError(
                f"AWS(reservation={held.id!r}): it is for {held.instance_type}, which is not what "
                "this pool asks for; leave accelerator, vcpus and memory_gb out, or name another "
                "reservation"
            )
        offer = replace(found[0], zone=held.zone)
        # A block was paid for when it was bought.
        return [replace(offer, hourly_cost=0.0) if held.is_block else offer]

    def _equipped(self, offers: list[Offer]) -> list[Offer]:
        """The offers that have what the settings need of the type itself."""
        settings = self._settings
        if settings.efa and offers:
            found = [each for each in offers if self.kind(each.instance_type).efa_interfaces]
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
                if strategy in self.kind(each.instance_type).placement_strategies
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
        return images.given_image(self._account, ami) if ami is not None else None

    def _check_architecture(self, image: MachineImage, kind: InstanceType) -> None:
        if image.architecture not in kind.architectures:
            raise ConfigurationError(
                f"AWS(ami={image.id!r}): that AMI is for {image.architecture}, and {kind.name} is "
                f"{' or '.join(kind.architectures)}; name an AMI for it, or leave ami out"
            )
