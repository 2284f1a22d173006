"""Errands: what the node of a torch device does for a store, and what if it cannot reach it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from skyward.errors import StoreError
from skyward.functions import Pending
from skyward.store.files import Address, Files

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_log = logging.getLogger("skyward.store")


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a node cannot reach, and why."""

    what: str
    """"store", or the "memory" of its own device."""
    why: str


class Errands:
    """Sends calls to the node of a sky device, until it is clear that the node is no help."""

    def __init__(self, address: Address, files: Files, device: torch.device) -> None:
        import torch

        from skyward.compute import home_of

        self._address = address
        self._url = files.url
        # "sky" alone is the current device; and one that is gone says so here.
        self.device = torch.empty(0, device=device).device
        self._home = home_of(self.device)

    @property
    def possible(self) -> bool:
        """Whether there is a node to ask that has not refused."""
        return self._home is not None

    def run(self, pending: Pending[T]) -> T | Refusal:
        """Run a call on the node; a refusal means that its work has to be done here."""
        if self._home is None:
            return Refusal("store", "the device belongs to no open pool")
        outcome = self._home.run(pending)
        if isinstance(outcome, Refusal):
            self._give_up(outcome)
        return outcome

    def export(self, storages: list[torch.UntypedStorage]) -> list[bytes] | None:
        """How other processes of the node open these storages; None if they cannot.

        Waits for everything that was issued on the device before.
        """
        from skyward.device.core import core

        pointers = [storage.data_ptr() for storage in storages]
        descriptions = core().export(self.device.index, pointers)
        if all(descriptions):
            return descriptions
        self._give_up(Refusal("memory", "it is of a kind that cannot be shared"))
        return None

    def _give_up(self, refusal: Refusal) -> None:
        """Say what is done instead, or raise where that is not what anyone would expect."""
        node, self._home = self._home, None
        if refusal.what == "memory":
            _log.warning(
                "a second process of %s cannot open its device's memory (%s); "
                "the bytes of the model go through this machine",
                node,
                refusal.why,
            )
        elif self._address.of_one_machine:
            _log.warning(
                "%s does not see the store %s (%s); the bytes of the model go through this "
                "machine: keep the store where both can reach it to spare that",
                node,
                self._url,
                refusal.why,
            )
        else:
            raise StoreError(
                f"{node} cannot use {self._url}, though this machine can: {refusal.why}; give the "
                "node what it needs with sky.Image(pip=[...], env={...}), because credentials of "
                "this machine are not passed on, or go through device='cpu' and .to(device)"
            )
