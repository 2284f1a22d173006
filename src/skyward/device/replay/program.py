"""What recordings have in common, as a program for the worker, and what differs, as its numbers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyward.device.library import Core
from skyward.device.replay.numbers import (
    Formula,
    Leaf,
    Scope,
    compiled,
    dependent,
    leaves_of,
)
from skyward.device.replay.surroundings import Spot, local
from skyward.device.replay.tape import (
    GIVE,
    Made,
    Name,
    NumberField,
    SettingsStep,
    Tape,
    TapedOperation,
    Uploaded,
)

DTYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "", "", "", "bfloat16"),
)
"""By their numbers in PyTorch."""
FREE, NEW, UPLOAD, SETTINGS = 0x80000000, 0x7FFFFF04, 0x7FFFFF06, 0x7FFFFF0F


class Unfit(Exception):
    """Recordings are no program; says why, and in which line if that is known."""

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(why)
        self.line = line


@dataclass(frozen=True)
class TensorView:
    """A tensor, by the storage that it is over."""

    storage: Name
    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    spec: Any = None
    """How the ranks have a DTensor in parts, of which this is each one's own."""

    @property
    def bytes(self) -> int:
        """Up to its last element."""
        import torch

        if 0 in self.sizes:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.sizes, self.strides, strict=True))
        return (self.offset + last + 1) * int(getattr(torch, DTYPES[self.dtype]).itemsize)


@dataclass(frozen=True)
class Returned:
    """One leaf of what the function returned.

    `kind` is "view" (a tensor over a storage), "same" (an object that is there before), "argument",
    "read" (the number of a read), "number" (of the scope), or "constant".
    """

    kind: str
    value: Any


@dataclass
class TapedCall:
    """One call of the function."""

    tape: Tape
    scope: Scope
    leaves: dict[Leaf, float | int]
    """What the numbers of the scope begin with."""
    arguments: list[Any]
    results: list[Returned] = field(default_factory=list)
    tree: Any = None
    renewed: Any = None
    """The tree of the last results: what is kept for the next call."""
    updates: dict[Spot, int] = field(default_factory=dict)
    """Places whose numbers have changed, and which of the scope's they have now."""
    told: dict[str, float | int] = field(default_factory=dict)
    """The numbers of tensors on the host, before."""
    hosts: dict[str, float] = field(default_factory=dict)
    """By how much tensors on the host have changed."""
    replaced: dict[str, tuple[Name | None, TensorView | None]] = field(default_factory=dict)
    """Paths that have another tensor now, or none: the storage that was there, and what is."""
    schedulers: tuple[tuple[int, int], ...] = ()
    """Which have gone on, and how many steps."""
    problem: Unfit | None = None

    def difference(self, other: TapedCall) -> Unfit | None:
        """Where two calls did not do the same."""
        for mine, its in zip(self.tape.steps, other.tape.steps, strict=False):
            if mine.shape != its.shape or type(mine) is not type(its):
                line = getattr(its, "line", 0) or getattr(mine, "line", 0)
                if isinstance(mine, Uploaded) and isinstance(its, Uploaded):
                    return Unfit(f"it uploads other bytes in each call; {GIVE}", line)
                return Unfit("it does not do the same in each call", line)
        if self.summary != other.summary:
            return Unfit("it does not do the same in each call")
        return None

    @property
    def summary(self) -> tuple[object, ...]:
        """What is the same in calls that do the same, besides the steps."""
        return (
            len(self.tape.steps),
            [read[1:6] for read in self.tape.reads],
            self.scope.formulas,
            self.scope.conditions,
            [each for each in self.results if each.kind != "constant"],
            self.tree,
            self.renewed,
            self.updates,
            self.hosts,
            self.replaced,
            self.schedulers,
            self.tape.streams,
            str(self.problem),
        )

    def numbers(self) -> list[tuple[int, NumberField]]:
        """The numbers of all operations, each with the operation's index."""
        return [
            (at, number)
            for at, step in enumerate(self.tape.steps)
            if isinstance(step, TapedOperation)
            for number in step.numbers
        ]


