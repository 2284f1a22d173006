"""Shared state and objects on nodes, in a kept pool."""

from __future__ import annotations

import gc

import pytest

import skyward as sky

from ..conftest import PATIENCE
from .conftest import Script


@sky.function
def adds() -> int:
    return sky.counter("n").add()


class Marked:
    """An object that can be found in its process."""

    def there(self) -> bool:
        return True


@sky.function
def marked() -> int:
    gc.collect()
    return sum(type(each).__name__ == "Marked" for each in gc.get_objects())


def test_shared_state_stays_and_objects_go_with_the_client_that_made_them(kept: str) -> None:
    with sky.attach(kept) as compute:
        assert sorted(adds() @ compute) == [1, 2]
        handles = sky.cls(Marked)() @ compute
        assert handles.there() == [True, True]
        assert marked() @ compute == [1, 1]
    with sky.attach(kept) as compute:
        assert sky.counter("n").value == 2
        assert sorted(adds() @ compute) == [3, 4]
        assert marked() @ compute == [0, 0]


@sky.function
def asks() -> bool:
    return bool(sky.dict("handles")["marked"].there())


def test_a_handle_of_a_client_that_has_left_says_so(kept: str) -> None:
    with sky.attach(kept) as compute:
        sky.dict("handles")["marked"] = compute.run(sky.cls(Marked)(), on=0)
        assert compute.run(asks(), on=1)
    with sky.attach(kept) as compute:
        with pytest.raises(
            sky.errors.InstanceLostError, match=r"Marked\.there .*client that .* has left"
        ):
            compute.run(asks(), on=1)


def test_a_client_that_is_killed_beside_its_pool_frees_its_locks_at_once(
    kept: str, script: Script
) -> None:
    if kept.endswith("tcp"):
        pytest.skip("over a network, the end of a connection may be an outage")
    with script(f"""
        compute = sky.attach({kept!r}).start()
        sky.lock("mine", lease=3600, on=compute).acquire()
        print("held", flush=True)
        sys.stdin.read()
    """) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    with sky.attach(kept), sky.lock("mine", timeout=PATIENCE) as lock:
        assert lock.abandoned
