"""Inquiry: where the workers of all of this user's pools are, asked of the pools' own processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from skyward.errors import SkywardError
from skyward.nodes import keeping
from skyward.nodes.reaching import ReachedPool
from skyward.nodes.stacks import PoolStacks, read_stacks
from skyward.page.sockets import STACKS, addresses, connect

ANSWER_SECONDS = 10.0
"""How long a process has to answer for its pools."""
AT_ONCE = 16
"""How many processes and pools are asked at the same time."""


def all_stacks(name: str | None = None) -> list[PoolStacks]:
    """The stacks of the pools of this user's processes and of those that stay, by name.

    A pool of that name, if one is given. A pool that does not answer has a problem instead.
    """
    asked = [partial(_of_process, address) for address in addresses()]
    found = {pool.pool: pool for pool in _asked(asked)}
    kept = [each for each in keeping.names() if name in (None, each)]
    # A pool that stays is also one of the process that is attached to it.
    for pool in _asked([partial(_of_kept, each, set(found)) for each in kept]):
        found[pool.pool] = pool
    wanted = [pool for pool in found.values() if name in (None, pool.name)]
    return sorted(wanted, key=lambda pool: (pool.name, pool.pool))


def _asked(questions: Sequence[Callable[[], list[PoolStacks]]]) -> list[PoolStacks]:
    if not questions:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(questions)), "skyward-stacks") as threads:
        return [pool for pools in threads.map(lambda ask: ask(), questions) for pool in pools]


def _of_process(address: str) -> list[PoolStacks]:
    connection = connect(address, STACKS)
    if connection is None:
        return []
    with connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            with connection.makefile("rb") as lines:
                return msgspec.json.decode(lines.readline(), type=list[PoolStacks])
        except (OSError, msgspec.DecodeError) as problem:
            process = address.removesuffix(".sock").rpartition("-")[2]
            why = f"the process {process} does not answer for its pools: {problem}"
            return [PoolStacks(f"process {process}", "?", (), why)]


def _of_kept(name: str, known: set[str]) -> list[PoolStacks]:
    try:
        record = keeping.read(name)
        if record.id in known or record.stopped:
            return []
        with ReachedPool(record) as pool:
            look = partial(read_stacks, pool.nodes, pool.service)
            return [PoolStacks.of(record.id, name, look)]
    except (SkywardError, OSError, EOFError) as problem:
        return [PoolStacks(name, name, (), str(problem) or type(problem).__name__)]
