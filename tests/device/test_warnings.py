"""What PyTorch warns of in the worker is a Python warning in the client."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch

DEGREES = "degrees of freedom is <= 0"


def _warnings_of(use: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    return [str(warning.message) for warning in caught if "this loop waits" not in str(warning)]


def test_a_warning_is_raised_at_its_own_line_each_time(device: torch.device) -> None:
    one = torch.ones(1, device=device)
    for _ in range(3):
        with pytest.warns(UserWarning, match=DEGREES) as caught:
            one.std()
        assert [warning.filename for warning in caught] == [__file__]


def test_a_warning_is_the_one_that_the_cpu_gives(device: torch.device) -> None:
    def write(where: torch.device) -> None:
        torch.ones(3, 3, device=where)[torch.ones(3, dtype=torch.uint8, device=where)]
        torch.add(torch.ones(3, device=where), 1, out=torch.ones(2, device=where))

    local = _warnings_of(lambda: write(torch.device("cpu")))
    assert len(local) == 2
    assert _warnings_of(lambda: write(device)) == local


def test_warnings_that_pytorch_gives_once_come_once(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.complex64)
    assert len(_warnings_of(lambda: [x.to(torch.float32) for _ in range(3)])) <= 1
    torch.set_warn_always(True)
    try:
        assert len(_warnings_of(lambda: [x.to(torch.float32) for _ in range(3)])) == 3
    finally:
        torch.set_warn_always(False)


def test_a_dtype_that_pytorch_warns_of_is_warned_of(device: torch.device) -> None:
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="ComplexHalf"):
            torch.empty(2, dtype=torch.complex32, device=device)
    finally:
        torch.set_warn_always(False)


def test_a_warning_turned_into_an_error_leaves_the_device_usable(device: torch.device) -> None:
    one = torch.ones(1, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=DEGREES):
            one.std()
    assert one.item() == 1.0


def test_warnings_of_a_thread_reach_python(device: torch.device) -> None:
    one = torch.ones(1, device=device)

    def in_a_thread() -> None:
        thread = threading.Thread(target=lambda: one.std())
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match=DEGREES):
        in_a_thread()
