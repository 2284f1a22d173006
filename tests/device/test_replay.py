"""`sky.replay`: what is replayed has the bits of what runs as it is, or it is not replayed."""

from __future__ import annotations

import gc
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import skyward as sky
from skyward.device.core import core
from skyward.device.replay import Replay

from ..conftest import other_case
from .test_checkpoints import lose

CALLS = 10


@dataclass
class Work:
    """A function, what call number `i` gives it, and what it changes."""

    function: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    state: Callable[[], Any] = tuple


def told(value: Any) -> list[Any]:
    """The leaves of a value, tensors with the dtype and the bytes that they have now."""

    def leaf(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return type(each), each
        there = each.detach().cpu().contiguous()
        return each.device.type, there.shape, there.dtype, there.reshape(-1).view(torch.uint8)

    return [leaf(each) for each in pytree.tree_leaves(value)]


def differ(ours: list[Any], theirs: list[Any]) -> list[int]:
    """The numbers of the leaves that are not equal."""
    assert len(ours) == len(theirs)
    return [
        number
        for number, (mine, its) in enumerate(zip(ours, theirs, strict=True))
        if mine[:-1] != its[:-1]
        or (not torch.equal(mine[-1], its[-1]) if len(mine) == 4 else mine != its)
    ]


def run(make: Callable[[], Work], calls: int, *, replayed: bool) -> tuple[Any, list[Any]]:
    """Call a function; returns it, and what came of it."""
    torch.manual_seed(0)
    work = make()
    step = sky.replay(work.function) if replayed else work.function
    torch.manual_seed(1)
    results = [step(*work.arguments(number)) for number in range(calls)]
    state = [*map(told, results), told(work.state()), told(torch.rand(3, device=device_of(work)))]
    return step, state


def device_of(work: Work) -> torch.device:
    given = [each for each in pytree.tree_leaves(work.state()) if isinstance(each, torch.Tensor)]
    given += [each for each in pytree.tree_leaves(work.arguments(0)) if hasattr(each, "device")]
    return next((each.device for each in given if each.device.type == "sky"), torch.device("cpu"))


def replayed_like_eager(make: Callable[[], Work], calls: int = CALLS) -> Replay[..., Any]:
    """Results, state and random numbers of a replayed function are those of the function."""
    _, expected = run(make, calls, replayed=False)
    step, found = run(make, calls, replayed=True)
    wrong = {at: differ(*pair) for at, pair in enumerate(zip(found, expected, strict=True))}
    assert not any(wrong.values()), f"{step!r} differs in {wrong}"
    return step


def batches(device: torch.device, *sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    given = sizes or (16, 10)
    return [torch.randn(given, generator=generator).to(device) for _ in range(64)]


def net(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 4)).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [each.grad for each in model.parameters()]


def training(
    device: torch.device,
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    scheduler_of: Callable[[torch.optim.Optimizer], Any] | None = None,
    *,
    is_scheduled_inside: bool = True,
) -> Work:
    """A model trained on batches; what is compared is all that PyTorch keeps of it."""
    model = nn.Sequential(
        nn.Linear(10, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 4)
    ).to(device)
    optimizer = optimizer_of(model.parameters())
    scheduler = scheduler_of(optimizer) if scheduler_of is not None else None
    xs = batches(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None and is_scheduled_inside:
            scheduler.step()
        return loss.detach()

    def arguments(number: int) -> tuple[Any, ...]:
        if scheduler is not None and number and not is_scheduled_inside:
            scheduler.step()
        return (xs[number],)

    def state() -> Any:
        rates = [{**group, "params": None} for group in optimizer.param_groups]
        kept = [optimizer.state_dict()["state"], rates, model.state_dict(), gradients(model)]
        return kept if scheduler is None else [*kept, scheduler.get_last_lr()]

    return Work(step, arguments, state)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.5),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 50),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 4, 0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=40, cycle_momentum=False
    ),
    "one cycle, also of momentum": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=40
    ),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda at: min(1, (at + 1) / 6)),
}


