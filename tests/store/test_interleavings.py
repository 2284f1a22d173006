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
from skyward.store.catalog import GRACE, Catalog
from skyward.store.local import LocalFiles
from skyward.store.save import Saving
from skyward.store.values import encode

from ..conftest import other_case

STEPS = {
    *("read", "read_into", "view", "size", "write", "create", "list", "delete"),
    *("draft", "rename"),  # a draft is published by renaming it
}
FEWEST_SAVE_STEPS = 8
FEWEST_COLLECT_STEPS = 5
"""Fewer would mean that the steps above are no longer those that are taken."""


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


def aged_store(folder: Path) -> dict[str, torch.Tensor]:
    """Store a model whose object is old enough to be collected."""
    base = {f"layer{i}": torch.randn(100) for i in range(3)}
    sky.ModelStore(folder).save_model(base, "base")
    for file in folder.glob("objects/*/*"):
        os.utime(file, (0, 0))
    return base


def interleave(folder: Path, save_step: int, collect_step: int, deleted_by: str) -> set[str]:
    """The save stops, the collection runs up to a step, the save ends, the collection ends.

    Gives those of the two that had a step of that number.
    """
    stopped, proceed = threading.Event(), threading.Event()
    had_the_step: set[str] = set()
    base = aged_store(folder)
    tuned = base | {"head": torch.randn(4)}

    def pause() -> None:
        had_the_step.add("save")
        stopped.set()
        assert proceed.wait(100)

    def save() -> None:
        files = Stepped(folder, save_step, pause)
        Saving(Catalog(files), "tuned").save(*encode(tuned), {}, None)
        stopped.set()

    def resume() -> None:
        had_the_step.add("collection")
        if deleted_by == "collection":
            sky.ModelStore(folder).delete("base")
        proceed.set()
        thread.join()

    thread = threading.Thread(target=save)
    thread.start()
    assert stopped.wait(100)
    if deleted_by == "save":
        sky.ModelStore(folder).delete("base")
    files = Stepped(folder, collect_step, resume)
    Catalog(files).collect(GRACE)
    proceed.set()
    thread.join()

    loaded = sky.ModelStore(folder).load_model("tuned")
    wrong = [name for name in tuned if not torch.equal(loaded[name], tuned[name])]
    assert not wrong, f"save stopped at step {save_step}, collection at {collect_step}: {wrong}"
    return had_the_step


@pytest.mark.parametrize("deleted_by", ["save", pytest.param("collection", marks=other_case)])
def test_a_collection_at_any_time_spares_what_a_save_reuses(folder: Path, deleted_by: str) -> None:
    """Every step of the save with every step of the collection."""
    cases = 0
    for save_step in itertools.count():
        for collect_step in itertools.count():
            place = folder / f"{save_step}-{collect_step}"
            had_the_step = interleave(place, save_step, collect_step, deleted_by)
            cases += had_the_step == {"save", "collection"}
            if "collection" not in had_the_step:
                break
        if "save" not in had_the_step:
            break
    assert save_step >= FEWEST_SAVE_STEPS
    assert cases >= FEWEST_SAVE_STEPS * FEWEST_COLLECT_STEPS


def test_a_reader_sees_the_old_version_until_it_sees_the_new(folder: Path) -> None:
    for step in itertools.count():
        place = folder / str(step)
        aged = aged_store(place)
        seen = []

        def look(place: Path = place, seen: list[Any] = seen) -> None:
            seen.append(sky.ModelStore(place).load_model("base"))

        files = Stepped(place, step, look)
        changed = aged | {"layer0": torch.zeros(100)}
        Saving(Catalog(files), "base").save(*encode(changed), {}, None)
        for loaded in seen:
            assert loaded.keys() == aged.keys()
            assert torch.equal(loaded["layer1"], aged["layer1"])
        assert (sky.ModelStore(place).load_model("base")["layer0"] == 0).all()
        if not seen:
            break
    assert step >= FEWEST_SAVE_STEPS
