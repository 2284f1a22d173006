"""Stopping and starting a pool, when the provider fails in the middle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward import compute
from skyward.closing import Closing
from skyward.nodes.cleanup import Cleaned, halt
from skyward.providers import Allocation, Capabilities

RECORD = SimpleNamespace(id="p1", name="train", stopped=True, provider="shop", ending=[])


class Shop:
    """A provider that can stop machines, and does not know its prices now."""

    capabilities = Capabilities(stops=True)

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def allocate(self, pool: str) -> Allocation[Any]:
        return Allocation(self, pool)

    async def find(self, pool: str) -> list[Any]:
        return [SimpleNamespace(id="m1", node=0, address="a", ended=True)]

    async def check_stop(self, pool: str) -> None:
        raise sky.errors.PoolError("the shop is closed")

    async def stop(self, pool: str) -> float | None:
        self.stopped.append(pool)
        return None


def start(monkeypatch: pytest.MonkeyPatch, journalled: object) -> sky.errors.PoolError:
    """The error of a start that fails, when its machines cannot be stopped again either."""

    def again(record: object) -> object:
        class Failing:
            def __enter__(self) -> None:
                raise sky.errors.PoolError("no machine came up")

            def __exit__(self, *_: object) -> None: ...

        return Failing()

    cleaned = Cleaned("p1", "train", (), ("m1: the provider refused",))
    monkeypatch.setattr(compute.records, "read", lambda name: RECORD)
    monkeypatch.setattr(compute.records, "names", lambda: ["train"])
    monkeypatch.setattr(compute, "provider_of", lambda record: Shop())
    monkeypatch.setattr(compute.Compute, "_again", again)
    monkeypatch.setattr(compute, "Journal", lambda: None)
    monkeypatch.setattr(compute, "recorded_pools", lambda journal: journalled)
    monkeypatch.setattr(compute, "halt", lambda *_: cleaned)
    with pytest.raises(sky.errors.PoolError, match="no machine came up") as caught:
        compute.start_pool("train")
    return caught.value


def test_a_start_that_fails_says_which_machines_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = start(monkeypatch, [("journalled", RECORD)])
    assert problem.__notes__ == [
        "machines of train may be running still: m1: the provider refused; `sky down train` "
        "removes them"
    ]


def test_a_start_that_fails_says_why_without_a_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(start(monkeypatch, []), "__notes__")


def test_a_provider_that_does_not_stop_a_pool_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    running = SimpleNamespace(**{**vars(RECORD), "stopped": False})
    monkeypatch.setattr(compute.records, "read", lambda name: running)
    monkeypatch.setattr(compute, "provider_of", lambda record: Shop())
    with pytest.raises(sky.errors.PoolError) as caught:
        compute.stop_pool("train", force=False)
    assert str(caught.value) == (
        "train: the shop is closed; `sky down train` ends it, `sky up train` makes it anew"
    )


def test_a_pool_is_recorded_as_stopped_if_its_price_is_unknown() -> None:
    told: list[tuple[object, ...]] = []
    journal: Any = SimpleNamespace(
        gone=lambda *what: told.append(("gone", *what)),
        intend=lambda *what: told.append(("intend", *what)),
        made=lambda *what: told.append(("made", *what)),
    )
    pool: Any = SimpleNamespace(id="p1", name="train", machines=())
    provider: Any = Shop()
    assert halt(journal, pool, provider) == Cleaned("p1", "train", ("m1",), ())
    assert provider.stopped == ["p1"]
    assert told == [("gone", "p1", 0), ("intend", "p1", 0), ("made", "p1", 0, "m1", "a", None)]


def test_what_has_found_the_machines_of_a_pool_that_cannot_be_read_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reached(Closing):
        record, given_out, closed = RECORD, False, False

        def adoption(self) -> None:
            self.given_out = True

        def close(self) -> None:
            self.closed = True

    def again(record: object) -> None:
        raise sky.errors.PoolError("a plugin of it is not there")

    reached = Reached()
    monkeypatch.setattr(compute, "reach", lambda name, forget: reached)
    monkeypatch.setattr(compute.Compute, "_again", again)
    with pytest.raises(sky.errors.PoolError, match="a plugin of it is not there"):
        sky.attach("train")
    assert (reached.given_out, reached.closed) == (False, True)