@dataclass
class Plan:
    """What calls that do the same have in common."""

    sample: TapedCall
    """The last of them."""
    varying: list[tuple[int, NumberField, int]]
    """Numbers that vary: the operation's index, the number, and which of the scope's it is."""
    conditions: list[tuple[Formula, bool]]
    """What has to be true of numbers."""
    loose: set[Leaf]
    """What has had several values, and may have others."""
    inputs: list[int]
    """The arguments that were other tensors each time."""
    indifferent: set[str]
    """Tensors on the host which were others, while the function did the same."""


def plan(samples: Sequence[TapedCall]) -> Plan:
    """Find what varies, and what it is computed from; raises Unfit where that is not known."""
    last = samples[-1]
    for each in samples:
        if each.problem is not None:
            raise each.problem
    _check_reads(last)
    known: dict[tuple[float | int, ...], list[int]] = {}
    scopes = [each.scope.values for each in samples]
    for at, values in enumerate(zip(*scopes, strict=True)):
        known.setdefault(values, []).append(at)
    taken: dict[tuple[float | int, ...], int] = {}
    varying = []
    for row in zip(*(each.numbers() for each in samples), strict=True):
        if len({number.content for _, number in row}) == 1:
            continue
        at, number = row[-1]
        operation = last.tape.steps[at]
        assert isinstance(operation, TapedOperation)
        values = tuple(each.value for _, each in row)
        found = known.get(values) or _as_element(values, number, scopes)
        if number.is_whole:
            found = [each for each in found if type(scopes[-1][each]) is int]
        if not found:
            raise Unfit(
                f"{operation.name} gets {_told(values)} in calls that are the same otherwise, and "
                f"replay does not know what these come from; {GIVE}",
                operation.line,
            )
        # The first of those that are equal for the first number, the second for the second.
        turn = taken[values] = taken.get(values, -1) + 1
        varying.append((at, number, found[min(turn, len(found) - 1)]))
    for mine, *others in zip(*(each.results for each in samples), strict=True):
        if mine.kind == "constant" and any(mine.value != each.value for each in others):
            told = _told((mine.value, *(each.value for each in others)))
            raise Unfit(f"it returns {told}, and replay does not know what these come from")
    loose = {leaf for leaf in last.leaves if len({each.leaves.get(leaf) for each in samples}) > 1}
    conditions = [*last.scope.conditions]
    for values, rows in known.items():
        # What comes from other numbers and was equal by chance may differ later.
        conditions += [
            (("eq", ("at", rows[0]), ("at", row)), True)
            for row in rows[1:]
            if taken.get(values) is not None
        ]
    # What is computed from numbers that vary, and did not, may be in the program as it was.
    for at, is_loose in enumerate(dependent(last.scope.formulas, loose)):
        if is_loose and len({values[at] for values in scopes}) == 1:
            conditions.append((("eq", ("at", at), ("is", scopes[-1][at])), True))
    # A number that is given and leads nowhere may have gone where nobody follows it.
    followed = leaves_of(
        last.scope.formulas,
        [
            *(index for _, _, index in varying),
            *(operand for each, _ in conditions for kind, operand in each[1:] if kind == "at"),
            *(each.value for each in last.results if each.kind == "number"),
        ],
    )
    loose -= {leaf for leaf in loose - followed if not isinstance(leaf, Spot)}
    loose |= {leaf for leaf in last.leaves if isinstance(leaf, tuple) and leaf[0] == "read"}
    indifferent = {path for path in last.told if len({each.told.get(path) for each in samples}) > 1}
    return Plan(last, varying, conditions, loose, _inputs(samples), indifferent)


def _check_reads(recording: TapedCall) -> None:
    """What is read of the device is known only after the program has run."""
    scope = recording.scope
    reads: set[Leaf] = {
        leaf for leaf in recording.leaves if isinstance(leaf, tuple) and leaf[0] == "read"
    }
    depend = dependent(scope.formulas, reads)
    asked = {at for each, _ in scope.conditions for kind, at in each[1:] if kind == "at"}
    computed = {at for at, is_one in enumerate(depend) if is_one}
    leaves = {at for at in computed if scope.formulas[at][0] == "leaf"}
    if computed != leaves or asked & leaves:
        line = recording.tape.reads[0].line if recording.tape.reads else 0
        raise Unfit("it computes with a value that it has read; return the value alone", line)


