"""The types a user sees: checked by `mypy --strict`, never run.

`assert_type` pins what each operator returns. A `type: ignore` marks what must be an error; the
configuration reports an unused one, so an error that disappears fails the check as well.
"""

from collections.abc import Generator, Iterator
from typing import assert_type

import skyward as sky
from skyward.calls.flow import Results


class Model:
    weight: float


@sky.function
def train(model: Model, epochs: int, *, lr: float = 1e-3) -> Model:
    return model


@sky.function(timeout=30, retries=2, name="evaluate", fail_fast=True)
def evaluate(model: Model) -> float:
    return model.weight


@sky.function
def describe() -> str:
    return "a model"


@sky.function
def batches(count: int) -> Generator[bytes, None, None]:
    yield from [b""] * count


@sky.function
def consume(samples: Iterator[float]) -> int:
    return len(list(samples))


@sky.function
@sky.stdout(only="head")
def quiet(x: int) -> str:
    return str(x)


@sky.silent
@sky.function
def silenced(x: int) -> str:
    return str(x)


def a_call_is_a_pending_of_its_result(model: Model) -> None:
    assert_type(train(model, 3, lr=0.1), sky.Pending[Model])
    assert_type(evaluate(model), sky.Pending[float])
    assert_type(describe(), sky.Pending[str])


def load(name: str) -> Model:
    return Model()


def a_result_that_stays_keeps_its_type(model: Model, compute: sky.Compute) -> None:
    assert_type(sky.remote(load)("net"), sky.Pending[Model])
    assert_type(sky.remote(train, device="cuda")(model, 3) >> compute, Model)
    assert_type(sky.remote(load)("net") @ compute, list[Model])
    sky.remote(load)(3) >> compute  # type: ignore[arg-type]


def local_runs_here(model: Model) -> None:
    assert_type(train.local(model, 3), Model)
    assert_type(evaluate.local(model), float)


def operators_keep_the_type(model: Model, compute: sky.Compute) -> None:
    assert_type(train(model, 3) >> compute, Model)
    assert_type(train(model, 3) > compute, sky.Future[Model])
    assert_type(train(model, 3) @ compute, list[Model])
    assert_type(evaluate((train(model, 3) > compute).as_argument()) >> compute, float)
    assert_type(evaluate(model) >> compute, float)


def methods_say_the_same_by_name(model: Model, compute: sky.Compute) -> None:
    assert_type(compute.run(train(model, 3)), Model)
    assert_type(compute.run(train(model, 3), on="head"), Model)
    assert_type(compute.submit(train(model, 3), on=1), sky.Future[Model])
    assert_type(compute.broadcast(train(model, 3)), list[Model])


def the_module_is_a_target(model: Model) -> None:
    assert_type(train(model, 3) >> sky, Model)
    assert_type(train(model, 3) > sky, sky.Future[Model])
    assert_type(train(model, 3) @ sky, list[Model])


def groups_are_typed_tuples(model: Model, compute: sky.Compute) -> None:
    assert_type((train(model, 1) & evaluate(model)) >> compute, tuple[Model, float])
    assert_type(
        (train(model, 1) & evaluate(model) & describe()) >> compute, tuple[Model, float, str]
    )


def gather_is_a_list_or_a_stream(model: Model, compute: sky.Compute) -> None:
    calls = [evaluate(model) for _ in range(3)]
    assert_type(sky.gather(*calls) >> compute, list[float])
    assert_type(sky.gather(*calls, ordered=False) >> compute, list[float])
    assert_type(sky.gather(*calls, stream=True) >> compute, Iterator[float])
    assert_type(sky.gather(*calls, stream=True, ordered=False) >> compute, Iterator[float])


def map_is_an_iterator_and_a_list(models: list[Model], compute: sky.Compute) -> None:
    assert_type(compute.map(evaluate, models), Results[float])
    assert_type(compute.map(evaluate, models, ordered=False), Results[float])
    assert_type(compute.map(train, models, [1, 2, 3]), Results[Model])
    assert_type(next(compute.map(evaluate, models)), float)
    assert_type(compute.map(evaluate, models)[0], float)
    assert_type(compute.map(evaluate, models)[:2], list[float])


