"""docs/wire.md says what the code does: every number, every kind, every field."""

from __future__ import annotations

import ast
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from skyward.calls import relays
from skyward.calls import streams as pool_streams
from skyward.device import meeting, peers
from skyward.nodes import node
from skyward.objects import memory
from skyward.wire import frames, handshake, listener, messages, native
from skyward.wire.link import incoming, large, outgoing, pair
from skyward.worker import arrivals, relay
from skyward.worker import streams as worker_streams

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "wire.md").read_text()
SOURCES = ROOT / "src" / "skyward"


def table(*columns: str) -> list[list[str]]:
    """The rows of the table with this heading."""
    heading = "| " + " | ".join(columns) + " |\n"
    assert PAGE.count(heading) == 1, f"one table should begin with {heading}"
    _, _, after = PAGE.partition(heading)
    rows = []
    for line in after.splitlines()[1:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def written(hint: Any) -> str:
    """A field's type as the page writes it."""
    named = ((messages.Size, "size"), (messages.Place, "place"), (messages.DebugMode, "mode"))
    for known, name in named:
        if hint is known:
            return name
    if hint is Any:
        return "any"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint.__name__.lower()
    origin, inner = typing.get_origin(hint), [written(part) for part in typing.get_args(hint)]
    if origin is list:
        return f"[{inner[0]}]"
    if origin is tuple:
        return f"({', '.join(inner)})"
    if origin is dict:
        return f"{{{inner[0]}: {inner[1]}}}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join("nil" if part == "NoneType" else part for part in inner)
    assert origin is not Annotated, hint
    return str(hint.__name__)


def fields(kind: type[msgspec.Struct]) -> str:
    hints = typing.get_type_hints(kind, include_extras=True)
    return ", ".join(
        f"{field.name}{'' if field.required else '?'} {written(hints[field.name])}"
        for field in msgspec.structs.fields(kind)
    )


def test_the_header_is_as_described() -> None:
    assert f"struct {frames.HEADER.format}, {frames.HEADER.size} bytes" in PAGE
    widths = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64"}
    rows = table("field", "type", "meaning")
    assert [row[1] for row in rows] == [widths[code] for code in frames.HEADER.format[1:]]
    packed = frames.header(7, 5, 6, 3)
    assert frames.HEADER.unpack(packed) == (7, 3, frames.PROTOCOL, 5, 6)
    assert [row[0] for row in rows] == [
        "kind",
        "descriptors",
        "protocol",
        "meta length",
        "body length",
    ]


def test_the_limits_are_those_of_the_code() -> None:
    homes = (frames, handshake, listener, memory, pool_streams)
    for name, value, _ in table("limit", "value", "meaning"):
        (actual,) = {repr(getattr(home, name)) for home in homes if hasattr(home, name)}
        assert actual == value, name
    assert pool_streams.WINDOW == worker_streams.WINDOW
    assert frames.INLINE_BODY == memory.CHUNK == 1 << 20
    assert memory.ALIGNMENT == 64
    assert typing.get_args(messages.Size)[1] == msgspec.Meta(ge=0, le=1 << 48)


def test_links_are_as_described() -> None:
    links = PAGE.partition("## Links\n")[2].partition("\n## ")[0]
    assert pair.RECORD.format == "<Q"
    assert pair.IS_COUNT == 1 << 63
    assert pair.STRIPE_BIT == 32
    for words in (
        f"from 1 byte to {pair.RECORD_MAX >> 20} MiB",
        f"for every {incoming.COUNT_EVERY >> 20} MiB received",
        f"keeps more than {outgoing.LINK_WINDOW >> 20} MiB",
        f"the refusal `{handshake.SESSION_UNKNOWN}`",
        f"no `Ping` back for {node.SILENCE_SECONDS:g} s",
        f"refused connections for {handshake.REFUSED_SECONDS:g} s",
        f"at least {pair.FAR_SECONDS * 1e3:g} ms apart",
        f"up to {handshake.CONNECTIONS - 1} more each way",
        f"Only frames of {pair.STRIPED_MIN >> 20} MiB or more",
        f"in parts of {large.STRIPE_PART >> 20} MiB",
        f"the first {pair.RECORD_MAX >> 20} MiB of them",
    ):
        assert words in links


def core_size(name: str, source_name: str = "wire/stripes.h") -> int:
    """A size in the sources of the cores."""
    source = (ROOT / "src/skyward/device/csrc" / source_name).read_text()
    found = re.search(rf"\b{name} = (\d+) << (\d+)", source)
    assert found is not None
    return int(found[1]) << int(found[2])


def test_the_links_of_a_device_are_as_described() -> None:
    links = PAGE.partition("*Links of a device.*")[2].partition("\n\n")[0]
    for words in (
        f"every {native.BEAT_SECONDS:g} s",
        f"{meeting.BACKLOGS['device-ops'] >> 20} MiB for `device-ops`",
        f"{meeting.BACKLOGS['device-bulk'] >> 20} MiB for `device-bulk`",
        f"after {native.SILENCE_SECONDS:g} s without a record",
        f"{core_size('kLong') >> 20} MiB and more are cut",
        f"A stripe has {core_size('kStripe') >> 10} KiB or somewhat more",
    ):
        assert words in links


def test_the_native_core_of_links_has_the_same_numbers() -> None:
    header = (SOURCES / "wire/csrc/link.h").read_text()
    source = (SOURCES / "wire/csrc/link.cpp").read_text()
    seconds = dict(re.findall(r"constexpr auto k(\w+) = std::chrono::seconds\((\d+)\);", source))
    assert float(seconds["Beat"]) == native.BEAT_SECONDS
    assert float(seconds["Silence"]) == native.SILENCE_SECONDS
    assert float(seconds["LastWords"]) == pair.LAST_WORDS_SECONDS
    assert core_size("kPartMost", "../../wire/csrc/link.h") == pair.RECORD_MAX
    assert core_size("kCountEvery", "../../wire/csrc/link.cpp") == incoming.COUNT_EVERY
    assert f"kStripeBit = {pair.STRIPE_BIT};" in header
    assert f"kTlsOverhead = {pair.TLS_OVERHEAD};" in header
    calls = "../../wire/csrc/calls.cpp"
    assert core_size("kStripedLeast", calls) == pair.STRIPED_MIN
    assert core_size("kStripedHead", calls) == pair.RECORD_MAX
    assert core_size("kStripePart", calls) == large.STRIPE_PART


def test_the_links_between_devices_are_as_described() -> None:
    links = PAGE.partition("*Links between devices.*")[2].partition("\n\n")[0]
    for words in (
        f"fewer than {core_size('kLong') >> 20} MiB",
        f"over the other {peers.CARRIERS} connections",
        f"at most\n{core_size('kHeldMost', '../../wire/csrc/link.cpp') >> 20} MiB",
    ):
        assert words in links


def test_the_way_from_peer_to_peer_is_as_described() -> None:
    passed = PAGE.partition("**From peer to peer.**")[2].partition("\n\n")[0]
    for words in (
        f"with less than {relays.RELAY_MIN >> 20} MiB",
        f"at most {arrivals.PART >> 20} MiB each",
        f"has not heard in {relay.UNKNOWN_SECONDS:g} s",
        f"After {relay.SILENT_SECONDS:g} s of silence",
        f"after {relay.SILENT_SECONDS:g} s without a word",
    ):
        assert words in passed
    assert relay.BEAT_SECONDS == 1


def test_the_table_has_every_kind_with_its_fields_in_order() -> None:
    listed = [
        (int(number), name, described)
        for number, name, _, described in table("kind", "name", "direction", "fields")
    ]
    actual = [(number, kind.__name__, fields(kind)) for number, kind in messages.KINDS.items()]
    assert listed == sorted(actual)


@pytest.mark.parametrize("part", [messages.Payload, messages.Buffer])
def test_the_parts_have_their_fields_in_order(part: type[msgspec.Struct]) -> None:
    assert [part.__name__, fields(part)] in table("part", "fields")


def test_the_places_of_a_buffer_are_numbered_as_in_the_code() -> None:
    rows = table("where", "name", "the buffer's bytes are")
    assert [(getattr(messages, name), int(number)) for number, name, _ in rows] == [
        (number, number) for number in range(4)
    ]


def handled(*files: Path) -> set[str]:
    """The messages that a `match` in these files has a case for."""
    return {
        pattern.cls.id
        for file in files
        for pattern in ast.walk(ast.parse(file.read_text()))
        if isinstance(pattern, ast.MatchClass) and isinstance(pattern.cls, ast.Name)
    }


def test_every_message_goes_where_somebody_takes_it() -> None:
    takers = {
        "A": handled(SOURCES / "worker" / "agent.py") | {"Hello", "Question"},
        "E": handled(SOURCES / "worker" / "executor.py")
        | {"Hello", "Welcome", "Want", "Part", "Reply"},
        "C": handled(*(SOURCES / "calls").glob("*.py"), *(SOURCES / "nodes").glob("*.py"))
        | {"Welcome", "Reply"},
    }
    listed: dict[str, set[str]] = {"A": set(), "E": set(), "C": set()}
    for _, name, direction, _ in table("kind", "name", "direction", "fields"):
        for way in direction.split("; "):
            senders, arrow, receivers = re.fullmatch(r"(.+) ([→↔]) (.+)", way).groups()  # type: ignore[union-attr]
            ends = f"{senders}, {receivers}" if arrow == "↔" else receivers
            for end in ends.split(", "):
                listed[end].add(name)
    assert listed == takers
