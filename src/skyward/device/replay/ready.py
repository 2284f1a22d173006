"""Runs a program in place of a function, if all is as it was, and changes what it changes."""

from __future__ import annotations

import collections
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skyward.device.library import Core
from skyward.device.replay.numbers import Leaf
from skyward.device.replay.program import KeptProgram, Plan, TapedCall, Unfit, numbers_for
from skyward.device.replay.recorder import Recorder
from skyward.device.replay.surroundings import Spot, home, is_on_host, is_sky, kind_of, local, same
from skyward.device.replay.tape import Name, Uploaded

HOST_MOST = 4 << 10
"""Tensors on the host of more bytes are not compared in each call."""


@dataclass(frozen=True)
class _Argument:
    number: int

    def __call__(self, leaves: list[Any]) -> Any:
        return leaves[self.number]


@dataclass(frozen=True)
class _InPlace:
    place: Spot

    def __call__(self, leaves: list[Any]) -> Any:
        return self.place.get()


class _OnHost:
    """A number on the host, which changes by as much in each call."""

    def __init__(self, tensor: Any, change: float) -> None:
        self._tensor, self._change = tensor, change
        self._version, self._now, self._next = -1, math.nan, math.nan
        self._look()

    def _look(self) -> None:
        if self._tensor._version != self._version:
            # Adding to its memory takes 0.5 us, and adding to the tensor 4 us.
            self._version, self._array = self._tensor._version, self._tensor.detach().numpy()
        # Another program changes it without a new version.
        if (now := self._array.item()) != self._now:
            self._now = now
            self._next = (self._array + self._array.dtype.type(self._change)).item()

    def before(self, leaves: list[Any]) -> Any:
        """What it is when the function begins."""
        self._look()
        return self._now

    def later(self, leaves: list[Any]) -> Any:
        """What it is after the function has changed it."""
        self._look()
        return self._next

    def change(self) -> None:
        """Change it as the function does."""
        self._look()
        self._array[...] = self._now = self._next
        self._next = (self._array + self._array.dtype.type(self._change)).item()


_held: collections.Counter[int] = collections.Counter()
"""How often programs refer to tensors, by `id`."""


def _let_go(program: KeptProgram, tensors: list[int]) -> None:
    """A program is not used any more."""
    _held.subtract(tensors)
    for each in tensors:
        if not _held[each]:
            del _held[each]
    program.drop()


class _Carried:
    """Gradients in whose memory the next ones are made: the user may not have kept them."""

    def __init__(self, owners: list[Any], gradients: list[Any], own: list[Any]) -> None:
        self._owners, self._gradients = owners, gradients
        # Asking for one adds a reference to it, so all are asked for now.
        self._locals = [local(each) for each in gradients if local(each) is not each]
        self._storages = [local(each).untyped_storage() for each in gradients]
        known = {id(each): each for each in map(local, [*own, *gradients])}
        # A view of a tensor has that too.
        known |= {id(each._base): each._base for each in [*known.values()] if each._is_view()}
        over = collections.Counter(each.untyped_storage()._cdata for each in known.values())
        self.sharers = [over[each._cdata] for each in self._storages]
        """How many tensors of the program's are over the storage of each."""

    def references(self) -> list[int]:
        """How often each is referred to."""
        return [*map(sys.getrefcount, self._gradients)]

    def are_kept(self) -> bool:
        """Whether somebody has one of them."""
        there, away = _references(is_there=True), _references(is_there=False)
        return any(
            count > _held[id(gradient)] + (there if owner.grad is gradient else away)
            for count, owner, gradient in zip(
                self.references(), self._owners, self._gradients, strict=True
            )
        ) or any(
            # By its DTensor, and by this list.
            count > _held[id(each)] + 3
            for count, each in zip(map(sys.getrefcount, self._locals), self._locals, strict=True)
        )


@functools.cache
def _references(*, is_there: bool) -> int:
    """How often a gradient that nobody keeps is referred to, if its tensor has it or not."""
    import torch

    owner = torch.zeros(1, requires_grad=True)
    owner.grad = torch.zeros(1)
    carried = _Carried([owner], [owner.grad], [])
    if not is_there:
        owner.grad = None
    return carried.references()[0] - 1  # its own


@functools.cache
def _sharers() -> int:
    """How often the storage of a tensor is referred to that was asked for, besides by tensors."""
    import torch

    tensor = torch.zeros(1)
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1


def _hooks(tensor: Any) -> tuple[bool, bool]:
    return not tensor._backward_hooks, not tensor._post_accumulate_grad_hooks


