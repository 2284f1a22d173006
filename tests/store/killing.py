"""Run as a script: kill a saving process at random moments, and check the store after each."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NoReturn

import torch

import skyward as sky

READY = os.pipe()
"""Where the saving process says that it has saved once."""


def base() -> dict[str, torch.Tensor]:
    """What must survive everything; the last layer is mapped when it is loaded."""
    sizes = (500, 500, 500, 1 << 18)
    return {f"layer{i}": torch.full((size,), float(i)) for i, size in enumerate(sizes)}


def save_for_ever(folder: str) -> NoReturn:
    store = sky.ModelStore(folder)
    loaded = store.load_model("base")
    for step in count():
        # Of a size that the store does not have: hashed while it is written.
        large = torch.full((270_000 + step,), float(step))
        small = torch.full((4000,), step)
        store.save_model(loaded | {"step": small, "large": large, "n": step}, "m")
        if step == 0:
            os.write(READY[1], b"!")
    raise AssertionError


def check(folder: str) -> None:
    store = sky.ModelStore(folder)
    assert all(torch.equal(store.load_model("base")[name], base()[name]) for name in base())
    there = {each.version for each in store.versions("m")} if len(store.list()) > 1 else set()
    for version in sorted(there)[-3:]:
        found = store.load_model("m", version=version)
        assert (found["step"] == found["n"]).all(), version
        assert found["n"] == -1 or (found["large"] == found["n"]).all(), version
        assert torch.equal(found["layer3"], base()["layer3"]), version
    saved = store.save_model(base() | {"step": torch.tensor([-1]), "n": -1}, "m")
    assert saved.version > max(there, default=0)
    store.gc(older_than=0)
    assert store.load_model("m")["n"] == -1
    assert torch.equal(store.load_model("base")["layer3"], base()["layer3"])
    for version in sorted(there)[:-3]:
        store.delete("m", version=version)
    assert list(Path(folder, "tmp").iterdir()) == []


def forked(action: Callable[[str], None], folder: str) -> int:
    """A fork starts in a millisecond, where a new interpreter with torch takes seconds."""
    child = os.fork()
    if child:
        return child
    try:
        action(folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(folder: str, times: int) -> None:
    torch.set_num_threads(1)  # a team of threads anew in each child takes longer than the saves
    # Here, so that what is imported on the way is there for every child.
    sky.ModelStore(folder).save_model(base(), "base")
    sky.ModelStore(folder).load_model("base")
    chance = random.Random(7)
    for attempt in range(times):
        child = forked(save_for_ever, folder)
        os.read(READY[0], 1)
        time.sleep(chance.uniform(0, 0.02))  # the moment of the kill is what is being varied
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        _, status = os.waitpid(forked(check, folder), 0)
        if status:
            sys.exit(f"the check after kill {attempt} failed")
    versions = sky.ModelStore(folder).versions("m")
    print(f"{times} kills, version {versions[-1].version}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