def _as_element(
    values: tuple[Any, ...], number: NumberField, scopes: list[list[float | int]]
) -> list[int]:
    """Of a number on the host, which is rounded to its dtype."""
    if number.letter != "h" or number.dtype != 6 or None in values:
        return []
    packed = [struct.pack("<f", each) for each in values]

    def fits(row: tuple[float | int, ...]) -> bool:
        try:
            return [struct.pack("<f", each) for each in row] == packed
        except OverflowError:
            return False

    return [at for at, row in enumerate(zip(*scopes, strict=True)) if fits(row)]


def _told(values: Sequence[Any]) -> str:
    return " and then ".join(map(str, values))


def _inputs(samples: Sequence[TapedCall]) -> list[int]:
    """The arguments on the device that were not one tensor in all calls; those of the host all."""
    last = samples[-1]
    used = {name[1] for name in last.tape.names if name[0] == "argument"}
    uploaded = {step.argument for step in last.tape.steps if isinstance(step, Uploaded)}
    found = []
    for number in range(len(last.arguments)):
        given = [each.arguments[number] for each in samples]
        if number in uploaded or (number in used and _differ(given)):
            found.append(number)
    return found


def _differ(tensors: Sequence[Any]) -> bool:
    """Whether these are not always the same memory; None is one that differed before."""
    own = [t if t is None else local(t) for t in tensors]
    places = {None if t is None else (t.untyped_storage()._cdata, t.data_ptr()) for t in own}
    return None in places or len(places) > 1


class KeptProgram:
    """A program that the worker has, as it is run."""

    def __init__(self, core: Core, index: int, plan: Plan, slots: Callable[[Name], int]) -> None:
        self._core = core
        content = _Content(core, index, plan, slots)
        self.inputs = plan.inputs
        self.views = content.views
        """The tensors that it gives: of results, of what is read, and for places."""
        self.assigned = content.assigned
        """Paths of places that get a new tensor, and which."""
        self.carried, self.uploaded, self.kept = content.carried, content.uploaded, content.kept
        self._statics = content.statics
        self._number = core.add_program(index, content.written())

        import torch

        self._replay = torch.ops.skyward.replay.default

    def run(self, inputs: list[Any], reals: list[float], integers: list[int]) -> list[Any]:
        """Have the worker do it."""
        found: list[Any] = self._replay(self._number, inputs, reals, integers)
        return found

    def watch(self, tensors: list[Any], sharers_most: list[int]) -> None:
        """Look at these in `finds_unchanged`; who runs the program has them as long as it does.

        So many tensors may be over the storage of each, or any number if it is -1.
        """
        import torch

        torch.ops.skyward.watch.default(self._number, tensors, sharers_most)

    def finds_unchanged(self) -> bool:
        """Whether these tensors are as they were."""
        return self._core.finds_unchanged(self._number)

    def drop(self) -> None:
        """Have the worker forget it."""
        self._core.drop_program(self._number)
        self._statics.clear()


