"""A save and a collection, either stopped at any step while the other runs: nothing breaks."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import skyward as sky
from skyward.store.catalog import Catalog
from skyward.store.collecting import collect
from skyward.store.local import LocalFiles
from skyward.store.saving import GRACE, Saving

STEPS = {
    *("read", "read_into", "view", "size", "write", "create", "list", "delete"),
    *("draft", "rename"),  # a draft is published by renaming it
}
SAVE_STEPS = 14
COLLECT_STEPS = 10


class Stepped(LocalFiles):
    """A folder that calls a function before one of its steps.

    What it has no tensor of the size of is hashed while it is written, the others before.
    """

    whole = 16

    def __init__(self, root: Path, step: int, action: Callable[[], None]) -> None:
        super().__init__(root)
        self._step = step
        self._action = action
        self._count = itertools.count()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in STEPS and next(self._count) == self._step:
            self._action()
        return found


@pytest.fixture
def aged(folder: Path) -> dict[str, torch.Tensor]:
    """A stored model whose object is old enough to be collected."""
    base = {f"layer{i}": torch.randn(100) for i in range(3)}
    sky.ModelStore(folder).save_model(base, "base")
    for file in folder.glob("objects/*/*"):
        os.utime(file, (0, 0))
    return base


@pytest.mark.parametrize("deleted_by", ["save", "collection"])
@pytest.mark.parametrize("collect_step", range(COLLECT_STEPS))
@pytest.mark.parametrize("save_step", range(SAVE_STEPS))
def test_a_collection_at_any_time_spares_what_a_save_reuses(
    folder: Path,
    aged: dict[str, torch.Tensor],
    save_step: int,
    collect_step: int,
    deleted_by: str,
) -> None:
    """The save stops, the collection runs up to a step, the save ends, the collection ends."""
    stopped, proceed = threading.Event(), threading.Event()
    tuned = aged | {"head": torch.randn(4)}

    def pause() -> None:
        stopped.set()
        assert proceed.wait(20)

    def save() -> None:
        files = Stepped(folder, save_step, pause)
        Saving(files, Catalog(files), "tuned").save(tuned, {}, None)
        stopped.set()

    def resume() -> None:
        if deleted_by == "collection":
            sky.ModelStore(folder).delete("base")
        proceed.set()
        thread.join()

    thread = threading.Thread(target=save)
    thread.start()
    assert stopped.wait(20)
    if deleted_by == "save":
        sky.ModelStore(folder).delete("base")
    files = Stepped(folder, collect_step, resume)
    collect(files, Catalog(files), GRACE)
    proceed.set()
    thread.join()

    loaded = sky.ModelStore(folder).load_model("tuned")
    assert all(torch.equal(loaded[name], tuned[name]) for name in tuned)


@pytest.mark.parametrize("step", range(SAVE_STEPS))
def test_a_reader_sees_the_old_version_until_it_sees_the_new(
    folder: Path, aged: dict[str, torch.Tensor], step: int
) -> None:
    seen = []

    def look() -> None:
        seen.append(sky.ModelStore(folder).load_model("base"))

    files = Stepped(folder, step, look)
    Saving(files, Catalog(files), "base").save(aged | {"layer0": torch.zeros(100)}, {}, None)

    for loaded in seen:
        assert loaded.keys() == aged.keys()
        assert torch.equal(loaded["layer1"], aged["layer1"])
    assert (sky.ModelStore(folder).load_model("base")["layer0"] == 0).all()
