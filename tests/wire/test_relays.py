"""How large buffers go to many executors: who fetches from whom, also after losses."""

from __future__ import annotations

from collections import Counter

import pytest

from skyward.calls import relays
from skyward.calls.relays import BRANCHES, CHAIN, Neighbor, Relays

DIGEST = b"digest"


class Plan:
    """The executors of a broadcast, and whom each of them fetches from."""

    def __init__(self, count: int) -> None:
        self.relays = Relays()
        self.executors = [Neighbor(f"tcp:10.0.0.1:{number}") for number in range(count)]
        self.sources: dict[Neighbor, Neighbor | None] = {}
        self.numbers: dict[Neighbor, int] = {}
        for each in self.executors:
            self.give(each)

    def give(self, executor: Neighbor) -> None:
        self._note(executor, self.relays.give(executor, [DIGEST], fetch=True))

    def again(self, executor: Neighbor) -> None:
        """The executor reports that its source did not send it."""
        missed = self.relays.miss(executor, [DIGEST])
        self._note(executor, self.relays.again(executor, missed) if missed else None)

    def _note(self, executor: Neighbor, given: tuple[Neighbor, int] | None) -> None:
        self.sources[executor], self.numbers[executor] = given or (None, 0)

    def lose(self, executor: Neighbor) -> list[Neighbor]:
        """Lose an executor; returns those that fetched from it."""
        executor.connected = False
        self.relays.take(executor, [DIGEST])
        self.sources.pop(executor)
        return [each for each, source in self.sources.items() if source is executor]

    def depth(self, executor: Neighbor) -> int:
        source = self.sources[executor]
        return 0 if source is None else 1 + self.depth(source)

    @property
    def roots(self) -> int:
        """How often the client has sent it to an executor that is still there."""
        return sum(source is None for source in self.sources.values())

    @property
    def widest(self) -> int:
        """To how many an executor passes it on at most."""
        passed = Counter(source for source in self.sources.values() if source is not None)
        return max(passed.values())


@pytest.mark.parametrize("count", [2, 4, CHAIN])
def test_few_executors_form_a_chain(count: int) -> None:
    plan = Plan(count)
    assert plan.widest == 1
    assert plan.depth(plan.executors[-1]) == count - 1


def test_many_form_a_tree_that_is_not_deep() -> None:
    plan = Plan(1000)
    assert plan.roots == 1
    assert plan.widest == BRANCHES
    assert max(map(plan.depth, plan.executors)) <= 13


def test_finding_a_source_takes_as_long_for_many_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, looks = Plan(1000), []
    can_pass_on = relays._can_pass_on
    monkeypatch.setattr(
        relays, "_can_pass_on", lambda *given: looks.append(1) or can_pass_on(*given)
    )
    for number in range(100):
        plan.give(Neighbor(f"tcp:10.0.0.2:{number}"))
    assert len(looks) <= 200


def test_who_loses_its_source_is_told_another() -> None:
    plan = Plan(1000)
    lost = plan.executors[5::10]
    orphans = [each for gone in lost for each in plan.lose(gone) if each not in lost]
    assert len(orphans) >= 100
    for each in orphans:
        plan.again(each)
    assert plan.roots == 1
    assert not any(source in lost for source in plan.sources.values())
    # A number lower than one's own: nobody waits for itself.
    for each, source in plan.sources.items():
        assert source is None or plan.numbers[source] < plan.numbers[each]


def test_the_number_stays_so_that_those_behind_go_on_waiting() -> None:
    plan = Plan(4)
    third = plan.executors[2]
    before = plan.numbers[third]
    plan.lose(plan.executors[1])
    plan.again(third)
    assert plan.sources[third] is plan.executors[0]
    assert plan.numbers[third] == before


def test_without_another_source_the_client_sends_it() -> None:
    plan = Plan(3)
    first, second, third = plan.executors
    plan.lose(first)
    plan.again(second)
    assert plan.sources[second] is None
    plan.again(third)
    assert plan.sources[third] is None


def test_after_three_sources_the_client_sends_it() -> None:
    plan = Plan(8)
    last = plan.executors[-1]
    told = []
    while plan.sources[last] is not None:
        told.append(plan.sources[last])
        plan.again(last)
    assert len(told) == len(set(map(id, told))) == 3


def test_a_source_that_has_it_again_from_one_behind_it_is_no_endless_way_up() -> None:
    plan = Plan(0)
    source, one, other = (Neighbor(f"tcp:10.0.0.1:{number}") for number in range(3))
    plan.give(source)
    plan.give(one)
    one.connected = False
    plan.give(other)
    one.connected = True
    assert plan.sources[one] is plan.sources[other] is source
    plan.relays.take(source, [DIGEST])
    plan.give(source)
    assert plan.sources[source] is other
    plan.again(one)
    assert plan.sources[one] is None
    assert plan.sources[source] is other


def test_who_is_told_another_source_passes_on_no_more_than_before() -> None:
    plan = Plan(CHAIN + 40)
    for each in plan.executors[1:]:
        plan.again(each)
    copies = plan.relays._copies[DIGEST]
    waiting = [*copies.free, *copies.busy]
    assert len(waiting) == len(set(waiting)) == len(plan.executors)
    told = sum(copy.passed_on for copy in copies.held.values())
    assert told == len(plan.executors) - 1


def test_what_was_dropped_is_fetched_from_those_who_still_have_it() -> None:
    plan = Plan(20)
    for each in plan.executors[:-1]:
        plan.lose(each)
    new = Neighbor("tcp:10.0.0.3:1")
    plan.give(new)
    assert plan.sources[new] is plan.executors[-1]


def test_executors_that_nobody_can_reach_pass_nothing_on() -> None:
    plan = Plan(0)
    plan.executors = [Neighbor() for _ in range(20)]
    for each in plan.executors:
        plan.give(each)
    assert plan.roots == 20
