"""Objects of `@sky.cls` classes: they live in a worker, and their methods run there."""

from __future__ import annotations

import copy
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from skyward import instances

from .conftest import Eventually, Sharing


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[sky.Compute]:
    """Two nodes with two processes each, shared by the tests of this module."""
    worker = sky.Worker(concurrency=2)
    options = sky.Options(console=False)
    with sharing(sky.Compute(nodes=2, worker=worker, options=options)) as compute:
        yield compute


class Base:
    """What a class may inherit."""

    def inherited(self) -> str:
        return "inherited"


@sky.cls
class Model(Base):
    """Counts its calls, so that one can see that it stays."""

    shared = "a class attribute"

    def __init__(self, path: str, *, scale: int = 1) -> None:
        self.path, self.scale, self.calls = path, scale, 0

    def predict(self, x: int) -> tuple[int, int]:
        """The result, and how often this object was asked."""
        self.calls += 1
        return self.scale * x, self.calls

    def place(self) -> tuple[int, int]:
        return sky.instance_info().node, os.getpid()

    def counts(self, count: int) -> Iterator[int]:
        yield from range(count)

    def total(self, numbers: Iterator[int]) -> int:
        return sum(numbers)

    async def later(self) -> str:
        return self.path

    @sky.function(timeout=200)
    def marked(self, x: int) -> int:
        return x + self.scale

    @staticmethod
    def static(x: int) -> int:
        return -x

    @property
    def size(self) -> int:
        return 1

    def fails(self) -> None:
        raise LookupError("as a function's")

    def dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, x: int) -> int:
        return x


def test_an_object_is_made_once_and_keeps_its_state(pool: sky.Compute) -> None:
    model = Model("gpt", scale=3) >> pool
    assert [model.predict(x) for x in (1, 2)] == [(3, 1), (6, 2)]
    assert len({model.place() for _ in range(8)}) == 1, "always in the same process"


def test_two_objects_are_apart(pool: sky.Compute) -> None:
    first, second = Model("a") >> pool, Model("b") >> pool
    assert first.predict(1) == second.predict(1) == (1, 1)
    assert first.predict(1) == (1, 2)


def test_methods_are_what_functions_are(pool: sky.Compute) -> None:
    model = Model("gpt") >> pool
    assert list(model.counts(3)) == [0, 1, 2]
    assert model.total(iter([1, 2, 3])) == 6
    assert model.later() == "gpt"  # type: ignore[comparison-overlap]
    assert model.marked(1) == 2  # type: ignore[comparison-overlap]
    assert model.static(3) == -3
    assert model.inherited() == "inherited"
    assert model(4) == 4
    with pytest.raises(LookupError, match="as a function's"):
        model.fails()
    with pytest.raises(TypeError, match="predict"):
        model.predict()  # type: ignore[call-arg]


def test_calls_of_a_method_go_where_calls_of_functions_go(pool: sky.Compute) -> None:
    model: Any = Model("gpt", scale=2) >> pool
    assert model.predict.submit(1).result(100) == (2, 1)
    assert model.predict.pending(1) >> pool == (2, 2)
    lazy = sky.function(model.predict)
    assert (lazy(1) & lazy(1)) >> pool == ((2, 3), (2, 4))
    assert [x for x, _ in pool.map(model.predict, range(3))] == [0, 2, 4]
    assert sky.gather(*[lazy(x) for x in range(2)]) >> sky == [(0, 8), (2, 9)]
    with pytest.raises(sky.errors.ConfigurationError, match="runs where its object is, on node"):
        lazy(1) @ pool
    with pytest.raises(sky.errors.ConfigurationError, match="leave `on` out"):
        pool.run(lazy(1), on=1)


def test_an_object_is_made_on_the_node_that_is_asked_for(pool: sky.Compute) -> None:
    for node in (0, 1):
        assert pool.run(Model("gpt"), on=node).place()[0] == node
    future = Model("gpt") > pool
    assert future.result(100).predict(1) == (1, 1)


@sky.function
def last_of(models: Any) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = models[-1:].predict(5)
    return found


