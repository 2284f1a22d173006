"""What was loaded and not written to is not read again when it is saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import skyward as sky
from skyward.store import saving, untouched
from skyward.wire import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/pagemap")

LARGE = 1 << 19
"""Elements of a tensor that is mapped when it is loaded."""


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all buffers that saves hash."""
    sizes: list[int] = []

    def digests(buffers: list[memoryview]) -> list[bytes]:
        sizes.extend(len(buffer) for buffer in buffers)
        return real(buffers)

    real = memory.digests
    monkeypatch.setattr(saving.memory, "digests", digests)
    return sizes


def loaded(store: sky.ModelStore, count: int = 4) -> dict[str, torch.Tensor]:
    store.save_model({f"x{i}": torch.full((LARGE,), float(i)) for i in range(count)}, "m")
    value: dict[str, torch.Tensor] = store.load_model("m")
    return value


def test_only_what_was_written_to_is_hashed(store: sky.ModelStore, hashed: list[int]) -> None:
    value = loaded(store)
    hashed.clear()
    value["x2"][LARGE // 2] = 7

    version = store.save_model(value, "m")

    assert hashed == [4 * LARGE]
    assert version.added == 4 * LARGE
    again = store.load_model("m")
    assert all(torch.equal(again[name], value[name]) for name in value)


@pytest.mark.parametrize("where", [0, LARGE - 1], ids=["first", "last"])
def test_no_write_goes_unseen(store: sky.ModelStore, where: int) -> None:
    """Also one that torch's own version counter does not count."""
    value = loaded(store)
    value["x1"].data.numpy()[where] = -1

    store.save_model(value, "m")

    assert store.load_model("m")["x1"][where] == -1


def test_memory_that_is_gone_vouches_for_nothing(store: sky.ModelStore) -> None:
    value = loaded(store)
    known = len(untouched._origins)

    value.clear()

    assert len(untouched._origins) == known - 4


def test_what_another_store_loaded_is_stored_here(tmp_path: Path, store: sky.ModelStore) -> None:
    value = loaded(store)
    other = sky.ModelStore(tmp_path / "other")

    assert other.save_model(value, "m").added == 4 * 4 * LARGE
    assert torch.equal(other.load_model("m")["x3"], value["x3"])


def test_a_deleted_version_is_stored_again(store: sky.ModelStore) -> None:
    value = loaded(store)
    store.delete("m")
    store.gc(older_than=0)

    store.save_model(value, "m")

    assert torch.equal(store.load_model("m")["x3"], value["x3"])


def test_without_a_page_map_everything_is_hashed(
    store: sky.ModelStore, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = loaded(store)
    hashed.clear()

    def refused(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr(untouched.os, "preadv", refused)
    assert store.save_model(value, "m").added == 0
    assert hashed == [4 * LARGE] * 4
