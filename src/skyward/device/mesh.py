"""A mesh: PyTorch's DeviceMesh over the processes of a pool, held by one program.

The program issues an operation once, and every rank carries it out on its own tensors, which have
the same layout everywhere. What differs between the ranks is in tensors alone: a rank's place along
a dimension is one, too, so a shard is chosen by an operation like any other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import _tensor_str
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from skyward.device.core import core
from skyward.device.rank_group import RankGroup, choose
from skyward.errors import ConfigurationError

_c10d: Any = distributed_c10d
_printing: Any = _tensor_str
_numbers = itertools.count()
_open: dict[int, Mesh] = {}
"""The meshes by the index of their device."""
_current = threading.local()
"""The current device of a thread before it entered a mesh, and before the one around that."""


def mesh_at(device: torch.device) -> Mesh | None:
    """The mesh whose device this is; None if it is another device."""
    mesh = _open.get(device.index) if device.type == "sky" else None
    return mesh if mesh is not None and mesh.is_open else None


def mesh_of(tensor: torch.Tensor) -> Mesh | None:
    """The mesh that a tensor is on; None if it is on another device."""
    return mesh_at(tensor.device)


def any_open() -> bool:
    """Whether a mesh is open."""
    return any(mesh.is_open for mesh in _open.values())


class Mesh(DeviceMesh):
    """The ranks of `compute.mesh()`, in rows and columns; a slice of one is one, too.

    >>> mesh = compute.mesh(dp=2, tp=4)
    >>> weight = distribute_tensor(weight, mesh["tp"], [Shard(0)])
    """

    device: torch.device
    """The torch device of all ranks: a tensor on it exists once on each."""
    _prefix = ""
    """Of a mesh that is no slice: the name of the group of all ranks."""

    def __init__(self, index: int, sizes: Mapping[str, int], world: str) -> None:
        _forget_closed()
        self._opening = core().openings[index]
        self.device = torch.device("sky", index)
        self._prefix = world
        size = math.prod(sizes.values())
        ranks = torch.arange(size, dtype=torch.int).view(*sizes.values())
        super().__init__("sky", ranks, mesh_dim_names=tuple(sizes), _init_backend=False, _rank=0)
        self._belong_to(self)
        self._add_group(world, list(range(size)))
        names: Any = self.make_groups(self._layout, self._mesh_dim_names)
        self._dim_group_names = names
        _open[index] = self

    def _belong_to(self, root: Mesh) -> None:
        """Be unequal to meshes of another root: PyTorch compares shapes, and keeps results."""
        # PyTorch compares and hashes this field, and sets it only where threads play ranks.
        self._thread_id: Any = root._prefix

    def __repr__(self) -> str:
        return super().__repr__().replace("'sky'", f"'{self.device}'")

    # The ranks.

    @property
    def mesh(self) -> torch.Tensor:
        """The numbers of the ranks; of a slice, of the first one's."""
        whole = self._layout.remap_to_tensor(self._rank_map)
        return self._get_mesh_tensor_from_full_mesh(whole, 0)

    @property
    def root(self) -> Mesh:
        """The mesh that this one is a slice of."""
        root: Any = self._get_root_mesh()
        return root  # type: ignore[no-any-return]

    @property
    def is_open(self) -> bool:
        """Whether the device is still that of this mesh: its index may be another one's now."""
        index = self.root.device.index
        return core().openings[index] == self.root._opening and index in core().open_devices

    @property
    def world(self) -> RankGroup:
        """The process group of all ranks."""
        root = self.root
        found: Any = root._pg_registry[root._prefix]
        return found  # type: ignore[no-any-return]

    def make_groups(self, layout: Any, names: Sequence[str] | None) -> list[str]:
        """Make a process group for each dimension of a layout; their names."""
        root = self.root
        made: dict[str, list[list[int]]] = {}
        for at in range(len(layout)):
            ranks = type(layout)([layout[at]]).remap_to_tensor(root._rank_map).tolist()
            made[f"{root._prefix}-{names[at] if names else at}-{next(_numbers)}"] = ranks
        core().make_groups(self.root.device.index, made)
        for name, ranks in made.items():
            root._add_group(name, ranks[0])
        return list(made)

    def _add_group(self, name: str, ranks: list[int]) -> None:
        group = RankGroup(name, len(ranks), self.device)
        self._pg_registry[name] = group
        # As `new_group` notes its groups, but for the world: this process is none of the ranks.
        world = _c10d._world
        world.pg_map[group] = ("sky", None)
        world.pg_names[group] = name
        world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}
        world.pg_backend_config[group] = "sky:sky"
        tag = f"ptd:{name}"
        world.tags_to_pg.setdefault(tag, []).append(group)
        world.pg_to_tag[group] = tag
        _c10d._register_process_group(name, group)

    def get_rank(self) -> Any:
        """The number of each rank, as a tensor on the mesh."""
        return self.world.rank()

    def get_local_rank(self, mesh_dim: int | str | None = None) -> Any:
        """The place of each rank along a dimension, as a tensor on the mesh."""
        return self.get_group(mesh_dim).rank()

    def get_coordinate(self) -> Any:
        """The place of each rank along each dimension, as tensors on the mesh."""
        return tuple(self.get_local_rank(dim) for dim in range(self.ndim))

    def _sym_get_coordinate(self, index: int) -> Any:
        group: Any = self.get_group(index)
        return group.place()

    def __enter__(self) -> Mesh:
        _current.before = (torch.sky.current_device(), getattr(_current, "before", None))  # type: ignore[attr-defined]
        torch.sky.set_device(self.root.device)  # type: ignore[attr-defined]
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *exception: Any) -> None:
        index, _current.before = _current.before
        torch.sky.set_device(index)  # type: ignore[attr-defined]
        super().__exit__(*exception)

    def __deepcopy__(self, memo: object) -> Mesh:
        return self

    def __getstate__(self) -> Any:
        raise ConfigurationError(
            "a mesh cannot be pickled, nor a tensor that is sharded over it: save it with "
            "torch.distributed.checkpoint.save or in a sky.ModelStore, or torch.save "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True)) of torch.distributed.checkpoint.state_dict; f(x.to_local()) @ "
            "compute gives a function the part of each rank"
        )

    # Data and models.

    def split(self, batch: Any, dim: str | None = None) -> Any:
        """A batch on the mesh, of which each rank along a dimension has its own part.

        `dim` is `dp` if the mesh has that, or else its first dimension. Tensors in lists, tuples
        and dicts are split along their first dimension. Of a DataLoader, it is the batches of an
        epoch.

        >>> for x, y in mesh.split(loader):
        ...     loss = model(x, y)
        """
        from torch.utils import _pytree, data

        if isinstance(batch, data.DataLoader):
            return (self.split(each, dim) for each in batch)
        names = self._mesh_dim_names or ()
        dim = dim or ("dp" if "dp" in names else names[0])
        group: Any = self.get_group(dim)
        size, place = group.size(), group.place()

        def part(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or not tensor.dim():
                return tensor
            if len(tensor) % size:
                raise ConfigurationError(
                    f"mesh.split: a batch of {len(tensor)} has no equal parts for the {size} ranks "
                    f"of {dim!r}; give a DataLoader drop_last=True and a batch_size that is a "
                    f"multiple of {size}"
                )
            there = tensor.to(self.root.device, non_blocking=True)
            return choose(there.view(size, -1, *there.shape[1:]), place)

        return _pytree.tree_map(part, batch)

    def replicate(self, model: torch.nn.Module, dim: str | None = None) -> torch.nn.Module:
        """A model with a copy on each rank, whose gradients are averaged along a dimension.

        It is PyTorch's DistributedDataParallel; give it what `split` returns.

        >>> model = mesh.replicate(model)
        """
        from torch.nn.parallel import DistributedDataParallel

        names = self._mesh_dim_names or ()
        dim = dim or ("dp" if "dp" in names else names[0])
        model = model.to(self.root.device)
        return DistributedDataParallel(model, process_group=self.get_group(dim))

    # Looking in.

    def each(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank, as tensors of the CPU.

        >>> mesh.each(loss)
        [tensor(2.31), tensor(2.28)]
        """
        local = _local(tensor)
        if mesh_of(local) is not self.root:
            raise ConfigurationError(
                f"mesh.each: the tensor is on {local.device}, and the mesh is {self.root.device}"
            )
        size = self.world.size()
        flat = local.detach().contiguous().reshape(-1)
        as_bytes = flat.view(torch.uint8) if flat.numel() else flat
        rows = torch.ops._c10d_functional.all_gather_into_tensor(as_bytes, size, self.world.name)
        here = torch.ops._c10d_functional.wait_tensor(rows).cpu().view(size, -1)
        return [
            row.contiguous().view(local.dtype).reshape(local.shape) if flat.numel() else local.cpu()
            for row in here
        ]

    def on(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The tensor of one rank, as a tensor of the CPU."""
        local = _local(tensor)
        if not 0 <= operator.index(rank) < self.world.size():
            raise ConfigurationError(
                f"on({rank}): the ranks of this mesh are 0 to {self.world.size() - 1}"
            )
        copied = local.detach().contiguous().clone()
        flat = copied.reshape(-1)
        as_bytes = flat.view(torch.uint8) if flat.numel() else flat
        torch.ops._c10d_functional.broadcast_(as_bytes, rank, self.world.name)
        torch.ops._c10d_functional.wait_tensor(as_bytes)
        return copied.cpu()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What each rank has of a tensor, which may be a DTensor."""
    from torch.distributed.tensor import DTensor

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    wait = getattr(local, "wait", None)  # of a collective that is under way
    local = wait() if callable(wait) else local
    # The bytes of a conjugate are those of the tensor that it is a view of.
    return local.resolve_conj().resolve_neg()


def on(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The tensor of one rank of its mesh, as a tensor of the CPU; a method of tensors.

    >>> loss.on(1)
    tensor(2.28)
    """
    if _functional_collectives._are_we_tracing():
        # As `item` does, it ends a compiled graph: here PyTorch traces no function of ours.
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
    mesh = mesh_of(_local(tensor))
    if mesh is None:
        raise ConfigurationError(
            f"on({rank}): the tensor is on {tensor.device}, which is no mesh of compute.mesh()"
        )
    return mesh.on(tensor, rank)


def text_of(tensor: torch.Tensor, original: Callable[..., str], **options: Any) -> str:
    """What a mesh tensor looks like: once, or with the ranks on which it differs.

    Of a large one, only what is shown comes here, and a digest of each rank's.
    """
    mesh = mesh_of(tensor)
    if mesh is None:
        return original(tensor, **options)
    limits = _printing.PRINT_OPTS
    is_large = limits.edgeitems > 0 and tensor.numel() > limits.threshold
    shown = mesh.each(_corners(_local(tensor), limits.edgeitems) if is_large else tensor)
    marks = mesh.each(_digest(_local(tensor))) if is_large else shown
    kinds: list[tuple[torch.Tensor, list[int]]] = []
    for rank, mark in enumerate(marks):
        raw = mark.contiguous().reshape(-1).view(torch.uint8)
        same = next((ranks for kind, ranks in kinds if torch.equal(kind, raw)), None)
        if same is None:
            kinds.append((raw, [rank]))
        else:
            same.append(rank)
    texts = []
    for _, ranks in kinds:
        with _printing.printoptions(threshold=0) if is_large else contextlib.nullcontext():
            text = original(shown[ranks[0]], **options).removesuffix(")")
        words = f"device='{tensor.device}'" + _gradient_text(tensor)
        names = "" if len(kinds) == 1 else f", rank={', '.join(map(str, ranks))}"
        texts.append(f"{text}, {words}{names})")
    return "\n".join(texts)


def _gradient_text(tensor: torch.Tensor) -> str:
    """What PyTorch prints of a tensor that has gradients."""
    if tensor.grad_fn is not None:
        return f", grad_fn=<{tensor.grad_fn.name().rpartition('::')[2]}>"
    return ", requires_grad=True" * tensor.requires_grad


def _corners(tensor: torch.Tensor, edge: int) -> torch.Tensor:
    """What printing shows of a large tensor, with one element in place of all between."""
    rows = []
    for at, size in enumerate(tensor.shape):
        places = torch.arange(size)
        if size > 2 * edge:
            places = torch.cat([torch.arange(edge + 1), torch.arange(size - edge, size)])
        rows.append(places.view(-1, *[1] * (tensor.dim() - 1 - at)).to(tensor.device))
    return tensor.detach()[tuple(rows)]


_DIGESTED = 1 << 22
"""How many words of a tensor are mixed at a time: what that takes is a few times as much."""
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number that is another one on ranks with other bytes, but for one in 2 ** 64 cases.

    It is the sum, modulo 2 ** 64, of the words of eight bytes, each mixed with its place (as
    SplitMix64 does): all bits of a sum depend on all bits of a word, and the order of adding does
    not matter.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(raw) % 8 or raw.storage_offset() % 8:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 8)).clone()
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for begin in range(0, len(raw) // 8, _DIGESTED):
        words = raw.view(torch.int64)[begin : begin + _DIGESTED]
        places = torch.arange(begin + 1, begin + 1 + len(words), device=tensor.device)
        mixed = places.mul_(_GOLDEN).add_(words)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            above = (mixed >> shift).bitwise_and_((1 << 64 - shift) - 1)
            mixed = mixed.bitwise_xor_(above).mul_(factor)
        total += mixed.sum()
    return total


def _forget_closed() -> None:
    """Give up the groups of meshes that are no more."""
    for index, mesh in list(_open.items()):
        if not mesh.is_open:
            del _open[index]
            for name, group in mesh._pg_registry.items():
                _c10d._unregister_process_group(name)
                world = _c10d._world
                for known in (world.pg_map, world.pg_names, world.pg_group_ranks):
                    known.pop(group, None)
                world.pg_backend_config.pop(group, None)
                world.tags_to_pg.pop(world.pg_to_tag.pop(group, ""), None)
