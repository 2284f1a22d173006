"""Requests to the node of a torch device: sends calls, and handles the node's refusals."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from skyward.errors import StoreError
from skyward.functions import Pending
from skyward.store.places.files import Files
from skyward.store.places.opening import Address

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_log = logging.getLogger("skyward.store")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node's answer if it cannot reach the store or the memory that a request names."""

    what: str
    """What the node cannot reach: "store", or "memory" of its own device."""
    why: str


class NodeRequests:
    """Sends calls to the node of a sky device until the node refuses one."""

    def __init__(self, address: Address, files: Files, device: torch.device) -> None:
        import torch

        # Imported here: a process that only saves to a folder needs no pool.
        from skyward.compute.home import home_of

        self._address = address
        self._url = files.url
        # "sky" alone means the current device; a device that is gone raises here.
        self.device = torch.empty(0, device=device).device
        self._home = home_of(self.device)

    @property
    def possible(self) -> bool:
        """Whether the device has a node that has not refused yet."""
        return self._home is not None

    def run(self, pending: Pending[T]) -> T | Refusal:
        """Run a call on the node; after a refusal the client has to do the work."""
        if self._home is None:
            return Refusal("store", "the device belongs to no open pool")
        outcome = self._home.run(pending)
        if isinstance(outcome, Refusal):
            self._note_refusal(outcome)
        return outcome

    def export(self, storages: list[torch.UntypedStorage]) -> list[bytes] | None:
        """Descriptions by which other processes of the node open storages; None if they cannot.

        Waits for everything that was issued on the device before.
        """
        from skyward.device.core import core

        pointers = [storage.data_ptr() for storage in storages]
        descriptions = core().export(self.device.index, pointers)
        if all(descriptions):
            return descriptions
        self._note_refusal(Refusal("memory", "it is of a kind that cannot be shared"))
        return None

    def _note_refusal(self, refusal: Refusal) -> None:
        """Send no more requests; warn that the client does the work, or raise if it should not."""
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
