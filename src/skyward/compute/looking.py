"""Looking: the nodes, devices and numbers of the pool of a `Compute`."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from skyward.compute.stats import Stats, stats_of
from skyward.compute.values import Keeping
from skyward.errors import ConfigurationError, NoDeviceError
from skyward.nodes.node import NodeView
from skyward.nodes.stacks import Stacks
from skyward.nodes.usage import NodeUsage
from skyward.spec import Nodes
from skyward.state.link import StateLink

if TYPE_CHECKING:
    import torch
_KIND = re.compile(r"[a-z]+(:[0-9]+)?")


class Looking(Keeping):
    """The methods of a `Compute` that show its pool as it is, and resize it."""

    def device(self, kind: str = "auto", index: int = 0, *, node: int = 0) -> torch.device:
        """A torch device on a node: put tensors on it and go on in plain PyTorch.

        `kind` is what the node has: "cuda", "cuda:1", "cpu", "mps", or "auto" for the best of it.

        >>> model.to(compute.device("cuda"))
        """
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise NoDeviceError(
                f"device({kind!r}): there is no such device; give 'cuda', 'cuda:1', 'cpu', 'mps' "
                "or 'auto'"
            )
        if index and ":" in kind:
            raise NoDeviceError(
                f"device({kind!r}, {index!r}): the index is there twice; write "
                f"device({kind!r}), or device({kind.partition(':')[0]!r}, {index!r})"
            )
        if index:
            kind = f"{kind}:{index}"
        try:
            import torch
        except ModuleNotFoundError as problem:
            raise NoDeviceError(
                f"device({kind!r}): this needs torch, also where the script runs; install it with: "
                "pip install 'skyward-torch[torch]'"
            ) from problem
        kind = os.environ.get("SKYWARD_DEVICE") or kind
        return torch.device("sky", self._open_pool.device(node, kind))

    def devices(self, kind: str = "auto") -> list[torch.device]:
        """A torch device on every node that has started.

        >>> first, second = compute.devices("cpu")
        """
        there = [node for node in self.nodes if node.state not in ("starting", "failed")]
        return [self.device(kind, node=node.node) for node in there]

    @property
    def nodes(self) -> list[NodeView]:
        """The nodes as they are now: state, address, accelerator, running tasks."""
        return self._open_pool.views()

    def resize(self, nodes: int | tuple[int, int] | Nodes, *, force: bool = False) -> None:
        """Grow or shrink to that many nodes; `(min, max)` and `Nodes` set new bounds as well.

        Returns when that many nodes are ready; with bounds, when `min` nodes are ready. A pool that
        stays does not shrink while other clients are attached, calls by name go on or scripts run
        on it: the error names them. `force` shrinks it all the same.

        >>> compute.resize(4)
        >>> compute.resize(sky.Nodes(8, min=4))
        """
        if isinstance(nodes, (tuple, list, Nodes)):
            if self._open_pool.stays and not Nodes.of(nodes).floor:
                raise ConfigurationError(
                    f"resize({nodes!r}): a pool that stays has at least one node, which knows its "
                    "clients; give (1, n)"
                )
            self._open_pool.resize(Nodes.of(nodes), force=force)
            return
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise ConfigurationError(
                f"resize({nodes!r}): give a whole number of nodes, 1 or more, (min, max) or Nodes"
            )
        self._open_pool.resize(nodes, force=force)

    def stats(self) -> Stats:
        """The pool's numbers so far: calls, losses, bytes and cost.

        >>> compute.stats().succeeded
        """
        return stats_of(self._open_pool)

    def usage(self, node: int = 0) -> NodeUsage | None:
        """How busy a node is: processors, memory and GPUs; None if it does not answer now.

        Functions that run on the node do not hold up the answer.

        >>> compute.usage().cpu_percent
        """
        return self._open_pool.usage(node)

    def stacks(self) -> Stacks:
        """Where every worker is: the stacks of all its threads, and the tasks that it runs.

        The nodes' agents answer, also for a worker that hangs in C code.

        >>> print(compute.stacks())
        """
        return self._open_pool.stacks()

    def state_link(self) -> StateLink:
        """The way to the shared state, for `sky.dict` and the others."""
        return self._open_pool.state

    def take_numbers(self, values: dict[str, float], step: int | None) -> None:
        """Take what the client logs, for `sky.log`."""
        self._open_pool.teller.logged_here(values, step)

    def worker_count(self) -> int:
        """How many workers there are now."""
        return len(self._open_pool.workers())