def test_a_group_has_an_object_in_every_worker(pool: sky.Compute) -> None:
    models = Model("gpt") @ pool
    assert [node for node, _ in models.place()] == [0, 1]
    assert models.predict(5) == [(5, 1), (5, 1)]
    assert models[1].predict(5) == (5, 2)
    assert len(models) == len(list(models)) == 2
    assert models[1:].predict(5) == [(5, 3)]
    assert models[2:].predict(5) == []
    assert pool.run(last_of(models), on=0) == [(5, 4)]
    assert models(7) == [7, 7]
    assert [future.result(100) for future in models.static.submit(1)] == [-1, -1]
    with pytest.raises(sky.BroadcastError, match=r"Model.fails failed on 2 of 2 workers"):
        models.fails()
    with models:
        pass
    with pytest.raises(sky.errors.InstanceLostError, match="was closed"):
        models.predict(1)


def test_an_object_that_cannot_be_made_is_its_own_error(pool: sky.Compute) -> None:
    with pytest.raises(TypeError, match="scales"):
        Model("gpt", scales=3) >> pool  # type: ignore[call-arg]
    with pytest.raises(sky.BroadcastError, match="Model failed on 2 of 2 workers"):
        Model() @ pool  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("path", "Model has no method 'path'; .* write one that returns what you need"),
        ("size", "Model has no method 'size'"),
        ("shared", "Model has no method 'shared'"),
        ("_secret", "'_secret' of Model is the object's own"),
    ],
)
def test_only_methods_are_reachable(pool: sky.Compute, name: str, problem: str) -> None:
    model = Model("gpt") >> pool
    with pytest.raises(AttributeError, match=problem):
        getattr(model, name)
    with pytest.raises(AttributeError, match="write a method that sets it"):
        model.path = "other"


def test_what_is_not_made_yet_says_so() -> None:
    made = Model("gpt")
    with pytest.raises(AttributeError, match=r"make it first: `model = Model\(...\) >> compute`"):
        made.predict(1)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(made)
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"it is not a class; use @sky\.function"
    ):
        sky.cls(len)
    with pytest.raises(sky.errors.ConfigurationError, match="timeout=-1"):
        sky.cls(timeout=-1)(Base)


def test_what_is_not_made_yet_can_be_copied() -> None:
    making = copy.copy(Model("gpt2"))
    assert making.args == ("gpt2",)
    assert repr(making) == "<Model that is not made yet>"


def test_a_plain_object_is_made_here() -> None:
    model = Model.local("gpt", scale=5)
    assert model.predict(2) == (10, 1)
    assert model.path == "gpt"

    class Larger(Model):  # type: ignore[misc, valid-type]
        """Has the plain class as its base."""

    assert Larger("x").inherited() == "inherited"


@sky.function
def asks(model: Any, x: int) -> tuple[tuple[int, int], int]:
    """The answer of an object, and the process that asked it."""
    return model.predict(x), os.getpid()


def test_a_task_calls_an_object_on_another_node_and_in_its_own_process(pool: sky.Compute) -> None:
    model = pool.run(Model("gpt", scale=3), on=0)
    _, home = model.place()
    assert pool.run(asks(model, 2), on=1)[0] == (6, 1)
    # Both processes of the object's node: one of them is the object's own.
    there = sky.gather(*[asks(model, 1) for _ in range(8)]) >> pool
    assert sorted(count for (_, count), _ in there) == list(range(2, 10))
    assert pool.run(asks(model, 1), on=0)[0] == (3, 10)
    assert home


def test_all_kinds_of_methods_can_be_called_from_a_task(pool: sky.Compute) -> None:
    @sky.function
    def uses(model: Any, predict: Any, group: Any) -> tuple[Any, ...]:
        first = next(iter(model.counts(1000)))
        many = sum(model.counts(100))
        future = model.predict.submit(5)
        return first, many, model.later(), predict(1)[0], future.result()[0], group.static(3)

    model, group = pool.run(Model("gpt", scale=2), on=0), Model("all") @ pool
    found = pool.run(uses(model, model.predict, group), on=1)
    assert found == (0, 4950, "gpt", 2, 10, [-3] * len(group))


