"""Values and exceptions that cannot travel, or only just: a clear error at once, never a hang."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky

from ..conftest import PATIENCE


class Socketful:
    """Holds what no process can hand to another."""

    def __init__(self) -> None:
        self.name = "plain"
        self.connection = threading.Lock()


class TwoWords(Exception):
    """Its arguments are not those its `__init__` wants back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Holding(Exception):
    """Carries a live lock."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Unspeakable(Exception):
    """Cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Rejected(ValueError):
    """An ordinary exception with attributes of its own."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message, code)
        self.code = code


@sky.function
def identity(value: Any, *rest: Any, option: Any = None) -> Any:
    return value


@sky.function
def works() -> str:
    return "it does"


# Arguments.


def test_an_unpicklable_argument_is_named_by_parameter(pool: sky.Compute) -> None:
    with pytest.raises(sky.errors.SerializationError) as caught:
        identity(threading.Lock()) >> pool
    message = str(caught.value)
    assert "argument 'value' of identity cannot be sent" in message
    assert "_thread.lock" in message
    assert "pass plain data instead, or make it inside the function" in message
    assert isinstance(caught.value, TypeError)


def test_an_unpicklable_part_of_an_argument_is_named_by_its_path(pool: sky.Compute) -> None:
    config = {"model": {"layers": [1, Socketful()]}}
    with pytest.raises(sky.errors.SerializationError) as caught:
        identity(1, option=config) >> pool
    message = str(caught.value)
    assert "argument 'option' of identity at ['model']['layers'][1].connection" in message
    assert works() >> pool == "it does"


@pytest.mark.parametrize("way", ["run", "submit", "broadcast", "gather", "stream", "map"])
def test_an_unpicklable_argument_raises_at_once_whichever_way_it_is_sent(
    pool: sky.Compute, way: str
) -> None:
    bad = identity(threading.Lock())
    with pytest.raises(sky.errors.SerializationError, match="argument 'value' of identity"):
        match way:
            case "run":
                bad >> pool
            case "submit":
                pool.submit(bad)
            case "broadcast":
                bad @ pool
            case "gather":
                sky.gather(works(), bad) >> pool
            case "stream":
                list(sky.gather(works(), bad, stream=True) >> pool)
            case "map":
                list(pool.map(identity, [1, 2, threading.Lock(), 4]))
    assert works() @ pool == ["it does"] * 2


def test_an_unpicklable_closure_variable_is_named(pool: sky.Compute) -> None:
    guard = threading.Lock()

    @sky.function
    def guarded() -> None:
        with guard:
            pass

    with pytest.raises(
        sky.errors.SerializationError, match=r"closure variable 'guard' of .*guarded"
    ):
        guarded() >> pool


def test_an_object_that_cannot_be_put_is_refused_when_it_is_put() -> None:
    with pytest.raises(
        sky.errors.SerializationError, match=r"the value at \['lock'\] cannot be sent"
    ):
        sky.put({"lock": threading.Lock()})


def test_an_argument_whose_pickling_raises_carries_the_reason(pool: sky.Compute) -> None:
    class Moody:
        def __reduce__(self) -> Any:
            raise ValueError("not today")

    with pytest.raises(sky.errors.SerializationError, match="not today") as caught:
        identity([Moody()]) >> pool
    assert isinstance(caught.value.__cause__, ValueError)


# Results.


def test_an_unpicklable_result_is_named_and_the_pool_goes_on(pool: sky.Compute) -> None:
    @sky.function
    def leaky() -> Any:
        return {"weights": [1.0], "handles": [threading.Lock()]}

    with pytest.raises(sky.errors.SerializationError) as caught:
        leaky() >> pool
    message = str(caught.value)
    assert "the result of" in message
    assert "leaky at ['handles'][0] cannot be sent" in message
    assert "_thread.lock" in message
    assert any("on node" in note for note in caught.value.__notes__)
    assert works() @ pool == ["it does"] * 2


def test_an_unpicklable_item_of_a_generator_ends_the_stream_with_its_name(
    pool: sky.Compute,
) -> None:
    @sky.function
    def items() -> Iterator[Any]:
        yield 1
        yield threading.Lock()

    stream = iter(items() >> pool)
    assert next(stream) == 1
    with pytest.raises(
        sky.errors.SerializationError, match=r"an item of .*items cannot be sent: .*lock"
    ):
        next(stream)
    assert works() @ pool == ["it does"] * 2


def test_a_result_that_cannot_be_rebuilt_here_says_so(pool: sky.Compute) -> None:
    @sky.function
    def stranger() -> Any:
        import sys
        import types

        module = types.ModuleType("only_on_the_worker")

        class Thing:
            pass

        Thing.__module__, Thing.__qualname__ = "only_on_the_worker", "Thing"
        module.Thing = Thing  # type: ignore[attr-defined]
        sys.modules["only_on_the_worker"] = module
        return Thing()

    with pytest.raises(sky.RemoteError) as caught:
        stranger() >> pool
    message = str(caught.value)
    assert "the result of" in message
    assert "stranger on node" in message
    assert "No module named 'only_on_the_worker'" in message
    assert "return plain data, or install here what it is made of" in message
    assert works() @ pool == ["it does"] * 2


# Exceptions.


def test_an_exception_arrives_as_what_it_was(pool: sky.Compute) -> None:
    @sky.function
    def refuses() -> None:
        problem = Rejected("too large", code=413)
        problem.extra = {"limit": 10}  # type: ignore[attr-defined]
        problem.add_note("try a smaller one")
        raise problem

    with pytest.raises(Rejected) as caught:
        refuses() >> pool
    problem = caught.value
    assert type(problem) is Rejected
    assert problem.args == ("too large", 413)
    assert problem.code == 413
    assert problem.extra == {"limit": 10}  # type: ignore[attr-defined]
    assert problem.__notes__[0] == "try a smaller one"


def test_the_remote_traceback_comes_with_source_lines_node_and_task(pool: sky.Compute) -> None:
    @sky.function
    def outer() -> None:
        def inner() -> None:
            raise Rejected("deep inside")

        inner()

    with pytest.raises(Rejected) as caught:
        pool.run(outer(), on=1)
    note = "\n".join(caught.value.__notes__)
    assert "outer on node 1; remote traceback:" in note
    assert 'raise Rejected("deep inside")' in note
    assert "inner()" in note
    assert "test_values.py" in note
    assert "Rejected: ('deep inside', 0)" in note
    # What a user sees in the end, without our own worker's frames.
    shown = "".join(traceback.format_exception(caught.value))
    assert 'raise Rejected("deep inside")' in shown
    assert "executor.py" not in shown


def test_the_chain_of_causes_arrives(pool: sky.Compute) -> None:
    @sky.function
    def chained() -> None:
        try:
            try:
                raise KeyError("first")
            except KeyError as first:
                raise Rejected("second", code=2) from first
        except Rejected as second:
            raise RuntimeError("third") from second

    with pytest.raises(RuntimeError, match="third") as caught:
        chained() >> pool
    second = caught.value.__cause__
    assert isinstance(second, Rejected)
    assert second.code == 2
    assert isinstance(second.__cause__, KeyError)
    assert second.__cause__.args == ("first",)


def test_a_cause_says_where_it_was_raised(pool: sky.Compute) -> None:
    @sky.function
    def reads(settings: dict[str, int]) -> None:
        try:
            settings["learning rate"]
        except KeyError as problem:
            raise RuntimeError("the settings are incomplete") from problem

    with pytest.raises(RuntimeError) as caught:
        reads({}) >> pool
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    (note,) = cause.__notes__
    assert re.fullmatch(
        r'remote traceback:\n  File ".*test_values\.py", line \d+, in reads\n'
        r'    settings\["learning rate"\]',
        note,
    )


def test_an_implicit_context_arrives_and_from_none_hides_it(pool: sky.Compute) -> None:
    @sky.function
    def during(hide: bool) -> None:
        try:
            raise KeyError("first")
        except KeyError:
            if hide:
                raise RuntimeError("second") from None
            raise RuntimeError("second")  # noqa: B904

    with pytest.raises(RuntimeError) as shown:
        during(False) >> pool
    assert isinstance(shown.value.__context__, KeyError)
    assert not shown.value.__suppress_context__
    with pytest.raises(RuntimeError) as hidden:
        during(True) >> pool
    assert hidden.value.__suppress_context__


def test_an_exception_whose_class_takes_other_arguments_arrives_as_itself(
    pool: sky.Compute,
) -> None:
    @sky.function
    def broken() -> None:
        raise TwoWords("hello", "there")

    with pytest.raises(TwoWords, match="hello there") as caught:
        broken() >> pool
    assert any("broken on node" in note for note in caught.value.__notes__)
    assert any('raise TwoWords("hello", "there")' in note for note in caught.value.__notes__)


def test_an_unpicklable_exception_arrives_as_remote_error(pool: sky.Compute) -> None:
    @sky.function
    def holding() -> None:
        raise Holding("still held")

    with pytest.raises(sky.RemoteError) as caught:
        holding() >> pool
    assert caught.value.type_name.endswith("Holding")
    assert "Holding: still held" in str(caught.value)
    assert 'raise Holding("still held")' in caught.value.remote_traceback
    assert works() @ pool == ["it does"] * 2


def test_a_cause_that_cannot_travel_does_not_take_the_exception_with_it(
    pool: sky.Compute,
) -> None:
    @sky.function
    def wrapped() -> None:
        try:
            try:
                raise KeyError("root")
            except KeyError as root:
                raise Holding("bad cause") from root
        except Exception as problem:
            raise Rejected("wrapped", code=7) from problem

    with pytest.raises(Rejected, match="wrapped") as caught:
        wrapped() >> pool
    assert caught.value.code == 7
    cause = caught.value.__cause__
    assert isinstance(cause, sky.RemoteError)
    assert cause.type_name == "Holding"
    assert "Holding: bad cause" in str(cause)
    assert isinstance(cause.__cause__, KeyError)


def test_a_long_chain_of_causes_costs_no_more_than_its_length(pool: sky.Compute) -> None:
    @sky.function
    def chain(length: int) -> None:
        problem: Exception | None = None
        for number in range(length):
            try:
                try:
                    if problem is not None:
                        raise problem
                    raise KeyError(number)
                except Exception as before:
                    raise Rejected(f"level {number}", code=number) from before
            except Rejected as raised:
                problem = raised
        assert problem is not None
        raise problem

    with pytest.raises(Rejected) as caught:
        chain(200) >> pool
    depth, problem = 0, caught.value
    while problem.__cause__ is not None:
        depth, problem = depth + 1, problem.__cause__
    assert depth >= 4


def test_an_exception_that_cannot_be_shown_still_arrives(pool: sky.Compute) -> None:
    @sky.function
    def mute() -> None:
        raise Unspeakable

    with pytest.raises(Unspeakable) as caught:
        mute() >> pool
    assert any("its str() failed: RuntimeError" in note for note in caught.value.__notes__)


def test_a_base_exception_of_the_users_own_arrives_as_remote_error(pool: sky.Compute) -> None:
    @sky.function
    def interrupts() -> None:
        raise KeyboardInterrupt("by itself")

    with pytest.raises(sky.RemoteError, match="KeyboardInterrupt: by itself") as caught:
        interrupts() >> pool
    assert caught.value.type_name == "KeyboardInterrupt"
    assert works() @ pool == ["it does"] * 2


def test_a_remote_error_survives_pickling(pool: sky.Compute) -> None:
    import pickle

    @sky.function
    def broken() -> None:
        raise Holding("still held")

    with pytest.raises(sky.RemoteError) as caught:
        broken() >> pool
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.type_name == caught.value.type_name
    assert again.remote_traceback == caught.value.remote_traceback


def test_a_generators_exception_reaches_the_caller(pool: sky.Compute) -> None:
    @sky.function
    def half() -> Iterator[int]:
        yield 1
        raise Rejected("half way", code=5)

    stream = iter(half() >> pool)
    assert next(stream) == 1
    with pytest.raises(Rejected, match="half way") as caught:
        next(stream)
    assert caught.value.code == 5


def test_a_calls_own_stop_iteration_ends_no_iteration_and_is_not_lost(pool: sky.Compute) -> None:
    @sky.function
    def stops(number: int) -> int:
        if number == 2:
            raise StopIteration("my own")
        return number

    async def awaits() -> None:
        await (stops(2) > pool)

    for action in (
        lambda: list(pool.map(stops, range(5))),
        lambda: list(pool.map(stops, range(5), ordered=False)),
        lambda: list(sky.gather(*map(stops, range(5)), stream=True) >> pool),
        lambda: asyncio.run(asyncio.wait_for(awaits(), 10)),
        lambda: (stops(2) > pool).result(PATIENCE),
    ):
        with pytest.raises(RuntimeError, match="the call raised StopIteration") as caught:
            action()
        assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(StopIteration, match="my own"):
        stops(2) >> pool


# Code.


def test_an_undefined_global_is_refused_before_anything_is_sent(pool: sky.Compute) -> None:
    @sky.function
    def forgetful() -> Any:
        return never_defined + 1  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(sky.errors.SerializationError) as caught:
        forgetful() >> pool
    message = str(caught.value)
    assert "forgetful uses 'never_defined', which is not defined in" in message
    line = forgetful.body.__code__.co_firstlineno + 2
    assert f"test_values.py:{line}" in message
    assert "define or import it before the call" in message


@pytest.fixture
def vanished(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that is loaded here and cannot be imported anywhere."""
    module = types.ModuleType("vanished_module")
    exec("def helper():\n    return 1\n", vars(module))
    monkeypatch.setitem(sys.modules, "vanished_module", module)
    return module


