"""What a function has issued on a device: its operations, and what they work on, by names that
are the same in every recording."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

SIZES = {"s": 4, "w": 4, "o": 8, "h": 16, "g": 4, "i": 8, "r": 8, "c": 16}
"""The fields of an operation's payload; `csrc/client/tape.h` has their meaning."""

ELEMENTS = {0: "<B", 1: "<b", 2: "<h", 3: "<i", 4: "<q", 6: "<f", 7: "<d"}
"""How one number of a dtype lies in memory, by the dtype's number in PyTorch."""
RECORD_TIMED, RECORD, BLOCK, FORGET = 0, 1, 2, 7
"""What is done with an event: `EventAction` in `csrc/wire/records.h`."""
FRACTIONS = 5
"""Dtypes from this number on are not of whole numbers."""
GIVE = "give what differs from call to call as an argument"
Name = tuple[str, int | str]
"""A storage: ("made", its number), ("argument", its number), ("place", its path), or ("slot", its
slot)."""


class NumberField(NamedTuple):
    """A number in the payload of an operation."""

    letter: str
    dtype: int
    at: int
    """Where it is in the payload."""
    content: bytes

    @property
    def value(self) -> float | int | None:
        """What it is; None where it may not vary."""
        if self.letter == "r":
            return float(struct.unpack("<d", self.content)[0])
        if self.letter == "i":
            return int(struct.unpack("<q", self.content)[0])
        if self.letter == "h" and self.dtype in ELEMENTS:
            return cast(float | int, struct.unpack_from(ELEMENTS[self.dtype], self.content)[0])
        return None

    @property
    def is_whole(self) -> bool:
        """Whether it has no fraction."""
        return self.letter == "i" or (self.letter == "h" and self.dtype < FRACTIONS)


@dataclass
class TapedOperation:
    """One operation: on which storages, and with which numbers."""

    line: int
    template: int
    name: str
    payload: bytes
    used: list[Name]
    places: list[int]
    """Where in the payload the slots of `used` are."""
    written: list[Name]
    made: list[Name]
    numbers: list[NumberField]

    @property
    def shape(self) -> tuple[object, ...]:
        """What is the same whenever the function does the same."""
        letters = [(number.letter, number.at) for number in self.numbers]
        return self.template, self.used, self.made, letters


@dataclass
class Made:
    """Memory without content."""

    made: Name
    bytes: int

    @property
    def shape(self) -> tuple[object, ...]:
        return self.made, self.bytes


@dataclass
class Uploaded:
    """Bytes from the host. With an `argument`, they are those of that argument."""

    line: int
    into: Name
    offset: int
    content: bytes
    size: int
    argument: int | None

    @property
    def shape(self) -> tuple[object, ...]:
        content = self.content if self.argument is None else b""
        return self.into, self.offset, content, self.size, self.argument


@dataclass
class SettingsStep:
    """What PyTorch keeps for the whole process, from here on."""

    settings: int

    @property
    def shape(self) -> tuple[object, ...]:
        return (self.settings,)


Step = TapedOperation | Made | Uploaded | SettingsStep


class Read(NamedTuple):
    """A value that the function has read."""

    line: int
    storage: Name
    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    address: int
    """Where on the host it has come to."""


@dataclass
class Tape:
    """A recording of the device's part of a function."""

    steps: list[Step] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    slots: dict[Name, int] = field(default_factory=dict)
    """The slots that storages had here, also those that are gone."""
    living: set[Name] = field(default_factory=set)
    """What was made and not freed."""
    settings: int = 0
    streams: set[int] = field(default_factory=set)
    """Those that it uses besides the one that it began on."""
    problem: tuple[str, int] | None = None
    """What cannot be done again, and its line."""

    @property
    def names(self) -> set[Name]:
        """The storages that were not made here."""
        return {name for name in self.slots if name[0] != "made"}


