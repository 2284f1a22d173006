"""What PyTorch keeps for the whole process holds for operations on a sky device too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

CPU = torch.device("cpu")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _made_by_default(device: torch.device) -> list[torch.dtype]:
    whole = torch.arange(3, device=device)
    return [
        t.dtype
        for t in (
            torch.ones(2, device=device),
            torch.full((2,), 1.5, device=device),
            torch.linspace(0, 1, 3, device=device),
            torch.rand(2, device=device),
            whole / 2,
            whole.sqrt(),
            whole * 1.5,
            torch.complex(torch.ones(2, device=device), torch.ones(2, device=device)),
        )
    ]


def test_the_default_dtype_is_the_clients(device: torch.device) -> None:
    usual = _made_by_default(device)
    assert usual == _made_by_default(CPU)
    with _default_dtype(torch.float64):
        assert _made_by_default(device) == _made_by_default(CPU) != usual
    assert _made_by_default(device) == usual


def test_deterministic_algorithms_are_asked_of_the_worker(device: torch.device) -> None:
    index, source = torch.tensor([0, 0], device=device), torch.ones(2, device=device)
    torch.zeros(3, device=device).put_(index, source)
    with _deterministic():
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic"):
            torch.zeros(3, device=device).put_(index, source)
        assert torch.empty(3, device=device).isnan().all()
        assert torch.empty(3, dtype=torch.uint8, device=device).tolist() == [255] * 3
        assert torch.empty_strided((2,), (2,), device=device).isnan().all()
        assert torch.ones(2, device=device).resize_(3).isnan().tolist() == [False, False, True]
        assert torch.ones(4, device=device)[:2].resize_(5).isnan().tolist() == [False] * 4 + [True]
    assert torch.zeros(3, device=device).put_(index, source).sum().item() == 1.0


def test_settings_hold_for_every_device(device: torch.device, other_device: torch.device) -> None:
    with _default_dtype(torch.float64):
        for where in (device, other_device):
            assert torch.ones(2, device=where).dtype is torch.float64
    for where in (device, other_device):
        assert torch.ones(2, device=where).dtype is torch.float32


def test_the_attention_kernels_allowed_here_are_those_that_the_worker_chooses_from(
    device: torch.device,
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 8, 16, device=device)

    def chosen() -> int:
        return int(torch._fused_sdp_choice(q, q, q))

    assert chosen() == SDPBackend.FLASH_ATTENTION.value
    with sdpa_kernel([SDPBackend.MATH]):
        assert chosen() == SDPBackend.MATH.value
        inside = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert chosen() == SDPBackend.FLASH_ATTENTION.value
    torch.testing.assert_close(inside, torch.nn.functional.scaled_dot_product_attention(q, q, q))
    with (
        sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
        pytest.raises(RuntimeError, match="No available"),
    ):
        double = q.to(torch.complex64)
        torch.nn.functional.scaled_dot_product_attention(double, double, double)


def test_a_switch_costs_one_record_when_it_changes(device: torch.device) -> None:
    import skyward as sky

    x = torch.ones(4, 4, device=device)

    def sent() -> int:
        before = sky.device_stats(device).bytes_sent
        x @ x
        return sky.device_stats(device).bytes_sent - before

    x @ x
    usual = sent()
    with torch.backends.cudnn.flags(benchmark=True):
        x @ x
        assert sent() == usual
    assert sent() > usual
    assert sent() == usual
