"""Messages: every kind keeps its fields, and its number is its own."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.errors import ProtocolError
from skyward.wire import messages
from skyward.wire.messages import KINDS, Message, Ping, Shutdown

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    types.NoneType: st.none(),
    Any: st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Every value a field of this type may have."""
    if hint in SCALARS:
        return SCALARS[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs_of(hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits: msgspec.Meta = inner[1]
        return st.integers(typing.cast(int, limits.ge), typing.cast(int, limits.le))
    if origin is list:
        return st.lists(values_of(inner[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values_of, inner))
    if origin is dict:
        return st.dictionaries(values_of(inner[0]), values_of(inner[1]), max_size=3)
    assert origin in (types.UnionType, typing.Union), hint
    return st.one_of(*map(values_of, inner))


def structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, *(values_of(hints[name]) for name in kind.__struct_fields__))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=15)
def test_every_kind_arrives_as_it_was(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(structs_of(kind))
    meta = messages.encode(message)
    assert messages.decode(kind.KIND, meta) == message
    assert isinstance(messages.decode_as(kind, kind.KIND, meta), kind)


def test_no_two_kinds_share_a_number() -> None:
    assert len(KINDS) == len(Message.__subclasses__())
    assert all(0 < number < 256 for number in KINDS)


def test_the_wrong_kind_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="expected Ping, got Shutdown"):
        messages.decode_as(Ping, Shutdown.KIND, messages.encode(Shutdown()))


@pytest.mark.parametrize("change", [-1, 1], ids=["one too few", "one too many"])
def test_a_message_has_exactly_its_fields(change: int) -> None:
    fields = [1, 0, 5][: 3 + change] + [0] * max(0, change)
    with pytest.raises(ProtocolError, match="a malformed Credit message"):
        messages.decode(messages.Credit.KIND, msgspec.msgpack.encode(fields))