def test_a_group_is_used_and_closed_by_a_task(pool: sky.Compute) -> None:
    @sky.function
    def uses(group: Any) -> tuple[list[int], list[int]]:
        one_by_one = [each.predict(1)[0] for each in group]
        together = [future.result()[0] for future in group.predict.submit(2)]
        group.close()
        return one_by_one, together

    group = Model("all", scale=2) @ pool
    assert pool.run(uses(group), on=1) == ([2] * len(group), [4] * len(group))
    for each in group:
        with pytest.raises(sky.errors.InstanceLostError):
            each.predict(1)


def test_a_handle_in_shared_state_works_in_tasks_and_is_the_clients_own_here(
    pool: sky.Compute,
) -> None:
    @sky.function
    def asks_the_one_in_the_dict() -> int:
        return int(sky.dict("models")["gpt"].predict(4)[0])

    model = pool.run(Model("gpt", scale=2), on=0)
    sky.dict("models", on=pool)["gpt"] = model
    assert pool.run(asks_the_one_in_the_dict(), on=1) == 8
    assert sky.dict("models", on=pool)["gpt"] is model
    assert pool.run(sky.function(lambda it: it)(model), on=1) is model


def test_what_goes_wrong_in_a_call_from_a_task_is_raised_there(pool: sky.Compute) -> None:
    @sky.function
    def problems(model: Any, *methods: str) -> list[str]:
        found = []
        for method in methods:
            try:
                getattr(model, method)()
            except Exception as problem:
                found.append(f"{type(problem).__name__}: {problem}")
        return found

    model = pool.run(Model("gpt"), on=0)
    failed, missing = pool.run(problems(model, "fails", "nothing"), on=1)
    assert failed.startswith("LookupError: as a function's")
    assert missing.startswith("AttributeError: Model has no method 'nothing'")
    gone = pool.run(problems(model, "dies", "place"), on=1)
    assert gone[0].startswith("InstanceLostError") or gone[0].startswith("WorkerDiedError")
    assert gone[1].startswith("InstanceLostError")
    other = pool.run(Model("gpt"), on=0)
    assert pool.run(problems(other, "close", "place"), on=1) == [
        "InstanceLostError: this Model was closed; make another one"
    ]
    with pytest.raises(
        sky.errors.SerializationError, match="this Model cannot be sent, since it was clo"
    ):
        asks(other, 1) >> pool


def test_a_described_call_of_a_method_does_not_travel(pool: sky.Compute) -> None:
    model = Model("gpt") >> pool
    with pytest.raises(sky.errors.SerializationError, match="send the object or its method"):
        asks(sky.function(model.predict), 1) >> pool


class Tracked:
    """Says when it ends."""

    def __init__(self, name: str) -> None:
        self._name = name

    def there(self) -> bool:
        return True

    def __del__(self) -> None:
        sky.set("gone").add(self._name)


class Closing(Tracked):
    """Has a `close` of its own."""

    def close(self) -> None:
        sky.set("gone").add("closed " + self._name)


def test_an_object_is_freed_with_its_handle(pool: sky.Compute, eventually: Eventually) -> None:
    tracked = sky.cls(Tracked)("dropped") >> pool
    assert tracked.there()
    future = tracked.there.submit()  # type: ignore[attr-defined]
    del tracked
    gc.collect()
    assert future.result(100), "a call that is under way still has its object"
    eventually(lambda: "dropped" in sky.set("gone"))


class Choosy(Tracked):
    """Cannot be made on node 1, and takes its time if it is told to."""

    def __init__(self, name: str, waits: bool = False) -> None:
        super().__init__(name)
        if waits:
            sky.event(name).set()
            sky.event(f"{name} on").wait(60)
        elif sky.instance_info().node == 1:
            raise LookupError("not here")


def test_a_group_that_cannot_be_made_leaves_no_objects(
    pool: sky.Compute, eventually: Eventually
) -> None:
    with pytest.raises(sky.BroadcastError):
        sky.cls(Choosy)("half a group") @ pool
    eventually(lambda: not any(pool.broadcast(kept("half a group"))))