class _Content:
    """Puts a program together."""

    def __init__(self, core: Core, index: int, plan: Plan, slots: Callable[[Name], int]) -> None:
        import torch

        self._core, self._index, self._plan = core, index, plan
        tape = plan.sample.tape
        self._tape = tape
        self.statics: list[Any] = []
        self._slots: dict[Name, int] = {}
        self._input_slots: list[tuple[int, int, bool]] = []
        self.uploaded: dict[Name, int] = {}
        """Which input it is that the function copies from the host."""
        self.views: list[TensorView] = []
        self.assigned: dict[str, int] = {}
        written = {name for step in tape.steps for name in getattr(step, "written", ())}
        # Arguments that are copied to the program's own memory, and those that come from the host.
        targets = {
            step.argument: step
            for step in tape.steps
            if isinstance(step, Uploaded) and step.argument is not None
        }
        uploads = [step.argument for step in tape.steps if isinstance(step, Uploaded)]
        for number in plan.inputs:
            if uploads.count(number) > 1:
                raise Unfit(f"it copies argument {number} to the device twice; do so once")
            given = local(plan.sample.arguments[number])
            target = targets.get(number)
            name: Name = ("argument", number) if target is None else target.into
            if target is not None and (name[0] != "made" or target.offset):
                raise Unfit("it copies an argument from the host into a tensor that was there")
            size = _extent(given) if target is None else target.size
            static = torch.empty(max(size, 1), dtype=torch.uint8, device=f"sky:{index}")
            self.statics.append(static)
            slot = core.slot(index, static.data_ptr())
            assert slot is not None
            self._slots[name] = slot
            self._input_slots.append((slot, size, name in written))
            if target is not None:
                self.uploaded[name] = len(self._input_slots) - 1
        self.carried: dict[Name, str] = {}
        """What takes the place of a tensor in its own slot, by the path of the place."""
        self._carry(slots)
        for name in tape.names:
            if name not in self._slots and name[0] != "made":
                self._slots[name] = slots(name)
        self.written_slots = [
            self._slots[name] for name in written if name[0] not in ("made", "argument")
        ]
        self._results: dict[Name, int] = {}
        self._choose_views()
        self._assign()

    def _carry(self, slots: Callable[[Name], int]) -> None:
        """Have what takes the place of a tensor be made in that tensor's slot."""
        steps = self._tape.steps
        for path, (before, view) in self._plan.sample.replaced.items():
            after = view.storage if view is not None else None
            if after is None or after in self.carried:
                continue
            if after[0] != "made":
                raise Unfit(f"{path} becomes a tensor that was there before")
            born = next(
                (at for at, step in enumerate(steps) if after in _made_by(step)), len(steps)
            )
            is_used_later = before and any(before in _used_by(step) for step in steps[born:])
            if after in self._slots or is_used_later:
                self.assigned[path] = -1
            else:
                self._slots[after] = slots(("place", path))
                self.carried[after] = path

    def _choose_views(self) -> None:
        """Those tensors that come from storages that the program makes."""
        sample = self._plan.sample
        self.views = [each.value for each in sample.results if each.kind == "view"]
        self.views += [TensorView(*read[1:6]) for read in self._tape.reads]
        for path in self.assigned:
            self.assigned[path] = len(self.views)
            _, view = sample.replaced[path]
            assert view is not None
            self.views.append(view)
        for view in self.views:
            name = view.storage
            if name[0] == "made" and name not in self.kept and name not in self._results:
                self._results[name] = len(self._results)

    @property
    def kept(self) -> set[Name]:
        """What is made in memory that stays."""
        return {*self.carried, *self.uploaded}

    def _assign(self) -> None:
        """Slots for what is made on the way: as few as there is at a time."""
        steps = self._tape.steps
        last_use: dict[Name, int] = {}
        for at, step in enumerate(steps):
            for name in (*_used_by(step), *_made_by(step)):
                if name[0] == "made" and name not in self._slots:
                    last_use[name] = at
        kept = {name for name in last_use if name in self._results}
        self._frees: dict[int, list[Name]] = {}
        for name, at in last_use.items():
            if name not in kept:
                self._frees.setdefault(at, []).append(name)
        order: dict[Name, int] = {}
        free: list[int] = []
        count = 0
        for at, step in enumerate(steps):
            for name in _made_by(step):
                if name in last_use:
                    if not free:
                        free.append(count)
                        count += 1
                    order[name] = free.pop()
            free += [order[name] for name in self._frees.get(at, ())]
        self._reserved = self._core.reserve(self._index, count) if count else []
        self._slots |= {name: self._reserved[number] for name, number in order.items()}

    def _records(self) -> tuple[bytes, list[int]]:
        """The records, and where in them the numbers are that vary."""
        records = bytearray()
        places: dict[tuple[int, int], int] = {}
        for at, step in enumerate(self._tape.steps):
            if isinstance(step, TapedOperation):
                payload = bytearray(step.payload)
                for name, place in zip(step.used, step.places, strict=True):
                    struct.pack_into("<I", payload, place, self._slots[name])
                for number in step.numbers:
                    places[at, number.at] = len(records) + 4 + number.at
                records += struct.pack("<I", step.template) + payload
                records += b"".join(struct.pack("<I", self._slots[name]) for name in step.made)
            elif isinstance(step, Made):
                if step.made not in self.uploaded:
                    records += struct.pack("<IIQ", NEW, self._slots[step.made], step.bytes)
            elif isinstance(step, SettingsStep):
                records += struct.pack("<IQ", SETTINGS, step.settings)
            elif step.argument is None:
                where = self._slots[step.into], step.offset, len(step.content), 1
                records += struct.pack("<IIQQB", UPLOAD, *where) + step.content
            for name in self._frees.get(at, ()):
                records += struct.pack("<I", FREE | self._slots[name])
        return bytes(records), [places[at, number.at] for at, number, _ in self._plan.varying]

    def written(self) -> bytes:
        """As `csrc/client/programs.cpp` reads it."""
        tape = self._tape
        records, places = self._records()
        changed = [step.settings for step in tape.steps if isinstance(step, SettingsStep)]
        templates = {step.template for step in tape.steps if isinstance(step, TapedOperation)}
        out = bytearray(struct.pack("<QQ", tape.settings, (changed or [tape.settings])[-1]))
        for numbers in (self._reserved, self.written_slots, sorted(templates)):
            out += struct.pack(f"<I{len(numbers)}I", len(numbers), *numbers)
        out += struct.pack("<I", len(places))
        for place, (_, number, _) in zip(places, self._plan.varying, strict=True):
            out += struct.pack("<BBI", ord(number.letter), number.dtype, place)
        out += struct.pack("<I", len(self._input_slots))
        for slot, size, is_written in self._input_slots:
            out += struct.pack("<IQB", slot, size, is_written)
        sizes = dict.fromkeys(self._results, 0)
        for view in self.views:
            if view.storage in sizes:
                sizes[view.storage] = max(sizes[view.storage], view.bytes)
        out += struct.pack("<I", len(self._results))
        for name in self._results:
            out += struct.pack("<IQ", self._slots[name], sizes[name])
        made = [view for view in self.views if view.storage in self._results]
        out += struct.pack("<I", len(made))
        for view in made:
            dim = len(view.sizes)
            out += struct.pack("<IBB", self._results[view.storage], view.dtype, dim)
            out += struct.pack(f"<{2 * dim + 1}q", *view.sizes, *view.strides, view.offset)
        return bytes(out) + records


def _made_by(step: Any) -> list[Name]:
    if isinstance(step, TapedOperation):
        return step.made
    return [step.made] if isinstance(step, Made) else []


def _used_by(step: Any) -> list[Name]:
    if isinstance(step, TapedOperation):
        return step.used
    return [step.into] if isinstance(step, Uploaded) else []


def _extent(tensor: Any) -> int:
    """The bytes from a tensor's first element to its last."""
    view = TensorView(("", 0), DTYPES.index(str(tensor.dtype)[6:]), tuple(tensor.shape), (), 0)
    return TensorView(view.storage, view.dtype, view.sizes, tuple(tensor.stride()), 0).bytes


def numbers_for(plan: Plan, more: Sequence[int]) -> tuple[list[Leaf], Any]:
    """The leaves that a program's numbers need, and what computes them, and `more` of the scope."""
    formulas = plan.sample.scope.formulas
    wanted = [index for _, _, index in plan.varying] + list(more)
    asked = [operand for each, _ in plan.conditions for kind, operand in each[1:] if kind == "at"]
    leaves = sorted(leaves_of(formulas, [*wanted, *asked]), key=repr)
    return leaves, compiled(formulas, leaves, wanted, plan.conditions)
