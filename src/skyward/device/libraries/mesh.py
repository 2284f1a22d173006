"""PyTorch's DTensor and FSDP, where they reckon with the rank of the process that they run in."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from packaging.version import Version

from skyward.device.libraries import Patches, mesh_checkpoints, wrap
from skyward.errors import ConfigurationError


def _is_place(rank: Any) -> bool:
    """Whether a rank is that of each rank of a mesh."""
    return getattr(getattr(rank, "device", None), "type", "") == "sky"


def _check_even(size: Any, parts: int) -> None:
    if size % parts:
        raise ConfigurationError(
            f"a dimension of {size} has no equal parts for {parts} ranks, and the tensors of a "
            f"mesh have the same layout on each; pad it to {-(-size // parts) * parts}, or leave "
            "the tensor whole: Replicate(), or a module of its own without fully_shard"
        )


def _stacked(shards: list[Any]) -> Any:
    """The shards as one tensor; raises if they are not alike."""
    import torch

    for shard in shards:
        if shard.shape != shards[0].shape:
            _check_even(sum(each.shape[0] for each in shards), len(shards))
            raise ConfigurationError(
                f"shards of {list(shards[0].shape)} and of {list(shard.shape)}: the tensors of a "
                "mesh have the same layout on each rank; pad the whole until they are alike, or "
                "leave it whole: Replicate()"
            )
    return torch.stack(list(shards))


def _chosen(shards: list[Any], place: Any) -> Any:
    from skyward.device.rank_group import choose

    return choose(_stacked(shards), place)


def _check_no_mesh(what: str) -> None:
    """Raise if a mesh is open, where PyTorch looks for what a process per rank has."""
    from skyward.device.mesh import any_open

    if any_open():
        raise ConfigurationError(
            f"compute.mesh() makes no {what}: this program is none of the ranks; give "
            'mesh=mesh["dp"] or group=mesh.get_group("dp"), or mesh.world for the group of all '
            "ranks; in place of new_group, name a dimension: compute.mesh(dp=2, tp=2)"
        )


def _collectives(module: Any) -> None:
    """Collectives with a rank that differs from the others: one program does what each has to."""
    from skyward.device.rank_group import RankGroup

    def scatter(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_all_ranks(
            tensor: Any,
            scatter_list: Any = None,
            src: int | None = None,
            group: Any = None,
            async_op: bool = False,
            group_src: int | None = None,
        ) -> Any:
            if not isinstance(group, RankGroup):
                return original(tensor, scatter_list, src, group, async_op, group_src)
            options = module.ScatterOptions()
            options.rootRank = first_or(group, src, group_src)
            return waited(group.scatter([tensor], [scatter_list or []], options), async_op)

        return on_all_ranks

    def gather(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_all_ranks(
            tensor: Any,
            gather_list: Any = None,
            dst: int | None = None,
            group: Any = None,
            async_op: bool = False,
            group_dst: int | None = None,
        ) -> Any:
            if not isinstance(group, RankGroup):
                return original(tensor, gather_list, dst, group, async_op, group_dst)
            first_or(group, dst, group_dst)
            return waited(group.gather([gather_list or []], [tensor]), async_op)

        return on_all_ranks

    def first_or(group: Any, rank: int | None, group_rank: int | None) -> int:
        if rank is None and group_rank is None:
            group_rank = 0
        found: int = module._canonicalize_group_rank(group, rank, group_rank, return_global=False)
        return found

    def waited(work: Any, async_op: bool) -> Any:
        if async_op:
            return work
        work.wait()
        return None

    def check_not_self(original: Callable[..., None]) -> Callable[..., None]:
        def in_a_process_of_its_own(group: Any, rank: int, rank_type: str) -> None:
            # The group says why it does not send.
            if not isinstance(group, RankGroup):
                original(group, rank, rank_type)

        return in_a_process_of_its_own

    def default_group(original: Callable[..., Any]) -> Callable[..., Any]:
        def or_what_to_write(*args: Any, **kwargs: Any) -> Any:
            if not module.is_initialized():
                _check_no_mesh("default group")
            return original(*args, **kwargs)

        return or_what_to_write

    def get_rank(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda group=None: group.rank() if isinstance(group, RankGroup) else original(group)

    wrap(module, "get_rank", get_rank)
    wrap(module, "scatter", scatter)
    wrap(module, "gather", gather)
    wrap(module, "_check_not_self_rank", check_not_self)
    wrap(module, "_get_default_group", default_group)
    _object_collectives(module)


def _object_collectives(module: Any) -> None:
    """Collectives of objects, all of which this program has."""
    from skyward.device.rank_group import RankGroup

    def keep_objects(original: Callable[..., Any]) -> Callable[..., Any]:
        def in_one_program(object_list: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(group_of(original, (object_list, *args), kwargs), RankGroup):
                original(object_list, *args, **kwargs)

        return in_one_program

    def gather_object(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_one_program(
            obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            group = group_of(original, (obj, object_gather_list, *args), kwargs)
            if not isinstance(group, RankGroup):
                original(obj, object_gather_list, *args, **kwargs)
            elif object_gather_list is not None:
                module.all_gather_object(object_gather_list, obj, group)

        return of_one_program

    def no_objects(original: Callable[..., Any]) -> Callable[..., Any]:
        def for_a_rank(*args: Any, **kwargs: Any) -> Any:
            if isinstance(group_of(original, args, kwargs), RankGroup):
                raise ConfigurationError(
                    f"{original.__name__} is for a process per rank, and one program, which has "
                    "all objects, runs for all ranks of a mesh: use the objects here, or give each "
                    "rank its tensors with mesh.split(batch)"
                )
            return original(*args, **kwargs)

        return for_a_rank

    def group_of(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return inspect.signature(function).bind(*args, **kwargs).arguments.get("group")

    wrap(module, "broadcast_object_list", keep_objects)
    wrap(module, "gather_object", gather_object)
    for name in ("scatter_object_list", "send_object_list", "recv_object_list"):
        wrap(module, name, no_objects)


def _functional_collectives(module: Any) -> None:
    import torch

    from skyward.device.rank_group import RankGroup, check_exchanged, choose

    def exchange(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_equal_parts(
            self: Any, output_split_sizes: Any, input_split_sizes: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if self.device.type == "sky":
                check_exchanged(output_split_sizes or [], input_split_sizes or [])
            return original(self, output_split_sizes, input_split_sizes, *args, **kwargs)

        return of_equal_parts

    def permute(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(self: Any, src_dst: list[int], group: Any, tag: str = "") -> Any:
            if self.device.type != "sky":
                return original(self, src_dst, group, tag)
            on, dim = group if isinstance(group, tuple) else (group, None)
            ranks = on if isinstance(on, RankGroup) else on.get_group(dim)
            if sorted(src_dst) != list(range(ranks.size())):
                raise ConfigurationError(
                    f"permute_tensor: {src_dst} does not send one tensor to each of the "
                    f"{ranks.size()} ranks, and the tensors of a mesh have the same layout on each"
                )
            sources = [src_dst.index(rank) for rank in range(ranks.size())]
            rows = module.all_gather_single(self.unsqueeze(0), 0, ranks)
            source = choose(rows.new_tensor(sources, dtype=torch.int64), ranks.place())
            return choose(rows, source)

        return on_each_rank

    wrap(module, "all_to_all_single", exchange)
    wrap(module, "permute_tensor", permute)


def _device_mesh(module: ModuleType) -> None:
    from skyward.device import mesh

    def init(original: Callable[..., None]) -> Callable[..., None]:
        def of_a_slice(self: Any, *args: Any, **kwargs: Any) -> None:
            root = kwargs.get("_root_mesh")
            if not isinstance(root, mesh.Mesh):
                original(self, *args, **kwargs)
                return
            self.__class__ = mesh.Mesh
            self.device = root.device
            original(self, *args, **{**kwargs, "_rank": 0})
            self._belong_to(root)

        return of_a_slice

    def set_up(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_processes(self: Any) -> Any:
            if isinstance(self, mesh.Mesh):
                return None
            if self._device_type == "sky":
                raise ConfigurationError(
                    "a DeviceMesh of 'sky' devices is made by compute.mesh(dp=2, tp=4), which "
                    "starts its ranks"
                )
            return original(self)

        return of_processes

    def init_groups(original: Callable[..., Any]) -> Callable[..., Any]:
        def or_have_them_made(
            self: Any, layout: Any, rank_map: Any, names: Any, override: Any
        ) -> Any:
            if isinstance(self, mesh.Mesh):
                return self.make_groups(layout, names)
            return original(layout, rank_map, names, override)

        return or_have_them_made

    wrap(module.DeviceMesh, "__init__", init)
    wrap(module.DeviceMesh, "_setup_world_group_and_device", set_up)
    # It is called on instances, of which the original one knows nothing.
    plain = module.DeviceMesh._init_process_groups
    module.DeviceMesh._init_process_groups = init_groups(plain)


def _untraced(function: Callable[..., Any]) -> Any:
    """A function that torch.compile calls, and does not look into."""
    import torch

    return torch._disable_dynamo(function)  # type: ignore[attr-defined]


def _traced() -> None:
    """Tell torch.compile what of a mesh and of its groups it may trace, and what it must not.

    PyTorch writes a rank into the graph as the number that it is. Here it is another one on each
    rank: an operation of the graph gives it.
    """
    import torch
    from torch._library import opaque_object
    from torch.distributed.device_mesh import DeviceMesh, _register_distributed_opaque_types

    from skyward.device.graphs.text import shipping_library
    from skyward.device.mesh import Mesh
    from skyward.device.rank_group import RankGroup

    _c10d: Any = torch.distributed.distributed_c10d
    opaque: Any = opaque_object

    def place(group: str, device: torch.device) -> torch.Tensor:
        # A graph that runs operation by operation, or one of another compiler.
        return _c10d._resolve_process_group(group).place().clone()  # type: ignore[no-any-return]

    def register(kind: Any, base: Any, names: Callable[[Any], Any], read: str, traced: str) -> None:
        """Of an object, `read` is written into a graph, `traced` becomes operations of it, and all
        other functions end it. `names` are those of the groups, which a graph has in it.
        """
        theirs = opaque.get_opaque_obj_info(base)
        apart = {name for name, each in vars(kind).items() if name[0] != "_" and callable(each)}
        apart -= {*read.split(), *traced.split()}
        for name in apart:
            setattr(kind, name, _untraced(vars(kind)[name]))
        opaque.register_opaque_type(
            kind,
            typ="reference",
            reconstruct_fn=theirs.reconstruct_fn,
            guard_fn=lambda it: [*(theirs.guard_fn(it) if theirs.guard_fn else ()), names(it)],
            members={
                **theirs.members,
                **dict.fromkeys(read.split(), opaque.MemberType.USE_REAL),
                **dict.fromkeys((*apart, *traced.split()), opaque.MemberType.INLINED),
            },
        )

    shipping_library().impl("place", place, "CompositeExplicitAutograd")
    _register_distributed_opaque_types()  # type: ignore[no-untyped-call]
    register(
        Mesh,
        DeviceMesh,
        lambda mesh: mesh._dim_group_names,
        read="device _prefix",
        traced="get_rank get_local_rank get_coordinate _sym_get_coordinate root world",
    )
    register(
        RankGroup,
        torch.distributed.ProcessGroup,
        lambda group: group.name,
        read="name device size group_name group_desc getBackendName",
        traced="rank place",
    )


def _dtensors(module: Any) -> None:
    """Where a tensor goes to the device of its mesh, which PyTorch names by its type alone."""
    import torch

    from skyward.device import mesh

    def there(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_its_mesh(*args: Any, **kwargs: Any) -> Any:
            own = next((x for x in (*args, *kwargs.values()) if isinstance(x, mesh.Mesh)), None)
            # Traced tensors are on their mesh, and a change of device would end the graph.
            if own is None or torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            with torch.sky.device(own.device):  # type: ignore[attr-defined]
                return original(*args, **kwargs)

        return on_its_mesh

    def read(operation: Any, args: Any, kwargs: Any) -> Any:
        # A process per rank reads its own part, and decides for itself. Here, all decide as one.
        tensor = args[0]
        is_here = not isinstance(tensor.device_mesh, mesh.Mesh)
        return operation(tensor._local_tensor if is_here else tensor.detach().full_tensor())

    handlers = module.DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = read
    for name in ("distribute_tensor", "distribute_module", "_dtensor_init_helper"):
        wrap(module, name, there)
    wrap(module.DTensor, "from_local", there)
    mesh_checkpoints.of_dtensors(module)


def _offsets(module: Any) -> None:
    """Where the part of each rank begins in the whole tensor: a tensor on the mesh."""
    import torch
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.distributed.tensor.placement_types import _StridedShardOffsetMode as Offsets

    def size_and_offsets(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(
            size: Any, parts: int, rank: Any, placement: Any, before: Any, end: int, skips: bool
        ) -> Any:
            if not _is_place(rank) or skips:
                return original(size, parts, rank, placement, before, end, skips)
            if isinstance(placement, _StridedShard):
                own, at = placement._local_shard_size_and_offset(size, parts, rank, Offsets.ALL)
            else:
                own, begin = placement._local_shard_size_and_offset(size, parts, rank)
                at = torch.arange(own, device=rank.device) + begin
            if not own:
                return own, torch.tensor([end], device=rank.device)
            return own, at if before is None else before[at]

        return on_each_rank

    def first(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda offsets: offsets[0] if _is_place(offsets) else original(offsets)

    wrap(module, "_get_shard_size_and_offsets", size_and_offsets)
    wrap(module, "_get_first_offset", first)


def _placements(module: Any) -> None:
    import torch

    from skyward.device.rank_group import choose

    def select_part(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(
            self: Any, tensor: Any, num_chunks: int, index: Any, **options: Any
        ) -> Any:
            if not _is_place(index):
                return original(self, tensor, num_chunks, index, **options)
            _check_even(tensor.size(self.dim), num_chunks)
            shards, _ = self._split_tensor(tensor, num_chunks, with_padding=False, contiguous=False)
            return _chosen(shards, index)

        return on_each_rank

    def select(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(shards: list[Any], shard_index: Any) -> Any:
            if _is_place(shard_index):
                return _chosen(shards, shard_index)
            return original(shards, shard_index)

        return on_each_rank

    def unpad(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(
            dim: int, local_tensor: Any, pad_sizes: list[int], rank: Any, make_contiguous: bool
        ) -> Any:
            if not _is_place(rank):
                return original(dim, local_tensor, pad_sizes, rank, make_contiguous)
            if any(pad_sizes):
                parts = len(pad_sizes)
                _check_even(local_tensor.size(dim) * parts - sum(pad_sizes), parts)
            return local_tensor

        return on_each_rank

    def size_and_offset(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(curr_local_size: Any, num_chunks: int, rank: Any) -> Any:
            if _is_place(rank):
                _check_even(curr_local_size, num_chunks)
            return original(curr_local_size, num_chunks, rank)

        return on_each_rank

    def strided_size_and_offsets(original: Callable[..., Any]) -> Callable[..., Any]:
        offsets = module._StridedShardOffsetMode

        def on_each_rank(
            self: Any, size: Any, num_chunks: int, rank: Any, offset_mode: Any = offsets.FIRST
        ) -> Any:
            if not _is_place(rank):
                return original(self, size, num_chunks, rank, offset_mode)
            row = torch.arange(size).view([1] * self.dim + [size])
            shards, _ = self._split_tensor(row, num_chunks, with_padding=False, contiguous=False)
            rows = _stacked([shard.view(-1) for shard in shards])
            if offset_mode is offsets.NONE:
                return rows.shape[1], None
            at = choose(rows.to(rank.device), rank)
            return len(at), at if offset_mode is offsets.ALL else at[0]

        return on_each_rank

    wrap(module.Shard, "_select_split_tensor", select_part)
    wrap(module.Shard, "_maybe_unpad_tensor_with_sizes", unpad)
    wrap(module.Shard, "local_shard_size_and_offset", size_and_offset)
    wrap(module._StridedShard, "_select_split_tensor", select_part)
    wrap(module._StridedShard, "_select_shard", select)
    wrap(module._StridedShard, "local_shard_size_and_offset", strided_size_and_offsets)
    _exchanges(module)


def _exchanges(module: Any) -> None:
    """How placements have ranks give each other their parts."""
    import torch

    def scatter(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(
            output: Any,
            scatter_list: Any,
            mesh: Any,
            mesh_dim: int = 0,
            async_op: bool = False,
            *,
            group_src: int = 0,
        ) -> Any:
            if mesh.device_type != "sky" or output.is_meta:
                return original(output, scatter_list, mesh, mesh_dim, async_op, group_src=group_src)
            group = mesh.get_group(mesh_dim)
            return torch.distributed.scatter(
                output, scatter_list, group=group, async_op=async_op, group_src=group_src
            )

        return on_each_rank

    def exchange(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(
            input: Any, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
        ) -> Any:
            from torch.distributed import _functional_collectives

            # PyTorch's kernel that tells its shape asks for the rank of this process.
            if mesh.device_type != "sky" or not _functional_collectives._are_we_tracing():
                return original(input, gather_dim, shard_dim, mesh, mesh_dim)
            parts = torch.stack(input.chunk(mesh.size(mesh_dim), shard_dim))
            group = mesh.get_group(mesh_dim)
            parts = _functional_collectives.all_to_all_single(parts, None, None, group)
            return torch.cat(parts.unbind(), gather_dim)

        return on_each_rank

    # They were imported there from the module that has them.
    module.mesh_scatter = scatter(module.mesh_scatter)
    module.shard_dim_alltoall = exchange(module.shard_dim_alltoall)


def _fused_steps(module: ModuleType) -> None:
    import torch

    # They return nothing. Where PyTorch does not know that, it runs one on zeros to find out.
    aten: Any = torch.ops.aten
    for step in (aten._fused_adam_.tensor_lr, aten._fused_adamw_.tensor_lr):
        if not step.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
            torch.library.impl(step.name(), "Meta", lambda *args, **kwargs: None)


def _schemas(module: Any) -> None:
    import torch

    from skyward.device.mesh import Mesh

    def rebuild(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_its_device(spec: Any) -> Any:
            if not isinstance(spec.mesh, Mesh) or spec.tensor_meta is None:
                return original(spec)
            # By its kind alone, a fake tensor may be remembered from another mesh.
            shape, stride, dtype = spec.tensor_meta
            return torch.empty_strided(shape, stride, dtype=dtype, device=spec.mesh.root.device)

        return on_its_device

    wrap(module, "_rebuild_tensor_from_dtensor_meta", rebuild)


def _shardable(module: Any) -> None:
    from skyward.device.mesh import Mesh

    def even(original: Callable[..., bool]) -> Callable[..., bool]:
        def without_padding(shape: Any, spec: Any, *args: Any, **kwargs: Any) -> bool:
            # Products and sums would see the padding. What is computed element by element does
            # not ask.
            is_even = not isinstance(spec.mesh, Mesh) or module.is_tensor_evenly_shardable(
                shape, spec
            )
            return is_even and original(shape, spec, *args, **kwargs)

        return without_padding

    wrap(module, "is_tensor_shardable", even)


def _reductions(module: Any) -> None:
    from skyward.device.mesh import Mesh

    def padded(strategy: Any, dims: Any) -> bool:
        specs = [each.output_spec for each in strategy.strategies]
        return isinstance(strategy.mesh, Mesh) and not all(
            module.is_tensor_evenly_shardable_on_dim(spec.shape, spec, dim)
            for spec in specs
            for dim in dims
        )

    def reduction(original: Callable[..., Any]) -> Callable[..., Any]:
        def without_padding(
            input_strategy: Any,
            reduce_dims: Any,
            keep_dim: bool = False,
            reduction_linear: bool = True,
            reduction_op: Any = "sum",
        ) -> Any:
            # The padding of gradients is zero, and adds nothing to their norm.
            is_norm = isinstance(reduction_op, module.NormReduction) and reduction_op.norm_type > 0
            if not is_norm and padded(input_strategy, reduce_dims):
                # The whole tensor has none.
                reduction_linear = False
            return original(input_strategy, reduce_dims, keep_dim, reduction_linear, reduction_op)

        return without_padding

    wrap(module, "common_reduction_strategy", reduction)


def _random(module: Any) -> None:
    from skyward.device import sharded
    from skyward.device.mesh import Mesh

    def init(original: Callable[..., None]) -> Callable[..., None]:
        def without_ranks(self: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(device_mesh, Mesh):
                return original(self, device_mesh, *args, **kwargs)
            return module._RNGStateTracker.__init__(self, device_mesh.device)  # type: ignore[no-any-return]

        return without_ranks

    def region(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(self: Any, spec: Any, generator: Any = None) -> Any:
            if not isinstance(spec.mesh, Mesh):
                return original(self, spec, generator)
            return sharded.WholeDraws(spec, generator)

        return on_each_rank

    wrap(module.OffsetBasedRNGTracker, "__init__", init)
    wrap(module.OffsetBasedRNGTracker, "_distribute_region", region)


def _sharding(module: ModuleType) -> None:
    import torch

    from skyward.device import mesh

    def forward_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_all_or_none(reshard_after_forward: Any, mesh_info: Any) -> Any:
            is_flag = isinstance(reshard_after_forward, bool)
            if isinstance(mesh_info.mesh, mesh.Mesh) and not is_flag:
                raise ConfigurationError(
                    f"fully_shard(reshard_after_forward={reshard_after_forward!r}): give True or "
                    "False on a mesh of compute.mesh()"
                )
            return original(reshard_after_forward, mesh_info)

        return of_all_or_none

    def device(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda of: of.device if isinstance(of, mesh.Mesh) else original(of)

    def default_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
        def or_what_to_write(*args: Any, **kwargs: Any) -> Any:
            if not torch.distributed.is_initialized():
                _check_no_mesh("default mesh")
            return original(*args, **kwargs)

        return or_what_to_write

    wrap(module, "_init_default_mesh", default_mesh)
    wrap(module, "_get_post_forward_mesh_info", forward_mesh)
    wrap(module, "_get_device_from_mesh", device)


def _sharded_parameters(module: Any) -> None:
    import torch

    def stays(original: Callable[..., None]) -> Callable[..., None]:
        def on_the_mesh(self: Any, *args: Any, **kwargs: Any) -> None:
            if self.offload_to_cpu and self.device.type == "sky":
                raise ConfigurationError(
                    "fully_shard(offload_policy=CPUOffloadPolicy()): the parameters would come to "
                    "this machine, which has one tensor where each rank has its own; leave the "
                    "policy out, and give the mesh more ranks if their memory is too small"
                )
            original(self, *args, **kwargs)

        return on_the_mesh

    def reset(original: Callable[..., None]) -> Callable[..., None]:
        @torch.no_grad()
        def with_zeros(self: Any) -> None:
            original(self)
            info, dim = self.mesh_info, self.fsdp_placement.dim
            place, local = getattr(info, "shard_mesh_rank", None), self.sharded_param._local_tensor
            whole, own = self._orig_size[dim], local.size(dim)
            if not _is_place(place) or local.is_meta or own * info.shard_mesh_size == whole:
                return
            rows = torch.arange(own, device=local.device) + place * own
            local.masked_fill_((rows >= whole).view(-1, *[1] * (local.dim() - 1)), 0)

        return with_zeros

    wrap(module.FSDPParam, "_init_sharded_param", stays)
    wrap(module.FSDPParam, "reset_sharded_param", reset)

    def chunks(original: Callable[..., Any]) -> Callable[..., Any]:
        class Chunks(list[Any]):
            """Parts of a tensor, of which each rank finds its own by its place.

            They are padded with zeros to one length, as FSDP's own are for its collectives. The
            padding stays zero in training: its gradients are.
            """

            def __getitem__(self, key: Any) -> Any:
                if not _is_place(key):
                    return super().__getitem__(key)
                first, rows = self[0], []
                for part in self:
                    row = torch.zeros_like(first, requires_grad=False)
                    if part.numel():
                        row[tuple(slice(n) for n in part.shape)] = part.detach()
                    rows.append(row)
                return _chosen(rows, key)

        def with_places(tensor: Any, num_chunks: int, dim: int) -> Any:
            return Chunks(original(tensor, num_chunks, dim))

        return with_places

    # It was imported there from the module that has it.
    module._chunk_with_empty = chunks(module._chunk_with_empty)


def _sharded_collectives(module: Any) -> None:
    import torch

    from skyward.device.rank_group import RankGroup

    def gather(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_each_rank(fsdp_params: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(group, RankGroup):
                return original(fsdp_params, group, *args, **kwargs)
            with group.as_one():
                return original(fsdp_params, group, *args, **kwargs)

        return on_each_rank

    def copy_in(
        inputs: Any, output: Any, sizes: list[int], numel: int, rank: int
    ) -> tuple[Any, Any]:
        # Where each rank's part lies in the whole differs: it is a tensor of its own.
        own = output.new_empty(numel)
        with torch.no_grad():
            torch._foreach_copy_(torch.split(own, sizes), inputs)
        return own, output

    wrap(module, "foreach_all_gather", gather)
    with warnings.catch_warnings():
        # That it takes the place of PyTorch's own.
        warnings.simplefilter("ignore")
        module.lib.impl("all_gather_copy_in", copy_in, "PrivateUse1", allow_override=True)


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "torch.distributed.distributed_c10d": _collectives,
    "torch.distributed._functional_collectives": _functional_collectives,
    "torch.distributed.device_mesh": _device_mesh,
    "torch.distributed.tensor._api": _dtensors,
    "torch.distributed.tensor._utils": _offsets,
    "torch.distributed.tensor.placement_types": _placements,
    "torch.distributed.tensor._op_schema": _schemas,
    "torch.distributed.tensor._ops.utils": _shardable,
    "torch.distributed.tensor._ops._math_ops": _reductions,
    "torch.distributed.tensor._sharding_prop": _fused_steps,
    "torch.distributed.tensor._random": _random,
    "torch.distributed.fsdp._fully_shard._fsdp_init": _sharding,
    "torch.distributed.fsdp._fully_shard._fsdp_param": _sharded_parameters,
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": _sharded_collectives,
}


@functools.cache
def install() -> None:
    """Tell PyTorch of meshes; once per process."""
    import torch

    from skyward.device import mesh

    if Version(torch.__version__) < Version("2.13"):
        raise ConfigurationError(
            f"mesh(): it needs torch 2.13, and this is {torch.__version__}, whose DTensor reckons "
            "with one rank in a process; install a newer one"
        )
    _traced()
    torch.Tensor.on = _untraced(mesh.on)  # type: ignore[attr-defined]
    Patches(PATCHES | mesh_checkpoints.PATCHES).install(everywhere=True)
    original = torch._tensor_str._str

    def text(self: torch.Tensor, **options: Any) -> str:
        # While it is traced, a tensor has no values.
        if torch.distributed._functional_collectives._are_we_tracing():
            return str(original(self, **options))  # type: ignore[no-untyped-call]
        return mesh.text_of(self, original, **options)

    torch._tensor_str._str = text
