"""The ledger: what the machines of a pool cost, from when each was made to when it is gone."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skyward.console.measures import duration
from skyward.providers import Offer, money


@dataclass(slots=True, eq=False)
class Charge:
    """One machine in the ledger."""

    what: str
    """The type of the machine, and how it was bought; empty if it was not bought."""
    hourly_cost: float | None
    began: float
    ended: float | None = None


class Ledger:
    """Counts what machines cost; any thread may write."""

    def __init__(
        self, price: Callable[[], float | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`price` returns the price of a machine that was bought without an offer."""
        self._ask_price, self._clock = price, clock
        self._charges: list[Charge] = []
        self._lock = threading.Lock()

    @functools.cached_property
    def price(self) -> float | None:
        """The price of a machine without an offer; may ask the provider, once."""
        return self._ask_price()

    def begin(self, offer: Offer | None) -> Charge:
        """Note that a machine was made; if its offer has no price, the price is unknown."""
        if offer is None:
            what, cost = "", self.price
        else:
            how = "spot" if offer.allocation == "spot" else "on demand"
            what, cost = f"{offer.instance_type} {how}", offer.hourly_cost
        charge = Charge(what, cost, self._clock())
        with self._lock:
            self._charges.append(charge)
        return charge

    def end(self, charge: Charge) -> None:
        """Note that a machine is gone."""
        if charge.ended is None:
            charge.ended = self._clock()

    @property
    def cost(self) -> float | None:
        """What the machines have cost so far, in US dollars; None if a price is unknown."""
        return _sum(self._cost_of(charge) for charge in self._all())

    @property
    def hourly_cost(self) -> float | None:
        """What the machines that are there cost in an hour; None if a price is unknown."""
        return _sum(charge.hourly_cost for charge in self._all() if charge.ended is None)

    def receipt(self) -> str:
        """What was bought, for how long, and the cost; empty for machines that cost nothing.

        >>> Ledger(lambda: None).receipt()
        ''
        """
        charges = [charge for charge in self._all() if charge.what or charge.hourly_cost]
        if not charges:
            return ""
        known = [cost for charge in charges if (cost := self._cost_of(charge)) is not None]
        total = money(sum(known)) if known else "unknown"
        if 0 < len(known) < len(charges):
            total = f"at least {total}"
        kinds = dict.fromkeys(charge.what for charge in charges)
        bought = [self._line([e for e in charges if e.what == what]) for what in kinds]
        return f"cost {total}: {', '.join(bought)}"

    def _line(self, charges: list[Charge]) -> str:
        total = duration(sum(self._seconds(charge) for charge in charges))
        spans = total if len(charges) == 1 else f"{total} in all"
        what = charges[0].what or ("machine" if len(charges) == 1 else "machines")
        count = f"{len(charges)} x " if charges[0].what else f"{len(charges)} "
        return f"{count}{what} for {spans}"

    def _all(self) -> list[Charge]:
        with self._lock:
            return list(self._charges)

    def _seconds(self, charge: Charge) -> float:
        return (self._clock() if charge.ended is None else charge.ended) - charge.began

    def _cost_of(self, charge: Charge) -> float | None:
        if charge.hourly_cost is None:
            return None
        return charge.hourly_cost * self._seconds(charge) / 3600


def _sum(costs: Iterable[float | None]) -> float | None:
    known: list[float] = []
    for cost in costs:
        if cost is None:
            return None
        known.append(cost)
    return sum(known, 0.0)
