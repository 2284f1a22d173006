"""Loops that the worker recognises. On a GPU they run as graphs (`test_cuda.py`);
here as the records that were kept of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyward as sky

torch = pytest.importorskip("torch")
nn = torch.nn
functional = nn.functional

QUIET = sky.Options(console=False)
STEPS = 200
"""A loop is looked for after 512 records, 1,024 and so on: one of 50 is found by then."""


@pytest.fixture(scope="module")
def devices() -> Iterator[tuple[Any, Any]]:
    """One that recognises loops, and one that does not."""
    image = sky.Image(env={"SKYWARD_CAPTURE": "records"})
    with sky.Compute(image=image, options=QUIET) as one, sky.Compute(options=QUIET) as other:
        yield one.device("cpu"), other.device("cpu")


def _model(device: Any, drop: float = 0.0) -> Any:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.Tanh(), nn.Dropout(drop), nn.Linear(16, 4))
    return nn.Sequential(*layers).to(device)


def _batches(device: Any, count: int = 1) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 8, generator=generator).to(device) for _ in range(count)]


def plain(device: Any, steps: int = STEPS) -> list[Any]:
    """A batch that is uploaded for each step, and a rate that changes."""
    model = _model(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(5, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return [*losses, *(p.detach().cpu() for p in model.parameters())]


def kept(device: Any, steps: int = STEPS) -> list[Any]:
    """What is kept of some steps has to stay as it is."""
    model, x = _model(device), _batches(device)[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    kept = []
    for number in range(steps):
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward()
        optimizer.step()
        if number % 30 == 7:
            kept += [out.detach(), model[0].weight.grad.clone()]
    return [each.cpu() for each in kept]


def interrupted(device: Any, steps: int = STEPS) -> list[Any]:
    """Steps that end in the middle of what has always come, or that pause there."""
    model, (x, y) = _model(device), _batches(device, 2)
    seen = []
    for number in range(steps):
        out = model(x)
        if number % 50 == 49:
            seen.append(out.detach().sum().item())
        if number % 50 == 48:
            time.sleep(0.01)
        loss = (out * model(y)).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        if number % 20 == 0:
            seen += [each.cpu() for each in grads]
    return seen


def random(device: Any, steps: int = STEPS) -> list[Any]:
    """Chance goes on as it does without."""
    model, x = _model(device, drop=0.5), _batches(device)[0]
    out = [model(x).sum() + torch.rand((), device=device) for _ in range(steps)]
    return [torch.stack(out).cpu().detach(), torch.rand(3, device=device).cpu()]


def changed(device: Any, steps: int = STEPS) -> list[Any]:
    """Another model in the place of the first, and then the same batch in other memory."""
    seen = []
    for _ in range(2):
        model, x = _model(device), _batches(device)[0]
        for _ in range(steps // 2):
            y = model(x.clone()).sum()
        seen.append(y.item())
    return seen


LOOPS = (plain, kept, interrupted, random, changed)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_is_recognised_does_the_same(
    devices: tuple[Any, Any], loop: Callable[[Any], list[Any]]
) -> None:
    ours, theirs = devices
    found, expected = loop(ours), loop(theirs)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert "of them as" in sky.device_stats(ours).captured
    assert sky.device_stats(theirs).captured == ""


def test_a_failure_in_a_recognised_loop_is_told_as_in_any(devices: tuple[Any, Any]) -> None:
    device, _ = devices
    table, there = torch.ones(4, 4, device=device), torch.tensor([0, 1], device=device)
    seen = 0.0
    for number in range(STEPS):
        rows = table[there].tanh().exp().sqrt().sin().cos()
        if number == STEPS - 2:
            there.fill_(9)
        seen = float(rows.sum()) if number % 10 == 0 else seen
    assert "of them as" in sky.device_stats(device).captured
    with pytest.raises(IndexError, match="out of bounds"):
        rows.sum().item()
    assert seen == pytest.approx(float(torch.ones(2, 4).tanh().exp().sqrt().sin().cos().sum()))


def test_a_profile_says_what_is_captured(devices: tuple[Any, Any]) -> None:
    device, _ = devices
    interrupted(device)
    with sky.profile(device) as recorded:
        x = torch.ones(3, device=device) + 1
        x.sum().item()
    assert "Outside of profiles: a loop of" in str(recorded)
