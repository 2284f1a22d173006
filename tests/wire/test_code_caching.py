"""Function code is encoded once while nothing it refers to changes, and never stale."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest

import skyward as sky
from skyward.functions import Function
from skyward.objects.encoding import Code

Change = Callable[[], object]
Case = Callable[[pytest.MonkeyPatch], tuple[Callable[..., Any], Change]]

number = 1
numbers = [1]
nested = (1, [1])
settings = types.SimpleNamespace(rate=1)
counted = numbers.count


class Forgiving(dict[str, int]):
    """Has every attribute, even those that only we look for."""

    __getattr__ = dict.get


forgiving = Forgiving(rate=1)


class Label(str):
    suffix = ""


label = Label("x")


class Base:
    inherited = 1


class Model(Base):
    rate = 1

    def predict(self) -> int:
        return 1

    @property
    def shown(self) -> int:
        return helper()

    @staticmethod
    def fixed() -> int:
        return 1


def helper() -> int:
    return 1


def other_helper() -> int:
    return 2


@sky.function
def first_call() -> int:
    return helper()


@sky.function
def second_call() -> int:
    return other_helper()


def rebound_global(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return number

    return function, lambda: patch.setitem(globals(), "number", 2)


def mutated_list(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    patch.setitem(globals(), "numbers", [1])

    def function() -> int:
        return sum(numbers)

    return function, lambda: numbers.append(1)


def list_in_a_tuple(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    patch.setitem(globals(), "nested", (1, [0]))

    def function() -> int:
        return nested[0] + len(nested[1])  # type: ignore[arg-type]

    return function, lambda: nested[1].clear()  # type: ignore[attr-defined]


def namespace_attribute(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return int(settings.rate)

    return function, lambda: patch.setattr(settings, "rate", 2)


def dict_with_every_attribute(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return forgiving["rate"]

    return function, lambda: patch.setitem(forgiving, "rate", 2)


def attribute_of_a_string(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> str:
        return label + getattr(label, "suffix", "")

    return function, lambda: patch.setattr(label, "suffix", "y", raising=False)


def bound_method_of_a_list(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    held = [1]
    patch.setitem(globals(), "counted", held.count)

    def function() -> int:
        return counted(1)

    return function, lambda: held.append(1)


def generator_state(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    draw = random.Random(1).random

    def function() -> float:
        return draw()

    return function, draw


def changed_default(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function(x: int = 1) -> int:
        return x

    return function, lambda: setattr(function, "__defaults__", (2,))


def changed_keyword_default(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function(*, x: int = 1) -> int:
        return x

    return function, lambda: function.__kwdefaults__.update(x=2)


def mutable_default(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function(x: list[int] = [1]) -> int:  # noqa: B006
        return len(x)

    return function, lambda: function.__defaults__[0].append(1)  # type: ignore[index]


def changed_closure(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    held = 1

    def function() -> int:
        return held

    def change() -> None:
        nonlocal held
        held = 2

    return function, change


def filled_closure(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        try:
            return held
        except NameError:
            return 0

    def change() -> None:
        nonlocal held
        held = 2

    if patch is None:
        held = 1
    return function, change


def emptied_closure(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    held = 1

    def function() -> int:
        try:
            return held
        except NameError:
            return 0

    def change() -> None:
        nonlocal held
        del held

    return function, change


def function_in_a_closure(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    @functools.wraps(helper)
    def function() -> int:
        return helper() + 1

    return function, lambda: patch.setitem(globals(), "helper", other_helper)


def attribute_of_a_function(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return getattr(helper, "rate", 0)

    return function, lambda: patch.setattr(helper, "rate", 2, raising=False)


def code_of_a_helper(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return helper()

    return function, lambda: patch.setattr(helper, "__code__", other_helper.__code__)


def class_attribute(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return Model.rate

    return function, lambda: patch.setattr(Model, "rate", 2)


def new_class_attribute(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return getattr(Model, "extra", 0)

    return function, lambda: patch.setattr(Model, "extra", 2, raising=False)


def inherited_attribute(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return Model.inherited

    return function, lambda: patch.setattr(Base, "inherited", 2)


def patched_method(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return Model().predict()

    return function, lambda: patch.setattr(Model, "predict", lambda self: 2)


def patched_static_method(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return Model.fixed()

    return function, lambda: patch.setattr(Model, "fixed", staticmethod(other_helper))


def helper_of_a_property(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return Model().shown

    return function, lambda: patch.setitem(globals(), "helper", other_helper)


def second_of_two_sky_functions(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return first_call.local() + second_call.local()

    return function, lambda: patch.setitem(globals(), "other_helper", lambda: 20)


def shadowed_builtin(patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Change]:
    def function() -> int:
        return abs(-1)

    return function, lambda: patch.setitem(globals(), "abs", lambda x: x)


CASES: list[Case] = [
    rebound_global,
    mutated_list,
    list_in_a_tuple,
    namespace_attribute,
    dict_with_every_attribute,
    attribute_of_a_string,
    bound_method_of_a_list,
    generator_state,
    changed_default,
    changed_keyword_default,
    mutable_default,
    changed_closure,
    filled_closure,
    emptied_closure,
    function_in_a_closure,
    attribute_of_a_function,
    code_of_a_helper,
    class_attribute,
    new_class_attribute,
    inherited_attribute,
    patched_method,
    patched_static_method,
    helper_of_a_property,
    second_of_two_sky_functions,
    shadowed_builtin,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_is_seen_by_the_next_call(
    case: Case, monkeypatch: pytest.MonkeyPatch, pool: sky.Compute
) -> None:
    body, change = case(monkeypatch)
    function = Function(body)
    before, code = function() >> pool, function.code()
    change()
    assert function() >> pool != before
    assert function.code().key != code.key


@pytest.mark.parametrize(
    "case",
    [
        rebound_global,
        changed_default,
        changed_closure,
        function_in_a_closure,
        class_attribute,
        helper_of_a_property,
        second_of_two_sky_functions,
    ],
    ids=lambda case: case.__name__,
)
def test_an_unchanged_function_is_not_encoded_again(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = Function(case(monkeypatch)[0])
    code = function.code()
    monkeypatch.setattr(Code, "of", lambda _: pytest.fail("it was encoded again"))
    assert function.code() is code


def test_each_of_many_functions_is_looked_at() -> None:
    def made(held: int) -> Callable[[], int]:
        return lambda: held

    bodies = [made(value) for value in range(20)]
    calls = tuple(Function(body) for body in bodies)

    def all_of_them() -> int:
        return sum(call.local() for call in calls)

    function = Function(all_of_them)
    for body in bodies:
        key = function.code().key
        body.__closure__[0].cell_contents = 99  # type: ignore[index]
        assert function.code().key != key


def test_what_may_have_changed_in_place_is_encoded_again_and_gets_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = Function(mutated_list(monkeypatch)[0])
    first, second = function.code(), function.code()
    assert first is not second
    assert first.key == second.key


def test_a_change_taken_back_has_the_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    body, change = rebound_global(monkeypatch)
    function = Function(body)
    key = function.code().key
    change()
    assert function.code().key != key
    monkeypatch.undo()
    assert function.code().key == key


def test_a_thousand_calls_send_the_code_once(pool: sky.Compute) -> None:
    padding = "x" * 50_000

    @sky.function
    def padded(x: int) -> int:
        return x + len(padding)

    before = pool.stats().bytes_sent
    assert sky.gather(*[padded(x) for x in range(1000)]) >> pool == [
        x + 50_000 for x in range(1000)
    ]
    assert pool.stats().bytes_sent - before < 500_000


def test_calls_across_a_change_each_see_their_own_time(pool: sky.Compute) -> None:
    rate = 0

    @sky.function
    def current() -> int:
        return rate

    futures = []
    for rate in range(20):  # noqa: B007
        futures.append(current() > pool)
    assert [future.result() for future in futures] == list(range(20))
