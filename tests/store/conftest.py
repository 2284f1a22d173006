"""A store in a folder of its own, and what its tests compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skyward as sky

torch = pytest.importorskip("torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the store of this test lies."""
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> sky.ModelStore:
    """An empty store."""
    return sky.ModelStore(folder)


@pytest.fixture(scope="session")
def same() -> Any:
    """Equality of nested values, down to dtypes, strides, types and the sign of zero."""
    return _same


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and (left.numel() == 0 or left.stride() == right.stride())
            and _raw(left) == _raw(right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return repr(left) == repr(right)


def _raw(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if tensor.numel() else b""