class TestTraining:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_optimisers_keep_their_state_and_their_counts(self, device, name) -> None:
        step = replayed_like_eager(lambda: training(device, OPTIMIZERS[name]))
        assert step.replayed >= CALLS - 4

    @pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_schedulers_go_on(self, device, name, is_inside) -> None:
        def make() -> Work:
            return training(
                device, OPTIMIZERS["adam"], SCHEDULERS[name], is_scheduled_inside=is_inside
            )

        step = replayed_like_eager(make, 16)
        assert step.replayed >= 8

    def test_clipping_and_an_average_whose_decay_is_given(self, device) -> None:
        class Average:
            def __init__(self, model: nn.Module) -> None:
                self.shadow = [each.detach().clone() for each in model.parameters()]

            @torch.no_grad()
            def update(self, model: nn.Module, decay: float) -> None:
                for mine, its in zip(self.shadow, model.parameters(), strict=True):
                    mine.lerp_(its, 1 - decay)

        def make() -> Work:
            model = net(device)
            optimizer, average = torch.optim.AdamW(model.parameters(), 0.01), Average(model)
            xs = batches(device)

            def step(x: torch.Tensor, decay: float) -> Any:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                average.update(model, decay)
                return {"loss": loss.detach(), "norm": norm}

            return Work(
                step,
                lambda number: (xs[number], min(0.999, (1 + number) / (10 + number))),
                lambda: (model.state_dict(), average.shadow, gradients(model)),
            )

        assert replayed_like_eager(make).replayed

    def test_gradients_are_accumulated_over_calls_and_cleared_by_the_user(self, device) -> None:
        def make() -> Work:
            model, xs = net(device), batches(device)
            optimizer = torch.optim.Adam(model.parameters(), 0.05)
            seen = []

            def backward(x: torch.Tensor) -> torch.Tensor:
                loss = model(x).square().mean()
                loss.backward()
                return loss.detach()

            def arguments(number: int) -> tuple[Any, ...]:
                if number % 4 == 3:
                    seen.append(told(gradients(model)))
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                return (xs[number],)

            return Work(backward, arguments, lambda: (model.state_dict(), gradients(model), seen))

        assert replayed_like_eager(make, 24).replayed >= 10

    @pytest.mark.parametrize("is_number", [True, False], ids=["number", "row"])
    def test_the_last_gradient_is_kept(self, device, is_number) -> None:
        def make() -> Work:
            model, scale = net(device), nn.Parameter(torch.ones((), device=device))
            parameters = [*model.parameters(), scale] if is_number else [scale, *model.parameters()]
            xs, kept = batches(device), []

            def step(x: torch.Tensor) -> torch.Tensor:
                for each in parameters:
                    each.grad = None
                loss = (model(x) * scale).square().mean()
                loss.backward()
                return loss.detach()

            def arguments(number: int) -> tuple[Any, ...]:
                if number in (5, 7):
                    kept.append(parameters[-1].grad.detach())
                return (xs[number],)

            return Work(step, arguments, lambda: kept)

        assert replayed_like_eager(make).replayed

    def test_gradients_are_there_after_a_replay(self, device) -> None:
        def make() -> Work:
            model, xs, seen = net(device), batches(device), []

            def step(x: torch.Tensor) -> torch.Tensor:
                loss = model(x).square().mean()
                loss.backward()
                return loss.detach()

            def arguments(number: int) -> tuple[Any, ...]:
                seen.append([None if each is None else each.sum() for each in gradients(model)])
                for each in model.parameters():
                    each.grad = None
                return (xs[number],)

            return Work(step, arguments, lambda: (gradients(model), seen))

        assert replayed_like_eager(make).replayed >= CALLS - 3

    def test_gradients_are_accumulated_within_a_call(self, device) -> None:
        def make() -> Work:
            model, xs = net(device), batches(device)
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

            def step(parts: list[torch.Tensor]) -> torch.Tensor:
                optimizer.zero_grad()
                total: Any = 0
                for part in parts:
                    loss = model(part).square().mean() / len(parts)
                    loss.backward()
                    total = total + loss.detach()
                optimizer.step()
                return total

            return Work(step, lambda number: (xs[number : number + 3],), model.state_dict)

        assert replayed_like_eager(make).replayed

    def test_a_rate_changed_by_hand_after_replays_began(self, device) -> None:
        def make() -> Work:
            model, xs = net(device), batches(device)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)

            def step(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            def arguments(number: int) -> tuple[Any, ...]:
                if number >= 6:
                    optimizer.param_groups[0]["lr"] = 0.1 / number
                return (xs[number],)

            return Work(step, arguments, model.state_dict)

        assert replayed_like_eager(make, 16).replayed >= 10

    def test_a_state_loaded_between_calls(self, device) -> None:
        def make() -> Work:
            model, xs = net(device), batches(device)
            optimizer = torch.optim.Adam(model.parameters(), 0.05)
            saved: dict[str, Any] = {}

            def step(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            def arguments(number: int) -> tuple[Any, ...]:
                if number == 6:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    saved.update(pytree.tree_map_only(torch.Tensor, torch.clone, state))
                if number == 10:
                    model.load_state_dict(saved["model"])
                    optimizer.load_state_dict(saved["optimizer"])
                return (xs[number],)

            def state() -> Any:
                return model.state_dict(), optimizer.state_dict()["state"]

            return Work(step, arguments, state)

        assert replayed_like_eager(make, 20).replayed >= 12

    def test_parameters_that_the_user_writes_to_between_calls(self, device) -> None:
        def make() -> Work:
            model, xs = net(device), batches(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    return model(x)

            @torch.no_grad()
            def arguments(number: int) -> tuple[Any, ...]:
                for each in model.parameters():
                    each.mul_(1 + number / 10)
                return (xs[number],)

            return Work(step, arguments)

        assert replayed_like_eager(make).replayed == CALLS - 2

    @pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
    def test_autocast(self, device, is_inside) -> None:
        def make() -> Work:
            model, xs = net(device), batches(device)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)

            def step(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                with ExitStack() as stack:
                    if is_inside:
                        stack.enter_context(torch.autocast("sky", dtype=torch.bfloat16))
                    result = model(x)
                loss = result.float().square().mean()
                loss.backward()
                optimizer.step()
                return result.detach()

            return Work(step, lambda number: (xs[number],), model.state_dict)

        def within() -> Work:
            work = make()
            step = work.function
            return work if is_inside else Work(step, work.arguments, work.state)

        with torch.autocast("sky", dtype=torch.bfloat16, enabled=not is_inside):
            assert replayed_like_eager(within).replayed

    def test_a_mode_set_around_a_call_makes_a_program_of_its_own(self, device) -> None:
        model, x = net(device).requires_grad_(False), batches(device)[0]
        step = sky.replay(lambda x: model(x))
        for _ in range(4):
            assert step(x).dtype == torch.float32
            with torch.autocast("sky", dtype=torch.bfloat16):
                assert step(x).dtype == torch.bfloat16
        assert step.replayed == 4

    def test_evaluation_in_between(self, device) -> None:
        def make() -> Work:
            model, xs = nn.Sequential(nn.Linear(10, 6), nn.Dropout(0.5)).to(device), batches(device)

            @torch.no_grad()
            def step(x: torch.Tensor) -> torch.Tensor:
                return model(x)

            def arguments(number: int) -> tuple[Any, ...]:
                model.train(number % 10 < 6)
                return (xs[number],)

            return Work(step, arguments)

        assert replayed_like_eager(make, 26).replayed == 22

    def test_two_functions_of_one_model_side_by_side(self, device) -> None:
        def make() -> Work:
            model, xs = net(device), batches(device)
            optimizer = torch.optim.AdamW(model.parameters(), 0.05)

            def train(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            @torch.no_grad()
            def evaluate(x: torch.Tensor) -> torch.Tensor:
                return model(x).sum(0)

            return Work(train, lambda number: (xs[number],), lambda: (model.state_dict(), evaluate))

        def alternating(*, replayed: bool) -> tuple[list[Any], int]:
            torch.manual_seed(0)
            work = make()
            train, (_, evaluate) = work.function, work.state()
            if replayed:
                train, evaluate = sky.replay(train), sky.replay(evaluate)
            results = []
            for number in range(CALLS):
                results += [train(*work.arguments(number)), evaluate(*work.arguments(number + 20))]
            both = min(train.replayed, evaluate.replayed) if replayed else 0
            return told(results), both

        expected, _ = alternating(replayed=False)
        found, count = alternating(replayed=True)
        assert not differ(found, expected)
        assert count >= 6

    @pytest.mark.parametrize("kind", ["lstm", "attention"])
    def test_layers_with_many_operations(self, device, kind) -> None:
        def make() -> Work:
            if kind == "lstm":
                model: nn.Module = nn.LSTM(10, 8, 2, dropout=0.1, batch_first=True)
            else:
                model = nn.TransformerEncoderLayer(10, 2, 16, batch_first=True)
            model, xs = model.to(device), batches(device, 3, 5, 10)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)

            def step(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                result = model(x)
                loss = (result[0] if kind == "lstm" else result).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            return Work(step, lambda number: (xs[number],), model.state_dict)

        assert replayed_like_eager(make).replayed

    @other_case
    def test_a_model_of_transformers(self, device) -> None:
        transformers = pytest.importorskip("transformers")

        def make() -> Work:
            config = transformers.GPT2Config(
                vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2
            )
            model = transformers.GPT2LMHeadModel(config).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            xs = [torch.randint(50, (2, 8)).to(device) for _ in range(CALLS + 1)]

            def step(x: torch.Tensor) -> torch.Tensor:
                loss = model(x, labels=x).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            return Work(step, lambda number: (xs[number],), model.state_dict)

        assert replayed_like_eager(make).replayed


class TestArguments:
    def test_tensors_that_come_from_the_host(self, device) -> None:
        def make() -> Work:
            weight, xs = torch.randn(10, 10).to(device), batches(torch.device("cpu"))

            def step(x: torch.Tensor) -> Any:
                there = x.to(device)
                return (there @ weight).tanh(), there

            return Work(step, lambda number: (xs[number],), lambda: weight)

        assert replayed_like_eager(make).replayed == CALLS - 2

    def test_numbers(self, device) -> None:
        def make() -> Work:
            xs = batches(device)
            return Work(
                lambda x, share: x * share + (1 - share) ** 2,
                lambda number: (xs[number], 0.1 * number),
            )

        assert replayed_like_eager(make).replayed == CALLS - 2

    def test_words_and_whole_numbers_make_another_program(self, device) -> None:
        x = batches(device)[0]

        def power(x: torch.Tensor, exponent: int, *, kind: str = "plain") -> torch.Tensor:
            result = x**exponent
            return result.exp() if kind == "exp" else result

        step = sky.replay(power)
        for _ in range(4):
            for exponent in (2, 3):
                for kind in ("plain", "exp"):
                    found = step(x, exponent, kind=kind)
                    assert torch.equal(found.cpu(), power(x, exponent, kind=kind).cpu())
        assert step.replayed == 8

    def test_other_sizes_make_another_program(self, device) -> None:
        def make() -> Work:
            xs = batches(device)
            return Work(lambda x: x.exp().sum(0), lambda number: (xs[number][: 2 + number % 3],))

        assert replayed_like_eager(make, 18).replayed == 12

    def test_sizes_that_take_turns_count_the_steps_of_one_optimiser(self, device) -> None:
        def make() -> Work:
            work = training(device, lambda p: torch.optim.AdamW(p, 0.01))
            xs = batches(device)
            return replace(work, arguments=lambda number: (xs[number][: 8 + number % 2 * 8],))

        assert replayed_like_eager(make, 16).replayed >= 8

    def test_more_than_sixteen_kinds_run_as_they_are(self, device) -> None:
        x = torch.arange(20.0).to(device)
        step = sky.replay(lambda x: x.cumsum(0))
        for _ in range(3):
            for size in range(1, 17):
                assert step(x[:size])[-1].item() == sum(range(size))
        assert step.replayed == 16
        with pytest.warns(UserWarning, match="more than 16 kinds of sizes; give it fewer"):
            step(x[:17])
        for _ in range(4):
            assert step(x[:18])[-1].item() == sum(range(18))
            assert step(x[:16])[-1].item() == sum(range(16))
        assert step.replayed == 20

    def test_tensors_that_the_function_writes_to(self, device) -> None:
        def make() -> Work:
            xs, total = batches(device), torch.zeros(1).to(device)

            def step(x: torch.Tensor, total: torch.Tensor) -> Any:
                total.add_(x.sum())
                x.mul_(2)
                return x + total, x, total

            return Work(step, lambda number: (xs[number], total), lambda: (xs, total))

        assert replayed_like_eager(make).replayed == CALLS - 2

    def test_random_numbers_are_those_of_the_device(self, device) -> None:
        def make() -> Work:
            xs = batches(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                return torch.randn(3, device=device) + x.sum() + torch.rand_like(x).sum()

            return Work(step, lambda number: (xs[number],))

        assert replayed_like_eager(make).replayed == CALLS - 2

    def test_work_on_other_streams(self, device) -> None:
        def make() -> Work:
            xs, sides = batches(device), [torch.Stream(device) for _ in range(2)]

            def step(x: torch.Tensor) -> torch.Tensor:
                ready = torch.accelerator.current_stream(device).record_event()
                with sides[0]:
                    sides[0].wait_event(ready)
                    doubled = x * 2
                with sides[1]:
                    sides[1].wait_stream(sides[0])
                    more = doubled + 1
                torch.accelerator.current_stream(device).wait_stream(sides[1])
                return more.sum()

            return Work(step, lambda number: (xs[number],))

        assert replayed_like_eager(make).replayed == CALLS - 2

    def test_memory_that_a_tensor_has_only_for_a_while(self, device) -> None:
        def make() -> Work:
            xs, work = batches(device), torch.empty(160).to(device)
            size = work.untyped_storage().size()
            work.untyped_storage().resize_(0)

            def step(x: torch.Tensor) -> torch.Tensor:
                work.untyped_storage().resize_(size)
                work.copy_(x.flatten())
                found = work.square().sum()
                work.untyped_storage().resize_(0)
                return found

            return Work(step, lambda number: (xs[number],))

        assert replayed_like_eager(make).replayed == CALLS - 2

    def test_memory_that_the_user_gives_it_before(self, device) -> None:
        def make() -> Work:
            xs, work = batches(device), torch.empty(160).to(device)
            work.untyped_storage().resize_(0)

            def step(x: torch.Tensor) -> torch.Tensor:
                work.untyped_storage().resize_(640)
                found = work.copy_(x.flatten()).sum()
                work.untyped_storage().resize_(0)
                return found

            def arguments(number: int) -> tuple[Any, ...]:
                if number == 6:
                    work.untyped_storage().resize_(640)
                return (xs[number],)

            return Work(step, arguments, lambda: work.untyped_storage().size())

        assert replayed_like_eager(make).replayed

    def test_memory_of_a_tensor_that_grows_and_goes(self, device) -> None:
        def make() -> Work:
            xs = batches(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                work = torch.empty(0, device=device).resize_(160)
                return work.copy_(x.flatten()).square().sum()

            return Work(step, lambda number: (xs[number],))

        assert replayed_like_eager(make).replayed == CALLS - 2


class TestResults:
    def test_a_value_read_at_the_end(self, device) -> None:
        def make() -> Work:
            xs = batches(device)

            def step(x: torch.Tensor) -> Any:
                total, largest = x.sum(), x.amax(0)
                return total.item(), largest.cpu(), "constant", None

            return Work(step, lambda number: (xs[number],))

        assert replayed_like_eager(make).replayed == CALLS - 2

    def test_views_with_strides_of_their_own(self, device) -> None:
        def make() -> Work:
            xs = batches(device, 3, 16, 10)

            def step(x: torch.Tensor) -> torch.Tensor:
                x.add_(1)
                return x @ x.T

            return Work(step, lambda number: (xs[number][1, 2:7].T,), lambda: xs)

        assert replayed_like_eager(make).replayed == CALLS - 2

    def test_results_stay_when_the_function_is_called_again(self, device) -> None:
        xs = batches(device)
        step = sky.replay(lambda x: (x + 1).relu())
        results = [step(x) for x in xs]
        for x, result in zip(xs, results, strict=True):
            assert torch.equal(result.cpu(), (x.cpu() + 1).relu())


@dataclass
class Counting:
    """Functions that count their calls, and use the count in ways that are easy to miss."""

    count: int = 0
    total: float = 0.0
    table: tuple[float, ...] = (1.5, 2.5, 3.5)
    named: dict[str, int] = field(default_factory=lambda: {"n": 3})

    def branch(self, x: torch.Tensor) -> Any:
        return x * 2 if self.count % 3 else x * 3

    def fraction_on_the_left(self, x: torch.Tensor) -> Any:
        return x * (0.1 * self.count) + 0.9**self.count

    def order_on_the_right(self, x: torch.Tensor) -> Any:
        return x + 1 if 5.5 < self.count else x - 1  # noqa: SIM300

    def orders_in_a_row(self, x: torch.Tensor) -> Any:
        return x + 1 if 1.5 < self.count % 5 <= 3.0 else x - 1

    def index(self, x: torch.Tensor) -> Any:
        return x * self.table[self.count % 3]

    def loop(self, x: torch.Tensor) -> Any:
        for at in range(self.count % 3):
            x = x * (at + 2)
        return x

    def loop_with_a_condition(self, x: torch.Tensor) -> Any:
        left = self.count % 4
        while left > 0:
            x, left = x + left, left - 1
        return x

    def slice(self, x: torch.Tensor) -> Any:
        return x[: self.count % 3 + 1].sum()

    def conversions(self, x: torch.Tensor) -> Any:
        return x * float(self.count) + int(self.count / 2)

    def functions(self, x: torch.Tensor) -> Any:
        return x * sqrt(self.count) + math.cos(0.1 * self.count) + max(3, self.count)

    def arithmetic(self, x: torch.Tensor) -> Any:
        whole, rest = divmod(self.count, 3)
        more = sum([self.count, 1]) + round(self.count / 3) + abs(-self.count) + (self.count & 1)
        return x * whole + rest * 0.5 + more - (self.count**2 >> 1)

    def member(self, x: torch.Tensor) -> Any:
        return x * 2 if self.count in (2, 5, 8.0) else x

    def key(self, x: torch.Tensor) -> Any:
        return x * {0: 0.5, 1: 1.5}[self.count % 2]

    def array(self, x: torch.Tensor) -> Any:
        return x * float(np.float64(0.5) * (self.count % 2))

    def helper(self, x: torch.Tensor) -> Any:
        return x * scaled(self.count, by=0.25) + (lambda n: 0.5 * n)(self.count)

    def comprehension(self, x: torch.Tensor) -> Any:
        return x * sum(0.5 * self.count + at for at in range(3))

    def operations(self, x: torch.Tensor) -> Any:
        return (x + self.count).add(x, alpha=self.count).mul_(self.count)

    def filled(self, x: torch.Tensor) -> Any:
        return x + torch.full((10,), float(self.count), device=x.device)

    def another_number(self, x: torch.Tensor) -> Any:
        self.total += 0.5 * self.count
        self.named["n"] += self.count % 2
        return x * self.total + self.named["n"]

    def begins_anew(self, x: torch.Tensor) -> Any:
        if self.count == 4:
            self.count = 0
        return x + self.count

    @torch.no_grad()
    def text(self, x: torch.Tensor) -> Any:
        return x * 2 if f"{self.count % 2}" == "1" else x * len("ab" * (self.count % 2 + 1))


def scaled(number: int, by: float) -> float:
    return by * number


COUNTED = [name for name in vars(Counting) if not name.startswith("_") and name.islower()]
COUNTED = [name for name in COUNTED if callable(getattr(Counting, name))]


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "a view": lambda gradient: gradient.view(-1),
}


class TestGradientsThatAreKept:
    """They stay as they are, also where the next ones would be made in their memory."""

    @pytest.mark.parametrize("is_made_anew", [True, False], ids=["inside", "outside"])
    @pytest.mark.parametrize("kept_as", KEPT)
    def test_between_calls(self, device, kept_as, is_made_anew) -> None:
        def make() -> Work:
            model, xs, kept = net(device), batches(device), []
            optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def step(x: torch.Tensor) -> torch.Tensor:
                if is_made_anew:
                    optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            def arguments(number: int) -> tuple[Any, ...]:
                if number > 4:
                    kept.append(KEPT[kept_as](gradients(model)[0]))
                if not is_made_anew:
                    optimizer.zero_grad()
                return (xs[number],)

            return Work(step, arguments, lambda: (kept, model.state_dict()))

        assert replayed_like_eager(make).replayed >= 2


class TestWhatIsKeptForTheNextCall:
    """A hidden state that a call makes anew from the one before."""

    def test_a_recurrent_network_that_goes_on(self, device) -> None:
        class Going:
            def __init__(self) -> None:
                self.network = nn.LSTM(10, 6).to(device)
                self.optimizer = torch.optim.SGD(self.network.parameters(), 0.1)
                self.hidden: Any = None

            def step(self, x: torch.Tensor) -> torch.Tensor:
                out, hidden = self.network(x, self.hidden)
                self.hidden = tuple(each.detach() for each in hidden)
                loss = out.square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                return loss.detach()

        def make() -> Work:
            work, xs = Going(), batches(device, 5, 3, 10)
            return Work(
                work.step,
                lambda number: (xs[number],),
                lambda: (work.hidden, work.network.state_dict()),
            )

        assert replayed_like_eager(make, 12).replayed >= 7

    def test_a_variable_and_a_list(self, device) -> None:
        def make() -> Work:
            xs, last, kept = batches(device), torch.zeros(10, device=device), [None, None]

            def step(x: torch.Tensor) -> torch.Tensor:
                nonlocal last
                kept[0] = last * 2
                last = last * 0.5 + x.mean(0)
                return last.sum()

            return Work(step, lambda number: (xs[number],), lambda: (last, kept))

        assert replayed_like_eager(make, 12).replayed >= 6

    def test_what_the_user_puts_there_is_taken(self, device) -> None:
        kept = {"last": torch.zeros(4, device=device)}

        def step(x: torch.Tensor) -> torch.Tensor:
            kept["last"] = kept["last"] + x
            return kept["last"] * 2

        replayed, x = sky.replay(step), torch.ones(4, device=device)
        for _ in range(6):
            replayed(x)
        assert replayed.replayed >= 2
        earlier = kept["last"]
        kept["last"] = torch.full((4,), 100.0, device=device)
        assert replayed(x).tolist() == [202.0] * 4
        assert earlier.tolist() == [6.0] * 4
        kept["last"] = torch.zeros(2, 4, device=device)
        assert replayed(x).shape == (2, 4)


class TestCounts:
    @pytest.mark.parametrize("name", COUNTED)
    def test_numbers_that_follow_from_a_count(self, device, name) -> None:
        def make() -> Work:
            work, xs = Counting(), batches(device)
            use = getattr(work, name)

            def step(x: torch.Tensor) -> torch.Tensor:
                work.count += 1
                result: torch.Tensor = use(x)
                return result

            return Work(step, lambda number: (xs[number],), lambda: vars(work))

        assert replayed_like_eager(make, 20).replayed >= 5

    def test_gradients_gathered_over_some_calls(self, device) -> None:
        def make() -> Work:
            model, xs, calls = net(device), batches(device), 0
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)

            def step(x: torch.Tensor) -> torch.Tensor:
                nonlocal calls
                calls += 1
                loss = model(x).square().mean() / 4
                loss.backward()
                if calls % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                return loss.detach()

            return Work(
                step,
                lambda number: (xs[number],),
                lambda: (calls, model.state_dict(), gradients(model)),
            )

        assert replayed_like_eager(make, 24).replayed >= 14

    def test_averages_whose_decay_follows_from_a_count(self, device) -> None:
        class Average(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.updates = 0
                self.weights = [each.detach().clone() for each in model.parameters()]

            def update(self, model: nn.Module) -> None:
                self.updates += 1
                decay = min(0.99, (1 + self.updates) / (10 + self.updates))
                with torch.no_grad():
                    for mine, its in zip(self.weights, model.parameters(), strict=True):
                        mine.lerp_(its, 1 - decay)

        def make() -> Work:
            model, xs = net(device), batches(device)
            optimizer, average = torch.optim.SGD(model.parameters(), 0.1), Average(model)

            def step(x: torch.Tensor) -> torch.Tensor:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update(model)
                return loss.detach()

            return Work(
                step, lambda number: (xs[number],), lambda: (average.updates, average.weights)
            )

        assert replayed_like_eager(make, 20).replayed >= 15

    def test_code_is_the_users_own_again(self, device) -> None:
        work = Counting()
        code = Counting.branch.__code__
        step = sky.replay(lambda x: work.branch(x))
        for x in batches(device)[:4]:
            step(x)
            assert Counting.branch.__code__ is code


def refused(make: Callable[[], Work], why: str, calls: int = CALLS) -> None:
    """A function that cannot be replayed runs as it is, and one warning says why."""
    _, expected = run(make, calls, replayed=False)
    with pytest.warns(UserWarning, match=why) as warned:
        step, found = run(make, calls, replayed=True)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert not any(differ(*pair) for pair in zip(found, expected, strict=True))
    assert step.replayed == 0


@pytest.fixture
def is_current(device) -> Iterator[None]:
    """The current device, on which PyTorch records events, may be that of other tests."""
    with torch.sky.device(device):
        yield


class TestRefused:
    def test_a_value_read_in_the_middle(self, device) -> None:
        def make() -> Work:
            xs = batches(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                if x.sum().item() > 3:
                    return x * 2
                return x * 3

            return Work(step, lambda number: (xs[number],))

        refused(
            make,
            r"runs step as it is: it reads a value, and goes on with operations; return the tensor "
            r"(.|\n)*test_replay\.py:\d+: if x\.sum\(\)\.item\(\) > 3:",
        )

    def test_a_generator_whose_state_is_read(self, device) -> None:
        """Checkpoints of activations read it, unless they are told that nothing is drawn."""

        def make(**options: Any) -> Work:
            layer, xs = nn.Linear(10, 4).to(device), batches(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                layer.zero_grad()
                loss = checkpoint(layer, x, use_reentrant=False, **options).square().mean()
                loss.backward()
                return loss

            return Work(step, lambda number: (xs[number],))

        refused(
            make,
            r"the state of a generator is read(.|\n)*test_replay\.py:\d+: loss = checkpoint\(",
        )
        replayed_like_eager(lambda: make(preserve_rng_state=False))

    def test_a_value_read_and_kept(self, device) -> None:
        def make() -> Work:
            xs, kept = batches(device), {"last": 0.0}

            def step(x: torch.Tensor) -> torch.Tensor:
                result = x * 2
                kept["last"] = result.sum().item()
                return result

            return Work(step, lambda number: (xs[number],), lambda: kept)

        refused(make, r"runs step as it is: it (changes|reads|sets) ")

    def test_sizes_that_depend_on_data(self, device) -> None:
        def make() -> Work:
            xs = batches(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                return x[x > 0].sum()

            return Work(step, lambda number: (xs[number],))

        refused(
            make,
            r"aten::index.Tensor, whose result depends on data\n"
            r".*test_replay\.py:\d+: return x\[x > 0\]\.sum\(\)",
        )

    def test_a_count_that_code_of_a_library_may_use(self, device) -> None:
        class Counting(nn.Dropout):
            count = 0

            def step(self, x: torch.Tensor) -> Any:
                self.count += 1
                return x * 2 if self.count % 3 else x * 3

        def make() -> Work:
            work, xs = Counting(), batches(device)
            return Work(work.step, lambda number: (xs[number],), lambda: work.count)

        refused(make, r"it counts .*count.*, which is \d+ now \(.*library.*\): count outside")

    def test_a_count_in_code_without_source(self, device) -> None:
        names: dict[str, Any] = {}
        exec("def step(x):\n    kept['n'] += 1\n    return x * 2", names)

        def make() -> Work:
            names["kept"] = {"n": 0}
            xs = batches(device)
            return Work(names["step"], lambda number: (xs[number],), lambda: names["kept"])

        refused(
            make, r"it counts kept\['n'\], which is \d now \(the source of step is not to be had"
        )

    def test_a_list_that_grows(self, device) -> None:
        def make() -> Work:
            xs, history = batches(device), []

            def step(x: torch.Tensor) -> torch.Tensor:
                history.append(x.sum())
                return x * 2

            return Work(step, lambda number: (xs[number],), lambda: history)

        refused(make, "it changes history, which a replay would not")

    def test_a_result_with_its_graph(self, device) -> None:
        def make() -> Work:
            model, xs = net(device), batches(device)
            return Work(model.forward, lambda number: (xs[number],))

        refused(make, r"runs forward as it is: .* call it in the function, or return loss.detach")

    def test_numbers_that_nobody_knows(self, device) -> None:
        def make() -> Work:
            xs, draw = batches(device), itertools.count(1).__next__

            def step(x: torch.Tensor) -> torch.Tensor:
                return x.mul(0.5 * draw())

            return Work(step, lambda number: (xs[number],))

        refused(
            make,
            r"aten::mul.* gets \d.* and then \d.* give what differs .* as an argument\n"
            r".*test_replay\.py:\d+: return x\.mul\(0\.5 \* draw",
        )

    def test_items_of_an_iterator(self, device) -> None:
        def make() -> Work:
            xs, hosts = batches(device), iter(batches(torch.device("cpu")))

            def step(x: torch.Tensor) -> torch.Tensor:
                return x + next(hosts).to(device)

            return Work(step, lambda number: (xs[number],))

        refused(make, "it reaches hosts, an iterator: take from it outside")

    @pytest.mark.usefixtures("is_current")
    def test_an_event_that_is_waited_for_outside(self, device) -> None:
        def make() -> Work:
            xs, event = batches(device), torch.Event(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                result = x * 2
                event.record()
                return result

            return Work(step, lambda number: (xs[number],))

        refused(make, "it keeps an event that it has recorded; record it outside")

    @pytest.mark.usefixtures("is_current")
    def test_the_time_between_events(self, device) -> None:
        def make() -> Work:
            xs = batches(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                torch.Event(device, enable_timing=True).record()
                return x * 2

            return Work(step, lambda number: (xs[number],))

        refused(make, "it records an event that takes the time; record it outside")

    @pytest.mark.usefixtures("is_current")
    def test_a_wait_for_what_was_recorded_before(self, device) -> None:
        def make() -> Work:
            xs, event = batches(device), torch.Event(device)
            event.record()

            def step(x: torch.Tensor) -> torch.Tensor:
                torch.accelerator.current_stream(device).wait_event(event)
                return x * 2

            return Work(step, lambda number: (xs[number],))

        refused(make, "it waits for an event from outside; wait outside")

    def test_another_stream_from_then_on(self, device) -> None:
        streams = [torch.accelerator.current_stream(device), torch.Stream(device)]

        def make() -> Work:
            xs = batches(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                torch.accelerator.set_stream(streams[1])
                return x * 2

            def arguments(number: int) -> tuple[Any, ...]:
                torch.accelerator.set_stream(streams[0])
                return (xs[number],)

            return Work(step, arguments)

        try:
            refused(make, "it leaves another stream the current one")
        finally:
            torch.accelerator.set_stream(streams[0])

    def test_a_tensor_that_grows(self, device) -> None:
        def make() -> Work:
            xs, grows = batches(device), torch.empty(0).to(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                storage = grows.untyped_storage()
                storage.resize_(storage.size() + 4)
                return x * 2

            return Work(step, lambda number: (xs[number],))

        refused(make, "it does what cannot be replayed: resize_ of a tensor")

    def test_an_argument_that_grows(self, device) -> None:
        def make() -> Work:
            xs, works = batches(device), [torch.empty(160, device=device) for _ in range(2)]
            for each in works:
                each.untyped_storage().resize_(0)

            def step(x: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
                work.untyped_storage().resize_(640)
                result = work.copy_(x.flatten()).sum()
                work.untyped_storage().resize_(0)
                return result

            return Work(step, lambda number: (xs[number], works[number % 2]))

        refused(make, "it does what cannot be replayed: resize_ of an argument")

    def test_another_device_besides(self, device, other_device) -> None:
        def make() -> Work:
            xs = batches(device)

            def step(x: torch.Tensor) -> torch.Tensor:
                torch.ones(3, device=other_device)
                return x * 2

            return Work(step, lambda number: (xs[number],))

        refused(make, "it reaches 2 devices")

    @pytest.mark.parametrize(
        ("does", "why"),
        [
            ("record", "an event of another device"),
            ("wait", "an event of another device"),
            ("seed", "a generator of another device"),
            ("empty", "a question to another device"),
        ],
    )
    def test_what_is_told_to_another_device(self, device, other_device, does, why) -> None:
        def make() -> Work:
            xs, event = batches(device), torch.Event(device)
            stream = torch.accelerator.current_stream(device)
            event.record()
            act = {
                "record": event.record,
                "wait": lambda: stream.wait_event(event),
                "seed": lambda: torch.sky.manual_seed(3),
                "empty": torch.sky.empty_cache,
            }[does]

            def step(x: torch.Tensor) -> torch.Tensor:
                act()
                return x * 2

            return Work(step, lambda number: (xs[number],))

        with torch.sky.device(other_device):
            refused(make, rf"it does what cannot be replayed: {why}\n.*test_replay\.py:\d+: ")

    def test_what_is_no_function(self) -> None:
        with pytest.raises(sky.errors.ConfigurationError, match=r"replay\(3\): give a function"):
            sky.replay(3)  # type: ignore[arg-type]

    def test_a_function_that_never_uses_a_device(self) -> None:
        step = sky.replay(lambda x: x + 1)
        assert [step(number) for number in range(8)] == [*range(1, 9)]
        assert step.replayed == 0


class TestFailures:
    def test_an_error_in_the_function_is_the_users(self, device) -> None:
        xs, fails = batches(device), [True, False]

        def step(x: torch.Tensor) -> torch.Tensor:
            result = x * 2
            if fails[0]:
                raise KeyError("mine")
            return result

        replayed = sky.replay(step)
        for _ in range(3):
            with pytest.raises(KeyError, match="mine"):
                replayed(xs[0])
        fails[0] = False
        for x in xs[:6]:
            assert torch.equal(replayed(x).cpu(), 2 * x.cpu())
        assert replayed.replayed == 4
        fails[0] = True
        with pytest.raises(KeyError, match="mine"):
            replayed(xs[0])
        fails[0] = False
        assert torch.equal(replayed(xs[7]).cpu(), 2 * xs[7].cpu())
        assert replayed.replayed == 5

    def test_an_operation_that_fails_raises_at_the_next_wait(self, device) -> None:
        table = torch.arange(10.0).to(device)
        step = sky.replay(lambda index: table.index_select(0, index) * 2)
        indices = [torch.tensor([number, number]).to(device) for number in range(10)]
        for index in indices[:5]:
            step(index)
        assert step.replayed == 3
        wrong = step(torch.tensor([3, 77]).to(device))
        assert step.replayed == 4
        with pytest.raises((IndexError, RuntimeError), match=r"(?i)index.*out of"):
            wrong.sum().item()
        for number, index in enumerate(indices):
            assert step(index).tolist() == [2 * number, 2 * number]
        assert table.sum().item() == 45

    def test_a_device_that_is_lost_says_so_and_then_is_recorded_anew(
        self, sharing, tmp_path: Path
    ) -> None:
        store = sky.ModelStore(tmp_path / "store", progress=False)
        with sharing(sky.Compute(options=sky.Options(console=False))) as pool:
            device = pool.device("cpu")
            torch.manual_seed(0)
            model = net(device)
            optimizer = torch.optim.Adam(model.parameters(), 0.05)
            xs = [each.tolist() for each in batches(torch.device("cpu"))]

            @sky.replay
            def step(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            def steps(*numbers: int) -> list[float]:
                return [step(torch.tensor(xs[at]).to(device)).item() for at in numbers]

            steps(*range(6))
            sky.checkpoint(device, store, model=model, optimizer=optimizer)
            expected = steps(*range(6, 14))
            assert step.replayed >= 8
            given = torch.tensor(xs[0]).to(device)
            lose(pool, device)
            with pytest.raises(sky.errors.DeviceError, match="is gone: "):
                step(given)
                torch.sky.synchronize(device)
            assert pool.device("cpu") == device
            sky.restore(device, store, model=model, optimizer=optimizer)
            before = step.replayed
            assert steps(*range(6, 14)) == expected
            assert step.replayed > before


class TestSurroundings:
    def test_a_replay_that_is_dropped_gives_back_what_it_held(self, device) -> None:
        def use() -> int:
            model, xs = net(device), batches(device)[:8]
            optimizer = torch.optim.Adam(model.parameters(), 0.01)

            def train(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            step = sky.replay(train)
            for x in xs:
                step(x)
            return step.replayed

        def held() -> tuple[int, int]:
            gc.collect()
            torch.sky.synchronize(device)
            living = core().living(core().serial(device.index))
            return len(list(living)), torch.sky.memory_allocated(device)

        use()
        before = held()
        assert use() > 0
        assert held() == before

    def test_use_from_other_threads(self, device) -> None:
        xs, results = batches(device), {}
        step = sky.replay(lambda x: (x @ x.T).tanh().sum(0))

        def call(numbers: range) -> None:
            for number in numbers:
                results[number] = step(xs[number])

        call(range(4))
        threads = [threading.Thread(target=call, args=(range(at, 64, 3),)) for at in range(4, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, result in results.items():
            assert torch.equal(result.cpu(), (xs[number] @ xs[number].T).tanh().sum(0).cpu())
        assert len(results) == 64
        assert step.replayed == 62

    def test_recorded_on_another_thread(self, device) -> None:
        xs, results = batches(device), []
        step = sky.replay(lambda x: x.exp().sum())
        thread = threading.Thread(target=lambda: results.extend(step(x).item() for x in xs[:5]))
        thread.start()
        thread.join()
        assert results == [x.exp().sum().item() for x in xs[:5]]
        assert step.replayed == 3

    def test_one_within_another_is_a_part_of_it(self, device) -> None:
        xs = batches(device)
        inner = sky.replay(lambda x: x.exp())
        outer = sky.replay(lambda x: inner(x).sum())
        for x in xs[:6]:
            assert outer(x).item() == x.exp().sum().item()
        assert (outer.replayed, inner.replayed) == (4, 0)

    def test_it_has_the_functions_name_and_says_what_it_has_done(self, device) -> None:
        def double(x: torch.Tensor) -> torch.Tensor:
            """Twice as much."""
            return x * 2

        step = sky.replay(double)
        for x in batches(device)[:5]:
            step(x)
        assert (step.__name__, step.__doc__) == ("double", "Twice as much.")
        assert repr(step) == "<sky.replay of double: 1 programs, 3 replayed>"

    def test_operation_by_operation_where_that_is_asked_for(self, device, monkeypatch) -> None:
        monkeypatch.setenv("SKYWARD_DEVICE_SYNC", "1")
        step = sky.replay(lambda x: x * 2)
        for x in batches(device)[:5]:
            assert torch.equal(step(x).cpu(), x.cpu() * 2)
        assert step.replayed == 0


def test_what_another_thread_reads_meanwhile_is_no_part_of_a_recording(
    device: torch.device,
) -> None:
    x, reads, may_go_on = torch.ones(4).to(device), threading.Event(), threading.Event()

    def read() -> None:
        while not may_go_on.is_set():
            assert x.sum().item() == 4.0
            assert torch.ones(1).item() == 1.0
            reads.set()

    @sky.replay
    def step(y: torch.Tensor) -> torch.Tensor:
        reads.clear()
        reads.wait(10)
        return y * 2

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(6):
            assert step(torch.full((4,), float(number)).to(device)).tolist() == [2 * number] * 4
    finally:
        may_go_on.set()
        thread.join()
    assert step.replayed