def test_a_module_missing_on_the_worker_is_named_with_what_to_do(
    pool: sky.Compute, vanished: types.ModuleType
) -> None:
    @sky.function
    def uses(helper: Any) -> Any:
        return helper()

    with pytest.raises(ModuleNotFoundError) as caught:
        uses(vanished.helper) >> pool
    assert caught.value.name == "vanished_module"
    notes = "\n".join(caught.value.__notes__)
    assert "the module 'vanished_module' is missing on node" in notes
    assert "sky.Image(pip=['vanished_module'])" in notes
    assert works() @ pool == ["it does"] * 2


def test_a_module_the_function_refers_to_and_the_worker_lacks_is_named(
    pool: sky.Compute, vanished: types.ModuleType
) -> None:
    @sky.function
    def uses() -> Any:
        return vanished.helper()

    with pytest.raises(ModuleNotFoundError) as caught:
        uses() >> pool
    assert "the module 'vanished_module' is missing on node" in "\n".join(caught.value.__notes__)
    # The code's failure must not have been cached as something else.
    with pytest.raises(ModuleNotFoundError, match="vanished_module"):
        uses() >> pool


def test_a_missing_import_inside_the_function_is_named_with_what_to_do(pool: sky.Compute) -> None:
    @sky.function
    def imports() -> None:
        import no_such_package_at_all  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all") as caught:
        imports() >> pool
    notes = "\n".join(caught.value.__notes__)
    assert "import no_such_package_at_all" in notes
    assert "sky.Image(pip=['no_such_package_at_all'])" in notes
