"""Everything around an optimizer's step works on a sky device as on any other."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler, swa_utils

CPU = torch.device("cpu")
# Sparse gradients cannot be on the device.
ALL = [
    getattr(torch.optim, name)
    for name in sorted(vars(torch.optim))
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), Optimizer)
    and name not in ("Optimizer", "SparseAdam")
]
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"maximize": True, "foreach": False},
    {"amsgrad": True, "foreach": True},
    {"weight_decay": 0.1, "foreach": True},
    {"lr": torch.tensor(0.01), "foreach": False},
)


def _variants() -> Iterator[Any]:
    for kind in ALL:
        known = inspect.signature(kind).parameters
        for options in OPTIONS:
            if options.keys() <= known.keys():
                yield pytest.param(
                    kind, options, id=f"{kind.__name__}-{'-'.join(options) or 'plain'}"
                )


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)


def _trainable(model: nn.Module, kind: type[Optimizer]) -> list[nn.Parameter]:
    """All of it, but for the one that knows only matrices."""
    return [p for p in model.parameters() if p.dim() == 2 or kind.__name__ != "Muon"]


def _step(model: nn.Module, optimizer: Optimizer, seed: int) -> float:
    numbers = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    x, y = (torch.randn(6, n, generator=numbers).to(device) for n in (4, 2))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def _host(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), value)


def _equal(ours: Any, right: Any) -> None:
    torch.testing.assert_close(_host(ours), right, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "options"), [*_variants()])
def test_an_optimizer_steps_as_on_the_cpu(
    device: torch.device, kind: type[Optimizer], options: dict[str, Any]
) -> None:
    def run(where: torch.device) -> tuple[Any, ...]:
        model = _model(where)
        optimizer = kind(_trainable(model, kind), **options)
        losses = [_step(model, optimizer, seed) for seed in range(4)]
        return losses, list(model.parameters()), optimizer.state_dict()["state"]

    ours, right = _host(run(device)), _host(run(CPU))
    if not options:
        # Off the CPU, PyTorch takes the foreach way by itself, which may round differently.
        torch.testing.assert_close(ours, right)
        return
    _equal(ours, right)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RAdam, torch.optim.Rprop])
def test_capturable_optimizers_keep_their_steps_on_the_device(
    device: torch.device, kind: type[Optimizer]
) -> None:
    model, twin = _model(device), _model(CPU)
    ours, right = kind(model.parameters(), capturable=True), kind(twin.parameters(), foreach=True)
    for seed in range(4):
        assert _step(model, ours, seed) == pytest.approx(_step(twin, right, seed))
    assert ours.state[model[0].weight]["step"].device == device
    torch.testing.assert_close(model[0].weight.cpu(), twin[0].weight)


@pytest.mark.parametrize("from_device", [True, False])
def test_training_goes_on_from_a_saved_state(device: torch.device, from_device: bool) -> None:
    def half(where: torch.device) -> io.BytesIO:
        model = _model(where)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        for seed in range(3):
            _step(model, optimizer, seed)
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        saved.seek(0)
        return saved

    def rest(where: torch.device, saved: io.BytesIO) -> tuple[Any, ...]:
        model = _model(where)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        state = torch.load(saved, map_location=where)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return [_step(model, optimizer, seed) for seed in range(3, 6)], list(model.parameters())

    right = rest(CPU, half(CPU))
    if from_device:
        _equal(rest(CPU, half(device)), _host(right))
    _equal(rest(device, half(device if from_device else CPU)), _host(right))


def test_an_optimizers_state_moves_to_where_its_parameters_are(device: torch.device) -> None:
    there, here = _model(CPU), _model(device)
    before = torch.optim.Adam(there.parameters())
    _step(there, before, 0)
    after = torch.optim.Adam(here.parameters())
    after.load_state_dict(before.state_dict())
    state = after.state[here[0].weight]
    assert state["exp_avg"].device == state["exp_avg_sq"].device == device
    assert state["step"].device == CPU
    _equal(state["exp_avg"], before.state[there[0].weight]["exp_avg"])


def test_a_copied_model_and_optimizer_belong_together(device: torch.device) -> None:
    model = _model(device)
    model.append(nn.Linear(2, 2).to(device))
    model[3].weight = nn.Parameter(model[3].weight.detach())
    model.append(model[3])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    _step(model, optimizer, 0)
    twin, copied = copy.deepcopy((model, optimizer))
    assert twin[3] is twin[4]
    assert copied.param_groups[0]["params"][0] is twin[0].weight
    assert _step(model, optimizer, 1) == _step(twin, copied, 1)
    _step(model, optimizer, 2)
    assert not torch.equal(model[0].weight, twin[0].weight)


def _inverse(step: int) -> float:
    return 1 / (step + 1)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, _inverse),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "in sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "swa": lambda o: swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_learning_rates_are_scheduled(
    device: torch.device, scheduler: str, lr: float | torch.Tensor
) -> None:
    def run(where: torch.device) -> tuple[Any, ...]:
        model = _model(where)
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, foreach=False)
        schedule = SCHEDULERS[scheduler](optimizer)
        rates = []
        for seed in range(5):
            _step(model, optimizer, seed)
            schedule.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates, list(model.parameters())

    _equal(run(device), _host(run(CPU)))


def test_a_plateau_is_noticed_by_a_loss_on_the_device(device: torch.device) -> None:
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        schedule.step(torch.ones((), device=device))
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_averaged_models(device: torch.device) -> None:
    def run(where: torch.device) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(where)
        averages = [
            swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
            swa_utils.AveragedModel(model, avg_fn=swa_utils.get_ema_avg_fn(0.9), use_buffers=True),
            swa_utils.AveragedModel(model),
        ]
        for step in range(3):
            with torch.no_grad():
                model[0].weight.add_(step)
            model(torch.arange(8.0).reshape(4, 2).to(where))
            for average in averages:
                average.update_parameters(model)
        swa_utils.update_bn([torch.arange(8.0).reshape(4, 2)], averages[2], device=where)
        return [_host(average.state_dict()) for average in averages]

    torch.testing.assert_close(run(device), run(CPU))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_skip_what_overflowed(
    device: torch.device, kind: type[Optimizer], fused: bool
) -> None:
    def run(where: torch.device) -> tuple[Any, ...]:
        model = _model(where)
        optimizer = kind(model.parameters(), lr=0.1, fused=fused, foreach=False)
        scaler = torch.amp.GradScaler(where.type, init_scale=8.0, growth_interval=2)
        scales = []
        for factor in (1.0, float("inf"), 1.0, 1.0, 1.0):
            optimizer.zero_grad()
            loss = (model(torch.ones(1, 4, device=where)) * factor).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, list(model.parameters()), scaler.state_dict()

    _equal(run(device), _host(run(CPU)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast(device: torch.device, dtype: torch.dtype) -> None:
    def run(where: torch.device) -> list[Any]:
        model = _model(where)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(where.type, dtype=dtype):
                out = model(torch.ones(2, 4, device=where))
                assert out.dtype is dtype
                loss = nn.functional.mse_loss(out.float(), torch.ones(2, 2, device=where))
            loss.backward()
            optimizer.step()
        return list(model.parameters())

    _equal(run(device), _host(run(CPU)))


def test_gradients_are_clipped_and_parameters_flattened(device: torch.device) -> None:
    def run(where: torch.device) -> tuple[Any, ...]:
        model = _model(where)
        model(torch.ones(1, 4, device=where)).sum().backward()
        norms = [
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True),
            nn.utils.clip_grad_norm_(model.parameters(), 0.4, foreach=False),
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")),
        ]
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(2 * vector, model.parameters())
        return norms, [p.grad for p in model.parameters()], vector, list(model.parameters())

    _equal(run(device), _host(run(CPU)))


def test_lists_of_tensors_are_copied_from_anywhere(device: torch.device) -> None:
    for source in (device, CPU):
        ours = [torch.zeros(2, device=device), torch.zeros(3, device=device)]
        given = [torch.ones(2, device=source), torch.arange(3, device=source)]
        torch._foreach_copy_(ours, given)
        assert [t.tolist() for t in ours] == [[1.0, 1.0], [0.0, 1.0, 2.0]]
        torch._foreach_copy_(given, [2 * t for t in ours])
        assert [t.tolist() for t in given] == [[2.0, 2.0], [0, 2, 4]]


def test_hooks_after_accumulation_step_the_optimizer_in_backward(device: torch.device) -> None:
    def run(where: torch.device) -> list[Any]:
        model = _model(where)
        each = {p: torch.optim.SGD([p], 0.1, foreach=False) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            each[parameter].step()
            each[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(torch.ones(2, 4, device=where)).square().sum().backward()
        return list(model.parameters())

    _equal(run(device), _host(run(CPU)))
