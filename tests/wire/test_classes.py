"""Classes: they travel by value, come back as what they were, and change nothing at home."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import skyward as sky


class Counter:
    """The client's class; workers get a definition of their own."""

    step = 1
    made: ClassVar[list[str]] = []

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def advance(self) -> Counter:
        self.value += self.step
        return self


class Doubling(Counter):
    def advance(self) -> Counter:
        self.value *= 2
        return super().advance()


class Mood(enum.Enum):
    CALM = "calm"
    LOUD = "loud"


@dataclass
class Report:
    counter: Counter
    mood: Mood


@sky.function
def advanced(counter: Counter) -> Counter:
    return counter.advance()


@sky.function
def reported(counter: Counter) -> Report:
    return Report(counter, Mood.LOUD)


@sky.function
def vandalized(counter: Counter) -> Counter:
    kind = type(counter)
    kind.step = 100
    kind.added = "on the worker"  # type: ignore[attr-defined]
    kind.made.append("on the worker")
    del kind.advance
    return counter


@pytest.fixture
def untouched() -> Iterator[None]:
    """The client's classes are, attribute by attribute, the objects they were."""

    def attributes(kind: type) -> dict[str, Any]:
        # Left by pickle itself on every class it meets.
        return {name: value for name, value in vars(kind).items() if name != "__slotnames__"}

    before = {kind: attributes(kind) for kind in (Counter, Doubling, Mood, Report)}
    yield
    for kind, were in before.items():
        assert attributes(kind).keys() == were.keys()
        assert all(vars(kind)[name] is value for name, value in were.items())
    assert Counter.made == []


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("kind", [Counter, Doubling])
def test_an_instance_comes_back_as_the_clients_own_class(
    pool: sky.Compute, kind: type[Counter]
) -> None:
    got = advanced(kind(5)) >> pool
    assert type(got) is kind
    assert got.value == {Counter: 6, Doubling: 11}[kind]
    assert got.advance() is got


@pytest.mark.usefixtures("untouched")
def test_instances_made_on_the_worker_are_of_the_clients_classes(pool: sky.Compute) -> None:
    got = reported(Doubling(1)) >> pool
    assert type(got) is Report
    assert type(got.counter) is Doubling
    assert got.mood is Mood.LOUD


@pytest.mark.usefixtures("untouched")
def test_what_a_worker_does_to_its_copy_of_a_class_stays_there(pool: sky.Compute) -> None:
    got = pool.run(vandalized(Counter(1)), on=0)
    assert type(got) is Counter
    assert got.advance().value == 2


def test_a_class_changed_at_home_is_changed_in_the_next_call(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (advanced(Counter(1)) >> pool).value == 2
    monkeypatch.setattr(Counter, "step", 10)
    assert [c.value for c in advanced(Counter(1)) @ pool] == [11, 11]

    def backwards(self: Counter) -> Counter:
        self.value -= 1
        return self

    monkeypatch.setattr(Counter, "advance", backwards)
    assert [c.value for c in advanced(Counter(1)) @ pool] == [0, 0]


def test_a_class_of_the_workers_own_keeps_its_identity_over_calls(pool: sky.Compute) -> None:
    @sky.function
    def make() -> Any:
        import builtins

        if not hasattr(builtins, "_Made"):

            class Made:
                def tell(self) -> str:
                    return "made"

            builtins._Made = Made  # type: ignore[attr-defined]
        return builtins._Made()  # type: ignore[attr-defined]

    @sky.function
    def recognised(value: Any) -> bool:
        import builtins

        return isinstance(value, builtins._Made)  # type: ignore[attr-defined]

    first, second = (pool.run(make(), on=0) for _ in range(2))
    assert type(first) is type(second)
    assert first.tell() == "made"
    assert pool.run(recognised(first), on=0)


def test_classes_of_installed_packages_travel_by_name(pool: sky.Compute) -> None:
    from collections import OrderedDict
    from fractions import Fraction

    @sky.function
    def names(*kinds: type) -> list[bool]:
        import collections
        import fractions

        return [kinds[0] is collections.OrderedDict, kinds[1] is fractions.Fraction]

    assert names(OrderedDict, Fraction) >> pool == [True, True]
