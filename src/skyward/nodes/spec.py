"""The specification of a pool, which `Compute` makes from its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyward.accelerators import Accelerator
from skyward.nodes.deliveries import SentFolder
from skyward.nodes.preparations import Preparations
from skyward.providers import Provider, Request
from skyward.spec import Nodes, Options, Volume, Worker


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Everything that decides how a pool starts and runs."""

    provider: Provider
    nodes: Nodes
    accelerator: Accelerator | None
    worker: Worker
    options: Options
    request: Request
    name: str
    preparations: Preparations
    keep: float | None = None
    """After how many seconds without a client a pool that stays ends; 0 if it does not, None if the
    pool ends with its client."""
    recorded: str = field(default="", repr=False, compare=False)
    """What another client of a pool that stays needs of this, for the pool's record."""
    id: str = ""
    """The id of a pool that exists, or was stopped; empty for a new one."""
    folders: tuple[SentFolder, ...] = ()
    """Folders of the client that nodes have, too; the first may be the project."""
    volumes: tuple[Volume, ...] = ()
    """The volumes that nodes mount or copy by themselves."""
    notes: tuple[str, ...] = ()
    """What the user asked for and does not get, said once when the pool starts."""
