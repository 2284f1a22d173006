"""`sky stacks` of a kept pool: no process has it, and its agents answer."""

from __future__ import annotations

import skyward as sky
from skyward.page.door import all_stacks


def test_a_kept_pool_is_looked_at_without_being_its_client(kept: str) -> None:
    (pool,) = all_stacks(kept)
    assert (pool.name, pool.problem) == (kept, "")
    assert [(process.node, process.worker) for process in pool.processes] == [(0, 0), (1, 0)]
    assert all(process.answered and process.threads for process in pool.processes)


def test_a_kept_pool_with_a_client_is_shown_once(kept: str) -> None:
    with sky.attach(kept) as compute:
        assert [process.pid for process in all_stacks(kept)[0].processes] == [
            process.pid for process in compute.stacks()
        ]
        assert len(all_stacks(kept)) == 1
