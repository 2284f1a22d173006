"""The process groups of a mesh, as its program sees them: collectives are operations like others.

Nothing here waits: each rank of the mesh waits for the others where it carries a collective out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.distributed_c10d import ReduceOp

from skyward.errors import ConfigurationError

# Without PyTorch's types, which have several signatures for each method.
_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = dist.Work
_REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}


def choose(shards: torch.Tensor, place: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """On each rank, the slice that is its own; `place` says which, as `get_local_rank` does."""
    return shards.index_select(dim, place.reshape(1)).squeeze(dim)


def check_exchanged(received: Sequence[int], sent: Sequence[int]) -> None:
    """Check how much each rank gets of the others in an `all_to_all`, and gives them.

    All ranks have these sizes, and what one gets is what another gives: they are equal.
    """
    if len({*received, *sent}) > 1:
        raise ConfigurationError(
            f"all_to_all with parts of {list(sent)} for parts of {list(received)}: the tensors of "
            "a mesh have the same layout on each rank, and so must the parts; pad them to one size"
        )


class RankGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group of the ranks, as this program sees it: its collectives are operations.

    Each rank is in one group of this name.
    """

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        super().__init__(0, size)
        self.name, self.device = name, device
        self._size = size
        self._place: torch.Tensor | None = None
        self._one_in: set[int] = set()
        self._set_group_name(name)

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def group_desc(self) -> str:
        return self.name

    def getBackendName(self) -> str:  # noqa: N802
        return "sky"

    def size(self) -> int:
        return self._size

    @contextlib.contextmanager
    def as_one(self) -> Iterator[None]:
        """Be of rank 0 within a block: for code that passes the rank on and does not look at it.

        It is for this thread alone.
        """
        thread = threading.get_ident()
        self._one_in.add(thread)
        try:
            yield
        finally:
            self._one_in.discard(thread)

    def rank(self) -> Any:
        """The place of each rank in its group, as a tensor that the caller may write to."""
        if _functional_collectives._are_we_tracing():
            return self.place()
        return 0 if threading.get_ident() in self._one_in else self.place().clone()

    def place(self) -> torch.Tensor:
        """The place of each rank in its group: one tensor, which nobody writes to."""
        if _functional_collectives._are_we_tracing():
            # An operation of the graph: no number or tensor of the traced call may stand for it.
            place: torch.Tensor = torch.ops.skyward.place(self.name, self.device)
            return place
        if self._place is None:
            # It is kept: a tensor of inference mode could not be used with gradients later.
            with torch.inference_mode(False):
                # A collective that gives each rank another part of the same row.
                row = torch.arange(self._size, device=self.device)
                ops = torch.ops._c10d_functional
                part = ops.reduce_scatter_tensor(row, "max", self._size, self.name)
                self._place = ops.wait_tensor(part).squeeze(0)
        return self._place

    def __repr__(self) -> str:
        return f"<RankGroup {self.name} of {self._size}>"

    # Collectives. What is on the CPU is the same for all ranks, and goes there and back.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Collective:
        reduction, factor = _reduction(opts)

        def reduce(tensor: torch.Tensor) -> None:
            if factor is not None:
                tensor.mul_(factor)
            torch.ops._c10d_functional.all_reduce_(tensor, reduction, self.name)

        return self._in_place(tensors, reduce)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Collective:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Collective:
        root = 0 if opts is None else opts.rootRank
        return self._in_place(
            tensors, lambda t: torch.ops._c10d_functional.broadcast_(t, root, self.name)
        )

    def _in_place(
        self, tensors: list[torch.Tensor], collective: Callable[[torch.Tensor], object]
    ) -> Collective:
        waiting = []
        for tensor in tensors:
            there = tensor.detach()
            if there.device != self.device or not there.is_contiguous():
                there = there.to(self.device).contiguous()
            collective(there)
            waiting.append((there, tensor))
        return Collective(waiting)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Collective:
        if output.device == self.device and output.is_contiguous():
            # The ranks' tensors come one after the other, also where each has a row of its own.
            flat = output.flatten(0, 1) if output.dim() > input.dim() > 0 else output
            torch.ops._c10d_functional.all_gather_into_tensor_out(
                input.contiguous(), self._size, self.name, out=flat
            )
            return Collective([(output, output)])
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            self._there(input), self._size, self.name
        )
        return Collective([(gathered, output)])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Collective:
        return Collective.of(
            self.all_gather_single(*each) for each in zip(outputs, inputs, strict=True)
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Collective:
        pairs = []
        for targets, source in zip(outputs, inputs, strict=True):
            self._check_one_per_rank(targets)
            gathered = self._gathered(source)
            pairs += list(zip(gathered.unbind(), targets, strict=True))
        return Collective(pairs, is_done=True)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Collective:
        return self.allgather(outputs, inputs) if outputs else Collective([])

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        rows = ops.all_gather_into_tensor(self._there(tensor).unsqueeze(0), self._size, self.name)
        return ops.wait_tensor(rows)  # type: ignore[no-any-return]

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Collective:
        reduction, factor = _reduction(opts)
        there = self._there(input)
        reduced = torch.ops._c10d_functional.reduce_scatter_tensor(
            there if factor is None else there * factor, reduction, self._size, self.name
        )
        return Collective([(reduced, output)])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Collective:
        pairs = zip(outputs, inputs, strict=True)
        return Collective.of(self.reduce_scatter_single(*each, opts) for each in pairs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Collective:
        for parts in inputs:
            self._check_one_per_rank(parts)
        return Collective.of(
            self.reduce_scatter_single(output, torch.stack(parts), opts)
            for output, parts in zip(outputs, inputs, strict=True)
        )

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Collective:
        pairs = []
        for output, parts in zip(outputs, inputs, strict=True):
            self._check_one_per_rank(parts)
            rows = self._there(torch.stack(list(parts)))
            self.broadcast([rows], opts).wait()
            pairs.append((choose(rows, self.place()), output))
        return Collective(pairs, is_done=True)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int] | None = None,
        input_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Collective:
        even = [len(input) // self._size] * self._size
        check_exchanged(output_sizes or even, input_sizes or even)
        exchanged = torch.ops._c10d_functional.all_to_all_single(
            self._there(input), even, even, self.name
        )
        return Collective([(exchanged, output)])

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Collective:
        self._check_one_per_rank(inputs)
        sizes = [[part.numel() for part in parts] for parts in (outputs, inputs)]
        check_exchanged(*sizes)
        whole = torch.cat([part.reshape(-1) for part in inputs])
        ops = torch.ops._c10d_functional
        parts = ops.all_to_all_single(self._there(whole), *sizes, self.name)
        split = ops.wait_tensor(parts).split(sizes[0])
        pairs = [(part.view_as(out), out) for part, out in zip(split, outputs, strict=True)]
        return Collective(pairs, is_done=True)

    def barrier(self, opts: Any = None) -> Collective:
        return self.allreduce([torch.zeros(1, device=self.device)])

    def send(self, *args: Any) -> Collective:
        raise ConfigurationError(
            "send and recv are for a process per rank, and one program runs for all ranks of a "
            "mesh; torch.distributed._functional_collectives.permute_tensor moves tensors from "
            "rank to rank"
        )

    recv = recv_anysource = isend = irecv = send

    def _check_one_per_rank(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._size:
            raise ConfigurationError(
                f"{len(tensors)} tensors for the {self._size} ranks of a group; give one for each"
            )

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device).contiguous()


def _reduction(opts: Any) -> tuple[str, Any]:
    """The name of a reduction, and what each rank multiplies its tensor by before; or None."""
    if opts is None:
        return "sum", None
    wanted = getattr(opts.reduceOp, "op", opts.reduceOp)
    if wanted == ReduceOp.PREMUL_SUM:
        _, factor = opts.reduceOp.__getstate__()
        return "sum", factor
    found = next((name for each, name in _REDUCTIONS.items() if each == wanted), None)
    if found is None:
        raise ConfigurationError(
            f"the reduction {opts.reduceOp} is none of a mesh's; it has "
            f"{', '.join(_REDUCTIONS.values())}"
        )
    return found, None


class Collective(_Work):  # type: ignore[misc]
    """A collective under way; waiting has the ranks wait, not this program."""

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], is_done: bool = False
    ) -> None:
        """Of each pair, the first is what the collective writes to, the second where that goes."""
        super().__init__()
        self._pairs, self._is_done, self._over = list(pairs), is_done, False
        self._outputs = [target for _, target in pairs]

    @classmethod
    def of(cls, works: Any) -> Collective:
        """Several as one."""
        together = cls([])
        for work in works:
            together._pairs += work._pairs
            together._outputs += work._outputs
            together._is_done = work._is_done
        return together

    def wait(self, timeout: timedelta | None = None) -> bool:
        with torch.no_grad():
            for there, target in () if self._over else self._pairs:
                if not self._is_done:
                    torch.ops._c10d_functional.wait_tensor(there)
                at = there.data_ptr()
                # All that wrap other tensors are at 0.
                if not at or at != target.data_ptr() or there.device != target.device:
                    target.detach().copy_(there.view_as(target))
        self._over = True
        self._pairs = []
        return True

    def is_completed(self) -> bool:
        # This program reads no result before it is there: to it, a collective is over at once.
        return self.wait()

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future
