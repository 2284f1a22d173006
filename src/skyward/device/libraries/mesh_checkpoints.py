"""PyTorch's checkpoints of models on a mesh: each shard is written once, as PyTorch does it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from skyward.device.libraries import wrap


def of_dtensors(module: Any) -> None:
    """A DTensor of a mesh is all of its shards, not the one of a process."""
    import torch

    from skyward.device import sharded

    def write_items(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_all_ranks(self: Any, fqn: str, value: Any) -> Any:
            if not sharded.is_sharded(self):
                return original(self, fqn, value)
            from torch.distributed.checkpoint import metadata, planner

            properties = metadata.TensorProperties.create_from_tensor(self._local_tensor)
            return [
                planner.WriteItem(
                    index=metadata.MetadataIndex(fqn, chunk.offsets),
                    type=planner.WriteItemType.SHARD,
                    tensor_data=planner.TensorWriteData(chunk, properties, self.size()),
                )
                for chunk in self.__create_chunk_list__()
            ]

        return of_all_ranks

    def chunk_list(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_all_ranks(self: Any) -> Any:
            if not sharded.is_sharded(self):
                return original(self)
            from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

            return [
                ChunkStorageMetadata(torch.Size(start), torch.Size(shard.size))
                for start, shard in sharded.shards(self).items()
            ]

        return of_all_ranks

    def get_shard(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_its_rank(self: Any, index: Any) -> Any:
            if not sharded.is_sharded(self):
                return original(self, index)
            return sharded.read_shard(self, sharded.shards(self)[tuple(index.offset)])

        return of_its_rank

    wrap(module.DTensor, "__create_write_items__", write_items)
    wrap(module.DTensor, "__create_chunk_list__", chunk_list)
    wrap(module.DTensor, "__get_tensor_shard__", get_shard)


def _loads(module: Any) -> None:
    """What is read for a DTensor of a mesh is written by the ranks that it is for."""
    import torch

    from skyward.device import sharded

    def look_up(original: Callable[..., Any]) -> Callable[..., Any]:
        def or_make(self: Any, index: Any) -> Any:
            tensor = self.state_dict.get(index.fqn)
            if not sharded.is_sharded(tensor):
                return original(self, index)
            return torch.empty(sharded.shards(tensor)[tuple(index.offset)].size, dtype=tensor.dtype)

        return or_make

    def commit(original: Callable[..., None]) -> Callable[..., None]:
        def to_its_ranks(self: Any, read_item: Any, tensor: Any) -> None:
            index = read_item.dest_index
            target = self.state_dict.get(index.fqn)
            if not sharded.is_sharded(target):
                return original(self, read_item, tensor)
            shard = sharded.shards(target)[tuple(index.offset)]
            return sharded.write_shard(target, shard, tensor, read_item.dest_offsets)

        return to_its_ranks

    wrap(module.DefaultLoadPlanner, "lookup_tensor", look_up)
    wrap(module.DefaultLoadPlanner, "commit_tensor", commit)


def _stages(module: Any) -> None:
    """What is saved while training goes on is copied on the mesh, where its shards are."""
    from skyward.device import mesh

    def offload(original: Callable[..., Any]) -> Callable[..., Any]:
        def or_copy(self: Any, x: Any, memo: Any, *args: Any, **options: Any) -> Any:
            if mesh.mesh_of(x) is None:
                return original(self, x, memo, *args, **options)
            copied = memo[id(x)] = x.detach().clone()
            return copied

        return or_copy

    wrap(module.StateDictStager, "_offload_tensor", offload)


def _whole_states(module: Any) -> None:
    import torch
    from torch.utils import _pytree

    from skyward.device import mesh

    def gather(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_their_mesh(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = (x for x in _pytree.tree_leaves(state_dict) if isinstance(x, torch.Tensor))
            device = next((x.device for x in tensors if mesh.mesh_of(x) is not None), None)
            if device is None:
                return original(state_dict, *args, **kwargs)
            # It moves each tensor to the current device of its kind.
            with torch.sky.device(device):  # type: ignore[attr-defined]
                return original(state_dict, *args, **kwargs)

        return on_their_mesh

    wrap(module, "_gather_state_dict", gather)


def _states(module: Any) -> None:
    import dataclasses

    import torch

    from skyward.device import mesh, sharded

    def options_of(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_one_program(model: Any, *args: Any, **kwargs: Any) -> Any:
            info = original(model, *args, **kwargs)
            if any(mesh.mesh_of(each) for each in model.parameters()):
                # What this program has, all ranks have.
                return dataclasses.replace(info, broadcast_from_rank0=False)
            return info

        return of_one_program

    def distribute(original: Callable[..., None]) -> Callable[..., None]:
        def to_meshes(full: dict[str, Any], local: dict[str, Any], *args: Any, **kw: Any) -> None:
            def fits(key: str, value: Any) -> bool:
                target: Any = local.get(key)
                return sharded.is_sharded(target) and bool(value.shape == target.shape)

            mine = {key: value for key, value in full.items() if fits(key, value)}
            for key, value in mine.items():
                # Zeros: a shard may be padded, and the padding has to be.
                local[key] = torch.zeros_like(local[key], device=local[key].device_mesh.device)
                sharded.write(local[key], value.detach())
            original({key: full[key] for key in full if key not in mine}, local, *args, **kw)

        return to_meshes

    wrap(module, "_verify_options", options_of)
    wrap(module, "_distribute_state_dict", distribute)


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "torch.distributed._state_dict_utils": _whole_states,
    "torch.distributed.checkpoint._state_dict_stager": _stages,
    "torch.distributed.checkpoint.default_planner": _loads,
    "torch.distributed.checkpoint.state_dict": _states,
}