def test_an_object_whose_making_is_cancelled_does_not_stay(eventually: Eventually) -> None:
    worker = sky.Worker(concurrency=2, executor="thread")
    with sky.Compute(worker=worker, options=sky.Options(console=False)) as threads:
        future = sky.cls(Choosy)("cancelled", waits=True) > threads
        sky.event("cancelled").wait(60)
        assert future.cancel()
        sky.event("cancelled on").set()
        eventually(lambda: "cancelled" in sky.set("gone"))


@sky.function
def kept(name: str) -> int:
    """How many objects of that name this process has."""
    return sum(getattr(each, "_name", "") == name for each in instances._kept.values())


def test_close_calls_the_objects_own_close(pool: sky.Compute) -> None:
    with sky.cls(Closing)("own") >> pool as tracked:
        assert tracked.there()
    assert {"closed own", "own"} <= sky.set("gone")
    with pytest.raises(
        sky.errors.InstanceLostError, match="this Closing was closed; make another one"
    ):
        tracked.there()
    tracked.close()


def test_calls_of_a_lost_object_name_it_and_say_what_to_do(pool: sky.Compute) -> None:
    model: Any = Model("gpt") >> pool
    with pytest.raises(
        sky.errors.InstanceLostError, match=r"Model.dies lost its worker.*make it again"
    ):
        model.dies()
    for _ in range(2):
        with pytest.raises(
            sky.errors.InstanceLostError, match=r"Model.predict has lost its worker"
        ):
            model.predict(1)
    waiting = [model.predict.submit(1) for _ in range(3)]
    for future in waiting:
        with pytest.raises(sky.errors.InstanceLostError):
            future.result(100)
    model.close()


def test_calls_that_wait_for_a_lost_object_fail_with_it(pool: sky.Compute) -> None:
    model: Any = Model("gpt") >> pool
    futures = [model.dies.submit(), *(model.predict.submit(1) for _ in range(5))]
    for future in futures:
        with pytest.raises(sky.errors.InstanceLostError, match="make it again"):
            future.result(100)


def test_an_object_that_restarts_is_made_again_and_says_so(
    pool: sky.Compute, caplog: pytest.LogCaptureFixture
) -> None:
    model = sky.cls(restart=True)(Model.kind)("gpt", scale=2) >> pool
    model.predict(1)
    with pytest.raises(sky.errors.InstanceLostError):
        model.dies()
    with caplog.at_level(logging.WARNING, "skyward"):
        assert model.predict(3) == (6, 1)
    assert "Model was lost on node" in caplog.text
    assert "made again, with the same arguments" in caplog.text
    models = sky.cls(restart=True)(Model.kind)("gpt") @ pool
    with pytest.raises(sky.BroadcastError):
        models.dies()
    assert [node for node, _ in models.place()] == [0, 1]


def test_objects_of_another_pool_are_refused(pool: sky.Compute) -> None:
    model: Any = Model("gpt") >> pool
    with sky.Compute(options=sky.Options(console=False)) as other:
        with pytest.raises(sky.errors.ConfigurationError, match="an object on another pool"):
            model.predict.pending(1) >> other
        elsewhere = Model("gpt") >> other
    with pytest.raises(sky.errors.PoolClosedError):
        elsewhere.predict(1)
    with pytest.raises(
        sky.errors.SerializationError, match="its client has left the pool; make another"
    ):
        asks(elsewhere, 1) >> pool


class Meeting:
    """Two calls that need each other to end."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def meet(self) -> int:
        return self._barrier.wait(100)


def test_methods_run_at_the_same_time_on_threads() -> None:
    worker = sky.Worker(concurrency=2, executor="thread")
    with sky.Compute(worker=worker, options=sky.Options(console=False)) as compute:
        meeting: Any = sky.cls(Meeting)() >> compute
        futures = [meeting.meet.submit() for _ in range(2)]
        assert sorted(future.result(100) for future in futures) == [0, 1]
