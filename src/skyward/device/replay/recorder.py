"""Records one call of a function: what it does on the device, and what it changes elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from skyward.device.core import core
from skyward.device.replay import tape
from skyward.device.replay.numbers import Leaf, Scope, followed_through_math, plain
from skyward.device.replay.program import DTYPES, Returned, TapedCall, TensorView, Unfit
from skyward.device.replay.rewriting import NotRewritableError, rewritten
from skyward.device.replay.surroundings import (
    Guards,
    Spot,
    Surroundings,
    home,
    is_on_host,
    is_sky,
    local,
)
from skyward.device.replay.tape import Name, TapedOperation


class Lines:
    """The lines of users' programs, by numbers."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, int]] = [("", 0)]
        self._numbers: dict[tuple[str, int], int] = {}

    def now(self) -> int:
        """The number of the line of the user's that runs now."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        line = (frame.f_code.co_filename, frame.f_lineno)
        if line not in self._numbers:
            self._numbers[line] = len(self._lines)
            self._lines.append(line)
        return self._numbers[line]

    def at(self, number: int) -> tuple[str, int]:
        return self._lines[number]


@functools.cache
def _is_ours(file: str) -> bool:
    import torch

    folders = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    return file.startswith((*folders, "<")) or os.sep + "contextlib.py" in file


lines = Lines()


class Recorder:
    """Records one call of a function."""

    def __init__(
        self,
        function: Callable[..., Any],
        varying: set[Spot],
        renewed: list[Spot],
        leaves: list[Any],
    ) -> None:
        from torch.utils import _pytree as pytree

        self._function, self._varying, self._found_renewed = function, varying, renewed
        self.renewed = [*renewed]
        kept, self.kept_tree = pytree.tree_flatten([each.get() for each in renewed])
        self.given = [*leaves, *kept]
        """The arguments, and after these the tensors that the last call has left for this one."""
        self.core = core()
        self.surroundings = Surroundings.of(function, leaves, renewed)
        self.index = -1
        self._scope = Scope()
        self._values: dict[Leaf, float | int] = {}
        self._items: list[Any] = []
        """What `.item()` gave of the device, in order."""
        self._looks_at_host = ""
        self._counts, self._why_not = False, ""
        self.steps: dict[int, int] = {}
        """How often schedulers were stepped, by their numbers."""
        self._is_stepping = False
        self._stepped_at = -1
        """How many operations there were then."""

    def record(self, leaves: list[Any], tree: Any) -> tuple[Any, TapedCall | None]:
        """What the function returns, and what it has done."""
        import torch
        from torch.utils import _pytree as pytree

        found, count = self.surroundings, len(leaves)
        leaves = self.given
        tensors = [*(each for each in leaves if is_sky(each)), *found.tensors.values()]
        indices = {each.device.index for each in tensors if is_sky(each)} | found.devices
        given = self._plant_arguments(leaves)
        args, kwargs = pytree.tree_unflatten(given[:count], tree)
        recording = TapedCall(tape.Tape(), self._scope, self._values, list(leaves))
        unfit = found.problem
        if any(hasattr(local(each), "__tensor_flatten__") for each in tensors):
            unfit = "tensors that consist of others"
        if unfit or len(indices) != 1:
            reached = unfit or f"{len(indices)} devices"
            recording.problem = Unfit(f"it reaches {reached}")
            args, kwargs = pytree.tree_unflatten(leaves[:count], tree)
            return self._function(*args, **kwargs), recording
        self.index = indices.pop()
        others = {
            each: self.core.stats(each).operations
            for each in self.core.open_devices
            if each != self.index
        }
        before = self._before()
        guards = found.guards({*self.renewed})
        self.gradients = {path: owner.grad for path, owner in found.owners.items()}
        drawn = _random_states()
        stream = torch.accelerator.current_stream(self.index)
        self._versions = {path: t._version for path, t in found.tensors.items() if is_on_host(t)}
        self._told = recording.told = {
            path: t.item() for path, t in found.tensors.items() if _is_host(t)
        }
        self._given_versions = {n: t._version for n, t in enumerate(leaves) if is_on_host(t)}
        planted, following = self._plant()
        self.core.use_lines(lines.now)
        with following:
            # Before the block that ends it: a device that is lost raises here.
            self.core.start_tape(self.index)
            following = following.pop_all()
        try:
            with following, followed_through_math(), self._reading(), self._scheduling(planted):
                result = pytree.tree_map(_waited, self._function(*args, **kwargs))
                for owner in found.owners.values():
                    _waited(owner.grad)
        finally:
            content = self.core.stop_tape(self.index)
            ended = {place: place.get() for place in planted}
            self._uproot(planted)
        try:
            slots = self._slots_of_arguments(leaves, before)
            recording.tape = tape.read(
                content,
                {slot: path for path, slot in reversed(before.items())},
                slots,
                self._hosts_of_arguments(leaves),
                {n: each.nbytes for n, each in enumerate(leaves) if is_on_host(each)},
                {
                    n: local(each).storage_offset() * each.itemsize
                    for n, each in enumerate(leaves)
                    if is_sky(each)
                },
            )
            recording.tape.streams.discard(stream.stream_id)
            if torch.accelerator.current_stream(self.index) != stream:
                raise Unfit("it leaves another stream the current one")
            if _random_states() != drawn:
                raise Unfit("it draws random numbers on the host")
            self._explain(recording, ended, guards, others)
            result = self._note_results(recording, result, leaves)
        except Unfit as problem:
            recording.problem = problem
            result = pytree.tree_map(plain, result)
        return result, recording

    def _hosts_of_arguments(self, leaves: list[Any]) -> dict[int, int]:
        """The numbers of arguments on the host by their addresses."""
        found: dict[int, int] = {}
        for number, each in enumerate(leaves):
            if is_on_host(each) and each.numel():
                if each._version != self._given_versions[number] or each.data_ptr() in found:
                    raise Unfit(f"argument {number} is changed on the host, or given twice")
                if each.is_contiguous():
                    found[each.data_ptr()] = number
        return found

    def _slots_of_arguments(self, leaves: list[Any], before: dict[str, int]) -> dict[int, int]:
        """The numbers of arguments by their slots; raises Unfit if one is not alone there."""
        slots: dict[int, int] = {}
        reached = {slot: path for path, slot in before.items()}
        for number, each in enumerate(leaves):
            if not is_sky(each):
                continue
            slot = self._slot(each)
            if slot in slots or slot in reached:
                other = reached.get(slot, f"argument {slots.get(slot)}")
                raise Unfit(f"argument {number} shares its memory with {other}; clone one of them")
            slots[slot] = number
        return slots

    # Before.

    def _plant_arguments(self, leaves: list[Any]) -> list[Any]:
        """Arguments whose numbers remember how they are used."""
        given = list(leaves)
        for number, leaf in enumerate(leaves):
            if type(leaf) is float:
                given[number] = self._leaf(("argument", number), leaf)
        return given

    def _leaf(self, which: Leaf, value: Any) -> Any:
        self._values[which] = value
        return self._scope.leaf(which, value)

    def _plant(self) -> tuple[list[Spot], ExitStack]:
        """Replace numbers that may change; returns their places, and what has code follow them."""
        following = ExitStack()
        self._counts = True
        try:
            following.enter_context(rewritten(self.surroundings.functions))
        except NotRewritableError as problem:
            self._counts, self._why_not = False, str(problem)
        groups = {id(group) for group in self.surroundings.groups}
        planted = []
        for place, value in self.surroundings.numbers.items():
            moves = home(place.container) in self.surroundings.moving
            varies = place in self._varying
            if type(value) is int:
                is_wanted = moves or (varies and self._is_counter(place))
            else:
                is_wanted = type(value) is float and (
                    moves or varies or id(place.container) in groups
                )
            if is_wanted:
                place.set(self._leaf(place, value))
                planted.append(place)
        return planted, following

    def _is_counter(self, place: Spot) -> bool:
        """Whether a whole number there is followed: only code that is rewritten may use it."""
        return self._counts and self.surroundings.counts_for_itself(place)

    def _uproot(self, planted: list[Spot]) -> None:
        """Have plain numbers in all places again."""
        for place in planted:
            with contextlib.suppress(KeyError, IndexError):
                place.set(plain(place.get()))
        for scheduler in self.surroundings.schedulers:
            for key, value in vars(scheduler).items():
                if isinstance(value, list):
                    value[:] = map(plain, value)
                else:
                    vars(scheduler)[key] = plain(value)

    def _of_optimizers(self, planted: list[Spot]) -> list[Spot]:
        """Those that schedulers look at and change."""
        found = self.surroundings
        return [
            each
            for each in planted
            if found.is_of_group(each, found.groups) or home(each.container) in found.moving
        ]

    def _slot(self, tensor: Any) -> int:
        own = local(tensor)
        if hasattr(own, "__tensor_flatten__"):
            raise Unfit("it works with tensors that consist of others")
        slot = self.core.slot(self.index, own.untyped_storage().data_ptr())
        return -1 if slot is None else slot

    def _before(self) -> dict[str, int]:
        """The slots of all tensors of the device, by their paths."""
        return {
            path: self._slot(each)
            for path, each in self.surroundings.tensors.items()
            if is_sky(each) and each.device.index == self.index
        }

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Have numbers that are read from tensors remember that."""
        import torch

        known = {id(each): path for path, each in self.surroundings.tensors.items()}
        recorder, mine = self, threading.get_ident()

        def item(self: Any) -> Any:
            value = torch._C.TensorBase.item(self)
            if threading.get_ident() != mine:
                return value
            if self.device.type == "sky":
                recorder._items.append(recorder._leaf(("read", len(recorder._items)), value))
                return recorder._items[-1]
            path = known.get(id(self))
            if path not in recorder._told:
                recorder._looks_at_host = "item"
                return value
            is_later = self._version != recorder._versions[path]
            return recorder._leaf(("host", path, is_later), value)

        def looking(name: str) -> Callable[..., Any]:
            def look(self: Any, *arguments: Any, **options: Any) -> Any:
                is_here = self.device.type == "cpu" and threading.get_ident() == mine
                # The ranks of a DeviceMesh are a tensor, and stay what they are.
                if is_here and not _is_of_meshes(sys._getframe(1).f_globals):
                    recorder._looks_at_host = name
                return getattr(torch._C.TensorBase, name)(self, *arguments, **options)

            return look

        names = ("__bool__", "__int__", "__float__", "__index__", "tolist", "numpy")
        torch.Tensor.item = item  # type: ignore[method-assign]
        for name in names:
            setattr(torch.Tensor, name, looking(name))
        try:
            yield
        finally:
            for name in ("item", *names):
                delattr(torch.Tensor, name)

    @contextlib.contextmanager
    def _scheduling(self, planted: list[Spot]) -> Iterator[None]:
        """Have schedulers see plain numbers: a replay runs them as they are."""

        def stepping(number: int, step: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if self._is_stepping:
                    return step(*args, **kwargs)
                if args or kwargs:
                    self._looks_at_host = "what it gives to a scheduler"
                self._uproot(self._of_optimizers(planted))
                self.steps[number] = self.steps.get(number, 0) + 1
                self._stepped_at = self.core.stats(self.index).operations
                self._is_stepping = True
                try:
                    return step(*args, **kwargs)
                finally:
                    self._is_stepping = False

            return run

        for number, each in enumerate(self.surroundings.schedulers):
            each.step = stepping(number, each.step)
        try:
            yield
        finally:
            for each in self.surroundings.schedulers:
                del each.step

    # After.

    def _explain(
        self,
        recording: TapedCall,
        ended: dict[Spot, Any],
        guards: Guards,
        others: dict[int, int],
    ) -> None:
        """Find what has changed besides the device's memory; raises Unfit where it is not known."""
        noted = recording.tape
        if noted.problem is not None:
            raise Unfit(*noted.problem)
        for index, operations in others.items():
            if self.core.stats(index).operations != operations:
                raise Unfit(f"it uses sky:{index} besides sky:{self.index}")
        if self._looks_at_host:
            raise Unfit(
                f"it looks at a tensor on the host ({self._looks_at_host}); do so outside, and "
                "give what comes of it as an argument"
            )
        recording.schedulers = tuple(sorted(self.steps.items()))
        if self.steps and self._stepped_at != self.core.stats(self.index).operations:
            raise Unfit("it steps a scheduler before other operations; do so at the end")
        found = self.surroundings
        now = Surroundings.of(self._function, self.given, self.renewed)
        if now.problem:
            raise Unfit(f"it reaches {now.problem}")
        stepped = [found.schedulers[number] for number in self.steps]
        scheduled = [group for each in stepped for group in each.optimizer.param_groups]
        for container, key, path in guards.differences():
            place = Spot(container, key, path)
            numbers = [
                each
                for each in now.numbers
                if each == place or (home(each.container) == home(container) and each.key == key)
            ]
            if found.is_of_group(place, scheduled):
                self._varying.update(numbers)
            elif key is not None and _are_tensors(place.get()):
                # The next recording takes it for an argument and for a result.
                self._found_renewed.append(place)
                raise Unfit(f"it makes {path} anew")
            elif key is None or not numbers:
                raise Unfit(
                    f"it changes {path or 'a variable'}, which a replay would not: give what "
                    "changes as an argument, and return what comes of it"
                )
            else:
                self._note_number(recording, numbers[0], ended, path)
        self._note_hosts(recording, now)
        self._note_replaced(recording, now)
        self.surroundings = now

    def _note_number(
        self, recording: TapedCall, place: Spot, ended: dict[Spot, Any], path: str
    ) -> None:
        """A number that is another one now."""
        last = ended.get(place)
        if last is not None and last is not plain(last) and last.scope is self._scope:
            recording.updates[place] = last.index
        elif type(place.get()) is int and not self._is_counter(place):
            why = self._why_not or "code of a library may use it"
            raise Unfit(
                f"it counts {path}, which is {place.get()} now ({why}): count outside, and give "
                "what follows from it as an argument"
            )
        elif type(place.get()) not in (int, float) or (place in ended and not self._counts):
            raise Unfit(f"it sets {path} to {place.get()!r}, and replay does not know why")
        elif place in ended:
            # Not computed from numbers that vary: those are followed.
            number = self._scope.compute("pos", place.get(), place.get())
            recording.updates[place] = number.index
        else:
            # The next recording follows it.
            self._varying.add(place)

    def _note_hosts(self, recording: TapedCall, now: Surroundings) -> None:
        for path, version in self._versions.items():
            tensor = now.tensors.get(path)
            if tensor is None or tensor._version == version:
                continue
            change = tensor.item() - self._told[path] if path in self._told else 0
            if change != 1 or tensor._version != version + 1:
                raise Unfit(f"it changes {path}, a tensor on the host, and not by counting on")
            recording.hosts[path] = change
            for later in (False, True):
                which = ("host", path, later)
                expected = tensor.item() if later else self._told[path]
                if self._values.get(which, expected) != expected:
                    raise Unfit(f"it reads {path} between two changes")

    def _note_replaced(self, recording: TapedCall, now: Surroundings) -> None:
        """Gradients that are other tensors now."""
        noted = recording.tape
        names = {slot: name for name, slot in noted.slots.items() if name in noted.living}
        for path, owner in now.owners.items():
            former = self.gradients.get(path)
            if owner.grad is former:
                continue
            place = None if former is None else ("place", path)
            if owner.grad is None:
                recording.replaced[path] = place, None
                continue
            if not is_sky(owner.grad) or self._slot(owner.grad) not in names:
                raise Unfit(f"{path} becomes a tensor that was there before")
            recording.replaced[path] = place, _view(owner.grad, names[self._slot(owner.grad)])
        for number, leaf in enumerate(self.given):
            if is_sky(leaf) and leaf.is_leaf and leaf.requires_grad:
                raise Unfit(
                    f"argument {number} requires gradients; make it a variable of the function's"
                )

    def _note_results(self, recording: TapedCall, result: Any, leaves: list[Any]) -> Any:
        """Find what comes back; returns it with plain numbers."""
        from torch.utils import _pytree as pytree

        flat, recording.tree = pytree.tree_flatten(result)
        renewed, recording.renewed = pytree.tree_flatten([each.get() for each in self.renewed])
        count = len(flat)
        flat += renewed
        noted = recording.tape
        names = {slot: name for name, slot in noted.slots.items() if name[0] != "made"}
        names |= {slot: name for name, slot in noted.slots.items() if name in noted.living}
        same = {id(each): path for path, each in self.surroundings.tensors.items()}
        kept = {view.storage for _, view in recording.replaced.values() if view is not None}
        unread = set(range(len(noted.reads)))
        addresses = {read.address: at for at, read in enumerate(noted.reads)}
        on_host = {leaf.data_ptr() for leaf in flat if is_on_host(leaf)}
        items = [at for at, read in enumerate(noted.reads) if read.address not in on_host]
        for leaf in flat:
            found = next((at for at, given in enumerate(leaves) if given is leaf), None)
            if found is not None and not isinstance(leaf, float):
                recording.results.append(Returned("argument", found))
            elif is_sky(leaf) and id(leaf) in same:
                recording.results.append(Returned("same", same[id(leaf)]))
            elif is_sky(leaf):
                slot = self._slot(leaf)
                name = names.get(slot, ("slot", slot))
                if _has_graph(leaf):
                    raise Unfit(
                        "it returns a tensor from which backward() can be called; call it in the "
                        "function, or return loss.detach()"
                    )
                if name[0] == "slot":
                    raise Unfit("it returns a tensor that replay cannot find where it comes from")
                kept.add(name)
                view = _view(leaf, name)
                if name[0] == "argument":
                    # Told from where the argument begins.
                    begin = local(leaves[int(name[1])]).storage_offset()
                    view = dataclasses.replace(view, offset=view.offset - begin)
                recording.results.append(Returned("view", view))
            elif is_on_host(leaf) and leaf.data_ptr() in addresses:
                at = addresses[leaf.data_ptr()]
                if (tuple(leaf.shape), leaf.stride()) != noted.reads[at][3:5]:
                    raise Unfit("it returns a part of what it has copied from the device")
                unread.discard(at)
                recording.results.append(Returned("read", (at, True)))
            elif any(leaf is each for each in self._items):
                at = items[next(n for n, each in enumerate(self._items) if each is leaf)]
                unread.discard(at)
                recording.results.append(Returned("read", (at, False)))
            elif getattr(leaf, "scope", None) is self._scope:
                recording.results.append(Returned("number", leaf.index))
            elif is_on_host(leaf):
                raise Unfit(
                    "it returns a tensor on the host that it has not copied from the device"
                )
            elif self.steps and isinstance(leaf, float):
                raise Unfit("it returns a number that a scheduler may change; read that outside")
            else:
                recording.results.append(Returned("constant", leaf))
        if unread or len(items) != len(self._items):
            read = noted.reads[min(unread, default=0)]
            raise Unfit(
                "it reads a value of the device and does not return it; return the tensor, and "
                "read the value outside",
                read.line,
            )
        kept |= {read.storage for read in noted.reads}
        self._check_living(recording, kept)
        return pytree.tree_unflatten(list(map(plain, flat[:count])), recording.tree)

    def _check_living(self, recording: TapedCall, kept: set[Name]) -> None:
        """What was made and still lives has to be known: somebody may look at it."""
        noted = recording.tape
        left = noted.living - kept
        if left:
            gc.collect()
            serial = self.core.serial(self.index)
            alive = {life.slot for life in self.core.living(serial)}
            left = {name for name in left if noted.slots[name] in alive}
        operations = [step for step in noted.steps if isinstance(step, TapedOperation)]
        for step in operations:
            if left.intersection(step.made):
                raise Unfit(
                    f"what {step.name} makes is kept after the call, where replay cannot find it: "
                    "return it, or let go of it (call backward() in the function, or use "
                    "torch.no_grad())",
                    step.line,
                )


def _is_of_meshes(variables: dict[str, Any]) -> bool:
    """Whether code is that of PyTorch's meshes and DTensors."""
    name = str(variables.get("__name__"))
    return name.startswith(("torch.distributed.device_mesh", "torch.distributed.tensor."))


def _waited(leaf: Any) -> Any:
    """What a collective gives, when it has come; a DTensor has it in itself then."""
    own = local(leaf)
    if type(own).__name__ != "AsyncCollectiveTensor":
        return leaf
    if own is leaf:
        return leaf.wait()
    leaf._local_tensor = own.wait()
    return leaf


def _are_tensors(value: Any) -> bool:
    """Whether it is a tensor of a device, or a list or tuple of such."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_are_tensors, value))
    return is_sky(value)


def _is_host(leaf: Any) -> bool:
    """Whether it is one number on the host."""
    return is_on_host(leaf) and leaf.numel() == 1 and not leaf.dtype.is_complex


def _view(tensor: Any, name: Name) -> TensorView:
    code = DTYPES.index(str(tensor.dtype)[6:])
    own, spec = local(tensor), getattr(tensor, "_spec", None)
    return TensorView(name, code, tuple(own.shape), own.stride(), own.storage_offset(), spec)


def _has_graph(tensor: Any) -> bool:
    """Whether gradients can still flow back from it: `backward` frees what it has used."""
    todo, seen = [tensor.grad_fn], {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    getattr(node, name)
                except RuntimeError:
                    return False
        todo += [each for each, _ in node.next_functions]
    return tensor.grad_fn is not None


def _random_states() -> tuple[Any, ...]:
    """The states of what draws random numbers on the host."""
    import torch

    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else ()
    return random.getstate(), str(drawn), torch.get_rng_state().numpy().tobytes()
