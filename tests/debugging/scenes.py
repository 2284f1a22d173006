"""A script that a person debugs on a terminal: it asks which scene to play, again and again."""

from __future__ import annotations

import bdb
import os
import threading
import time
from pathlib import Path

import skyward as sky


def doubled(number: int) -> int:
    twice = number * 2
    breakpoint()  # noqa: T100
    once_more = twice + 1
    print("printed by the task")
    return once_more


@sky.function
def steps(number: int) -> int:
    return doubled(number)


@sky.function(timeout=2)
def limited() -> str:
    breakpoint()  # noqa: T100
    return "in time"


@sky.function
def ranked() -> int:
    rank = sky.instance_info().global_worker_index
    breakpoint()  # noqa: T100
    return rank


@sky.function
def fails(number: int) -> None:
    secret = number * 7
    raise ValueError(f"no {secret}")


@sky.function
def waits(marker: str) -> None:
    Path(marker).touch()
    threading.Event().wait()


def failing() -> None:
    # Only with the variable are the frames of a failure kept; breakpoints need none.
    os.environ["SKYWARD_DEBUGGER"] = os.environ["SKYWARD_DEBUGGER"] or "1"
    try:
        fails(6) >> sky
    except ValueError as problem:
        print("failed:", problem)
    sky.post_mortem()


def quitting() -> None:
    try:
        steps(1) >> sky
    except bdb.BdbQuit:
        print("the call was ended")


def cancelled(marker: str) -> None:
    try:
        waits(marker) >> sky
    except KeyboardInterrupt:
        print("Ctrl-C cancelled the call")


SCENES = {
    "steps": lambda: print("result", steps(4) >> sky),
    "limited": lambda: print("result", limited() >> sky),
    "ranked": lambda: print("result", ranked() @ sky),
    "failing": failing,
    "quitting": quitting,
    "future": lambda: print("result", (steps(5) > sky).result()),
}


def main() -> None:
    with sky.Compute(nodes=2, options=sky.Options(console=False)):
        while True:
            wanted, _, rest = input("scene? ").partition(" ")
            if wanted == "over":
                break
            began = time.monotonic()
            cancelled(rest) if wanted == "cancelled" else SCENES[wanted]()
            print("scene played", round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