class Ready:
    """A program with all that is to be looked at and changed on this side."""

    group: list[TapedCall]

    def __init__(self, recorder: Recorder, plan: Plan) -> None:
        import torch
        from torch.utils import _pytree as pytree

        self._core: Core = recorder.core
        self._index = recorder.index
        self._renewed, self._kept_tree = recorder.renewed, recorder.kept_tree
        count = len(recorder.given) - recorder.kept_tree.num_leaves
        self._kept_kinds = [*map(kind_of, recorder.given[count:])]
        self._opening = self._core.openings[self._index]
        sample = plan.sample
        found = recorder.surroundings
        used = {str(which) for kind, which in sample.tape.names if kind == "place"}
        # Gradients that it neither uses nor makes are another function's, which may keep them.
        others = found.owners.keys() - used - sample.replaced.keys()
        self._sample = sample
        self._tensors = {path: each for path, each in found.tensors.items() if path not in others}
        # Gradients that are gone in the end.
        former = {
            path: recorder.gradients[path]
            for path, (before, view) in sample.replaced.items()
            if before and view is None
        }
        self._tensors |= former
        self._other_gradients = [
            (found.owners[path], found.owners[path].grad is None) for path in others
        ]
        self._schedulers = [
            found.schedulers[number] for number, count in sample.schedulers for _ in range(count)
        ]
        self._hosts = {
            path: _OnHost(found.tensors[path], change) for path, change in sample.hosts.items()
        }
        serial = self._core.serial(self._index)

        def slot_of(name: Name) -> int:
            kind, which = name
            if kind == "slot":
                return int(which)
            tensor = self._tensors[str(which)] if kind == "place" else sample.arguments[int(which)]
            slot = self._core.slot(self._index, local(tensor).untyped_storage().data_ptr())
            if slot is None:
                raise Unfit(f"{which} is not on the device any more")
            return slot

        self.program = KeptProgram(self._core, self._index, plan, slot_of)
        self._held = [
            self._core.alias(serial, int(name[1]))
            for name in sample.tape.names
            if name[0] == "slot"
        ]
        more = [*sample.updates.values()]
        more += [each.value for each in sample.results if each.kind == "number"]
        leaves, self._compute = numbers_for(plan, more)
        self._find = [self._finder(leaf) for leaf in leaves]
        self._sent = len(plan.varying)
        self._integers = [at for at, (_, each, _) in enumerate(plan.varying) if each.is_whole]
        self._reals = [at for at, (_, each, _) in enumerate(plan.varying) if not each.is_whole]
        self._updates = [*sample.updates]
        # What has changed once may change again, where it is known what follows from it.
        moving = {each for each in found.numbers if home(each.container) in found.moving}
        free = {leaf for leaf in plan.loose if isinstance(leaf, Spot)} | {*sample.updates} | moving
        free |= {*self._renewed}
        self._guards = found.guards(free)
        self._constant = [
            (self._finder(leaf), value)
            for leaf, value in sample.leaves.items()
            if leaf not in plan.loose and not isinstance(leaf, Spot)
        ]
        on_device = [each for each in self._tensors.values() if is_sky(each)]
        self._device_tensors = [*map(local, on_device)]
        self._dtensors = [
            (each, own, each.requires_grad)
            for each, own in zip(on_device, self._device_tensors, strict=True)
            if each is not own
        ]
        # Others have none.
        self._hooked = [each for each in on_device if each.requires_grad]
        self._hooks = [*map(_hooks, self._hooked)]
        # Gradients that are there after a replay, in memory that stays, or that are not.
        self._remade = [
            (found.owners[path], found.owners[path].grad)
            for path, (_, view) in sample.replaced.items()
            if view is None or view.storage in self.program.carried
        ]
        # What the function lets go of without a look at it may be anything.
        let_go = {path for path, (before, _) in sample.replaced.items() if before} - used
        self._owners = [
            each for each in found.owners.items() if each[0] not in others and each[0] not in let_go
        ]
        # As the function begins: one that it makes anew then is not there.
        self._gradients = [
            None if recorder.gradients.get(path) is None else former.get(path, owner.grad)
            for path, owner in self._owners
        ]
        unneeded = plan.indifferent | self._hosts.keys()
        known = {id(each) for path, each in found.tensors.items() if path in unneeded}
        self._host_tensors = [
            each for each in found.tensors.values() if is_on_host(each) and id(each) not in known
        ]
        self._host_versions = [each._version for each in self._host_tensors]
        self._host_contents = [
            (each, each.clone()) for each in self._host_tensors if each.nbytes <= HOST_MOST
        ]
        self._given_on_host = []
        uploaded = {each.argument for each in sample.tape.steps if isinstance(each, Uploaded)}
        for number, each in enumerate(recorder.given):
            if is_on_host(each) and number not in uploaded:
                if each.nbytes > HOST_MOST:
                    raise Unfit(f"argument {number} is used on the host; move it to the device")
                self._given_on_host.append((number, each.clone()))
        self._fixed = [
            (number, local(each).data_ptr())
            for number, each in enumerate(sample.arguments)
            if is_sky(each) and number not in self.program.inputs
            if ("argument", number) in sample.tape.names
        ]
        self._from_host = [
            at
            for at, number in enumerate(self.program.inputs)
            if is_on_host(sample.arguments[number])
        ]
        written = {name for step in sample.tape.steps for name in getattr(step, "written", ())}
        self._written = [self._tensors[str(which)] for kind, which in written if kind == "place"]
        self._written += [local(each) for each in self._written if local(each) is not each]
        self._setters: list[tuple[Any, int]] = []
        for path, at in self.program.assigned.items():
            if path not in found.owners:
                raise Unfit(f"{path} becomes another tensor in each call")
            self._setters.append((found.owners[path], at))
        self._on_device = [at for at, each in enumerate(recorder.given) if is_sky(each)]
        self._reached = {each.untyped_storage()._cdata for each in self._device_tensors}
        self._device = torch.device("sky", self._index)
        now = torch.accelerator.current_stream(self._device)
        self._streams = [
            torch.Stream(stream_id=each, device_index=self._index, device_type=now.device_type)
            for each in sorted(sample.tape.streams)
        ]
        # Which of the tensors that the program gives each view is, if it is one of them.
        given = iter(range(len(self.program.views)))
        self._fresh = [
            next(given)
            if each.storage[0] == "made" and each.storage not in self.program.kept
            else None
            for each in self.program.views
        ]
        self._results = list(self._found())
        self._kinds = [type(sample.leaves[leaf]) for leaf in leaves]
        own = [
            *self._tensors.values(),
            *self._device_tensors,
            *(each for pair in self._dtensors for each in pair[:2]),
            *self._gradients,
            *self._written,
            *(gradient for _, gradient in self._remade),
        ]
        own = [each for each in own if each is not None]
        remade = [each for each in self._remade if each[1] is not None]
        gradients = [gradient for _, gradient in remade]
        self._carried = _Carried([owner for owner, _ in remade], gradients, own)
        most = [_sharers() + count for count in self._carried.sharers]
        anyhow = [-1] * len(self._device_tensors)
        self.program.watch([*self._device_tensors, *map(local, gradients)], [*anyhow, *most])
        held = [*map(id, own), *map(id, gradients)]
        _held.update(held)
        weakref.finalize(self, _let_go, self.program, held)
        self._is_single = sample.tree == pytree.tree_structure(0)

    def _finder(self, leaf: Leaf) -> Callable[[list[Any]], Any]:
        if isinstance(leaf, Spot):
            return _InPlace(leaf)
        assert isinstance(leaf, tuple)
        if leaf[0] == "argument":
            return _Argument(leaf[1])
        _, path, is_later = leaf
        number = self._hosts.get(path) or _OnHost(self._tensors[path], 0)
        return number.later if is_later else number.before

    def _fits(self, leaves: list[Any]) -> bool:
        import torch

        return (
            self._core.openings[self._index] == self._opening
            and self._guards.hold()
            and self.program.finds_unchanged()
            and [*map(_hooks, self._hooked)] == self._hooks
            and all(
                each._local_tensor is own and each.requires_grad is requires_grad
                for each, own, requires_grad in self._dtensors
            )
            and all(a.grad is b for (_, a), b in zip(self._owners, self._gradients, strict=True))
            and all((each.grad is None) is is_none for each, is_none in self._other_gradients)
            and [each._version for each in self._host_tensors] == self._host_versions
            and all(torch.equal(each, before) for each, before in self._host_contents)
            and all(local(leaves[number]).data_ptr() == at for number, at in self._fixed)
            and all(same(find(leaves), value) for find, value in self._constant)
            and all(torch.equal(leaves[number], each) for number, each in self._given_on_host)
            and self._are_apart(leaves)
            and not self._carried.are_kept()
        )

    def _are_apart(self, leaves: list[Any]) -> bool:
        """Whether no argument shares its memory with another, or with what is reached."""
        storages = [local(leaves[at]).untyped_storage()._cdata for at in self._on_device]
        return len({*storages}) == len(storages) and self._reached.isdisjoint(storages)

    def run(self, leaves: list[Any]) -> tuple[bool, Any]:
        """Have it done if all is as it was; whether it was, and what came of it."""
        import torch
        from torch.utils import _pytree as pytree

        if self._renewed:
            try:
                kept, tree = pytree.tree_flatten([each.get() for each in self._renewed])
            except LookupError:
                return False, None
            if tree != self._kept_tree or [*map(kind_of, kept)] != self._kept_kinds:
                return False, None
            leaves = [*leaves, *kept]
        if not self._fits(leaves):
            return False, None
        given = [find(leaves) for find in self._find]
        if [*map(type, given)] != self._kinds:
            return False, None
        try:
            numbers = self._compute(*given)
        except ArithmeticError:
            numbers = None  # the function raises it where it does
        if numbers is None:
            return False, None
        inputs = [local(leaves[number]) for number in self.program.inputs]
        for at in self._from_host:
            inputs[at] = inputs[at].to(self._device, non_blocking=True)
        reals = [float(numbers[at]) for at in self._reals]
        integers = [numbers[at] for at in self._integers]
        made = self._run(inputs, reals, integers)
        for place, value in zip(self._updates, numbers[self._sent :], strict=False):
            place.set(value)
        for number in self._hosts.values():
            number.change()
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        for owner, gradient in self._remade:
            if owner.grad is not gradient:
                owner.grad = gradient
        for owner, at in self._setters:
            owner.grad = self._view(at, made, inputs, leaves)
        for scheduler in self._schedulers:
            scheduler.step()
        computed = numbers[self._sent + len(self._updates) :]
        flat = [
            self._result(kind, at, made, inputs, leaves, computed) for kind, at in self._results
        ]
        if self._is_single and not self._renewed:
            return True, flat[0]
        count = self._sample.tree.num_leaves
        if self._renewed:
            kept = pytree.tree_unflatten(flat[count:], self._sample.renewed)
            for place, value in zip(self._renewed, kept, strict=True):
                place.set(value)
        return True, pytree.tree_unflatten(flat[:count], self._sample.tree)

    def _run(self, inputs: list[Any], reals: list[float], integers: list[int]) -> list[Any]:
        """Have the program run, between all that the streams do that the function has used."""
        import torch

        if not self._streams:
            return self.program.run(inputs, reals, integers)
        # The program is one row of operations, in which there is nothing to wait for.
        current = torch.accelerator.current_stream(self._device)
        others = [each for each in self._streams if each != current]
        for each in others:
            current.wait_stream(each)
        made = self.program.run(inputs, reals, integers)
        for each in others:
            each.wait_stream(current)
            for tensor in made:
                tensor.record_stream(each)
        return made

    def _view(self, at: int, made: list[Any], inputs: list[Any], leaves: list[Any]) -> Any:
        """One of the tensors of the program, or of those that were there before."""
        fresh, spec = self._fresh[at], self.program.views[at].spec
        found = self._base(at, inputs, leaves) if fresh is None else made[fresh]
        if spec is None:
            return found
        from torch.distributed.tensor import DTensor

        make: Any = DTensor
        return make(found, spec, requires_grad=False)

    def _found(self) -> Iterator[tuple[str, Any]]:
        """How the leaves of the result are found: of what kind each is, and which of them."""
        results = self._sample.results
        views = reads = sum(each.kind == "view" for each in results)
        own, computed = iter(range(views)), iter(range(len(results)))
        for each in results:
            if each.kind == "view":
                yield "view", next(own)
            elif each.kind == "read":
                number, is_tensor = each.value
                yield "cpu" if is_tensor else "item", reads + number
            elif each.kind == "number":
                yield "number", next(computed)
            elif each.kind == "argument":
                yield "argument", each.value
            else:
                yield "is", self._tensors[each.value] if each.kind == "same" else each.value

    def _result(
        self,
        kind: str,
        at: Any,
        made: list[Any],
        inputs: list[Any],
        leaves: list[Any],
        computed: list[Any],
    ) -> Any:
        """One leaf of the result."""
        if kind == "view":
            return self._view(at, made, inputs, leaves)
        if kind == "argument":
            return leaves[at]
        if kind == "number":
            return computed[at]
        return at if kind == "is" else getattr(self._view(at, made, inputs, leaves), kind)()

    def _base(self, at: int, inputs: list[Any], leaves: list[Any]) -> Any:
        """A tensor over a storage that was there before."""
        view = self.program.views[at]
        kind, which = view.storage
        if view.storage in self.program.carried:
            # The next call changes it.
            base = local(self._tensors[self.program.carried[view.storage]])
            return base.detach().as_strided(view.sizes, view.strides, view.offset).clone()
        if view.storage in self.program.uploaded:
            base = inputs[self.program.uploaded[view.storage]]
        else:
            base = local(self._tensors[str(which)] if kind == "place" else leaves[int(which)])
        begin = base.storage_offset() if kind == "argument" else 0
        return base.detach().as_strided(view.sizes, view.strides, begin + view.offset)