def generators_stream(compute: sky.Compute) -> None:
    assert_type(batches(3) >> compute, Generator[bytes, None, None])
    assert_type(consume(iter([1.0])) >> compute, int)


def a_handle_stands_for_its_value(model: Model, compute: sky.Compute) -> None:
    handle = sky.put(model)
    assert_type(train(handle, 3) >> compute, Model)
    assert_type(evaluate(handle), sky.Pending[float])


def output_decorators_go_on_either_side(compute: sky.Compute) -> None:
    assert_type(quiet(1) >> compute, str)
    assert_type(silenced(1) >> compute, str)


async def futures_are_awaitable(model: Model) -> None:
    async with sky.Compute(nodes=2) as compute:
        assert_type(compute, sky.Compute)
        assert_type(await (train(model, 3) > compute), Model)


def a_with_block_gives_the_pool() -> None:
    with sky.Compute() as compute:
        assert_type(compute, sky.Compute)


def machines_are_bought_by_type(provider: sky.Local) -> None:
    offers = sky.offers("H100", max_hourly_cost=10)
    assert_type(offers, list[sky.Offer])
    assert_type(offers[0].hourly_cost, float | None)
    with sky.Compute.any([sky.Spec(provider)], choose="first", ttl=60) as compute:
        assert_type(compute, sky.Compute)
        assert_type(compute.stats().cost, float | None)
    sky.Compute(allocation="cheap")  # type: ignore[arg-type]
    sky.Compute.any([provider])  # type: ignore[list-item]
    sky.Compute.any([sky.Spec(provider)], choose="best")  # type: ignore[arg-type]


# Not as decorators: mypy takes a class with a decorator for the plain class (its issue 3135).
class PlainTokenizer:
    def __init__(self, name: str, *, fast: bool = True) -> None: ...

    def encode(self, text: str) -> list[int]:
        return [len(text)]


class PlainCounter:
    def count(self) -> int:
        return 1


Tokenizer = sky.cls(PlainTokenizer)
Counter = sky.cls(restart=True, timeout=60, resources="own")(PlainCounter)


def objects_on_nodes_have_the_types_of_their_classes(compute: sky.Compute) -> None:
    tokenizer = Tokenizer("gpt2", fast=False) >> compute
    assert_type(tokenizer.encode("text"), list[int])
    assert_type(compute.map(tokenizer.encode, ["a"]), Results[list[int]])
    assert_type(sky.function(tokenizer.encode)("text") >> compute, list[int])
    assert_type(Counter() > compute, sky.Future[PlainCounter])
    assert_type((Counter() >> compute).count(), int)
    assert_type((Tokenizer("gpt2") @ compute)[0].encode("text"), list[int])
    assert_type(Tokenizer.local("gpt2").encode("text"), list[int])
    Tokenizer(3)  # type: ignore[arg-type]
    tokenizer.encode(3)  # type: ignore[arg-type]
    tokenizer.decode([1])  # type: ignore[attr-defined]


def shared_objects_have_types() -> None:
    scores: sky.dict[str, float] = sky.dict("scores")
    assert_type(scores["a"], float)
    assert_type(scores.get("a"), float | None)
    jobs: sky.queue[int] = sky.queue("jobs", maxsize=3)
    assert_type(jobs.get(timeout=1), int)
    assert_type(sky.counter("n").add(2), int)
    assert_type(sky.barrier("b").wait(), int)
    with sky.lock("l") as lock:
        assert_type(lock.abandoned, bool)
    jobs.put("a")  # type: ignore[arg-type]


def wrong_arguments_are_errors(model: Model) -> None:
    train(model, "three")  # type: ignore[arg-type]
    train(model)  # type: ignore[call-arg]
    train(model, 3, rate=0.1)  # type: ignore[call-arg]
    evaluate("model")  # type: ignore[arg-type]
    evaluate.local(3)  # type: ignore[arg-type]
    describe(1)  # type: ignore[call-arg]


def wrong_uses_are_errors(model: Model, compute: sky.Compute) -> None:
    train >> compute  # type: ignore[operator]
    train(model, 3) >> 3  # type: ignore[operator]
    train(model, 3) & 3  # type: ignore[operator]


def a_result_is_not_another_type(model: Model, compute: sky.Compute) -> str:
    return evaluate(model) >> compute  # type: ignore[return-value]