class _NotedBytes:
    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def __bool__(self) -> bool:
        return self._at < len(self._content)

    def take(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from("<" + form, self._content, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def text(self) -> bytes:
        (size,) = self.take("I")
        self._at += size
        return self._content[self._at - size : self._at]


def read(
    content: bytes,
    places: Mapping[int, str],
    arguments: Mapping[int, int],
    hosts: Mapping[int, int],
    lengths: Mapping[int, int],
    offsets: Mapping[int, int],
) -> Tape:
    """Read what the core has noted.

    `places` are paths by the slots that they had before, `arguments` numbers by slots, and `hosts`
    numbers of arguments on the host by their addresses, with `lengths` in bytes. `offsets` are the
    bytes at which arguments begin in their storages: offsets are told from there.
    """
    tape, reader = Tape(), _NotedBytes(content)
    now: dict[int, Name] = {slot: ("place", path) for slot, path in places.items()}
    now |= {slot: ("argument", number) for slot, number in arguments.items()}
    emptied: dict[int, Name] = {}
    """What slots are without memory that they are given for a while."""
    events: set[int] = set()
    made = 0
    line = 0

    def name_of(slot: int) -> Name:
        name = now.setdefault(slot, ("slot", slot))
        tape.slots[name] = slot
        return name

    def make(slot: int) -> Name:
        nonlocal made
        now[slot] = name = ("made", made)
        made += 1
        tape.slots[name] = slot
        tape.living.add(name)
        return name

    def block(what: str) -> None:
        tape.problem = tape.problem or (what, line)

    (kind, tape.settings) = reader.take("BQ")
    while reader:
        (kind,) = reader.take("B")
        if kind == 2:
            (slot,) = reader.take("I")
            tape.living.discard(now.pop(slot, ("slot", slot)))
            tape.living.discard(emptied.pop(slot, ("slot", slot)))
            continue
        if kind == 7:
            tape.streams |= {*reader.take("I")}
            continue
        if kind == 8:
            event, action, stream = reader.take("IBI")
            if action == RECORD_TIMED:
                block("it records an event that takes the time; record it outside")
            elif action == RECORD:
                events.add(event)
            elif action == BLOCK and event not in events:
                block("it waits for an event from outside; wait outside")
            if action == FORGET:
                events.discard(event)
            else:
                tape.streams.add(stream)
            continue
        if tape.reads and kind not in (4, 5):
            block(
                "it reads a value, and goes on with operations; return the tensor and read it "
                "outside, or make what comes after it a function of its own"
            )
        if kind == 0:
            line, template = reader.take("II")
            name, fields = reader.text().decode(), reader.text().decode("latin-1")
            payload, slots = bytearray(reader.text()), reader.text()
            used, at_slots, written, numbers = [], [], [], []
            item = 1
            for letter, more, at in _fields(fields):
                if letter in "sw":
                    (slot,) = struct.unpack_from("<I", payload, at)
                    used.append(name_of(slot))
                    at_slots.append(at)
                    item = more
                    if letter == "w":
                        written.append(used[-1])
                    continue
                if letter == "o" and used[-1][0] == "argument":
                    begin, rest = divmod(offsets[int(used[-1][1])], item)
                    (offset,) = struct.unpack_from("<q", payload, at)
                    if rest or offset < begin:
                        block("it looks at memory before an argument")
                    struct.pack_into("<q", payload, at, offset - begin)
                numbers.append(
                    NumberField(letter, more, at, bytes(payload[at : at + SIZES[letter]]))
                )
            results = [make(slot) for slot in struct.unpack(f"<{len(slots) // 4}I", slots)]
            done = bytes(payload)
            tape.steps.append(
                TapedOperation(
                    line, template, name, done, used, at_slots, written, results, numbers
                )
            )
        elif kind == 1:
            slot, size = reader.take("IQ")
            tape.steps.append(Made(make(slot), size))
        elif kind == 3:
            slot, offset, address, size = reader.take("IQQQ")
            data = reader.text()
            argument = hosts.get(address)
            if argument is not None and size != lengths[argument]:
                argument = None
            if argument is None and len(data) < size:
                block(
                    f"it uploads {size} bytes that are not an argument's; give them as an argument"
                )
            tape.steps.append(Uploaded(line, name_of(slot), offset, data, size, argument))
        elif kind == 4:
            (line,) = reader.take("I")
            located = _NotedBytes(reader.text())
            slot, dtype, dim = located.take("IBB")
            sizes, strides = located.take(f"{dim}q"), located.take(f"{dim}q")
            (offset,) = located.take("q")
            (address,) = reader.take("Q")
            if name_of(slot)[0] == "argument":
                block("it reads an argument; read it outside")
            tape.reads.append(Read(line, name_of(slot), dtype, sizes, strides, offset, address))
        elif kind == 9:
            slot, before, after = reader.take("IQQ")
            if slot in arguments and after != before:
                block("it does what cannot be replayed: resize_ of an argument")
            elif before == 0:
                emptied[slot] = name_of(slot)
                tape.steps.append(Made(make(slot), after))
            elif after == 0 and slot in emptied:
                tape.living.discard(now[slot])
                now[slot] = emptied.pop(slot)
            elif after != before:
                block("it does what cannot be replayed: resize_ of a tensor")
        elif kind == 5:
            (changed,) = reader.take("Q")
            tape.steps.append(SettingsStep(changed))
        else:
            (known,) = reader.take("I")
            line = known or line
            block(f"it does what cannot be replayed: {reader.text().decode()}")
    if events:
        block("it keeps an event that it has recorded; record it outside")
    if emptied:
        block("it does what cannot be replayed: resize_ of a tensor")
    return tape


def _fields(fields: str) -> Iterator[tuple[str, int, int]]:
    """The letter, the dtype or the bytes of an element, and the place of each field."""
    at, letters = 0, iter(fields)
    for letter in letters:
        yield letter, ord(next(letters)) if letter in "hsw" else 0, at
        at += SIZES[letter]
