"""Objects in files, read as they come in parts."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.errors import ProtocolError
from skyward.objects import stored

Kept = tuple[bytes, list[bytes]]


def written(kept: list[Kept]) -> bytes:
    """The file of these objects; the facts of each are its number."""
    with tempfile.TemporaryFile() as file:
        for number, (pickle, buffers) in enumerate(kept):
            stored.append(file, [pickle], [memoryview(each) for each in buffers], facts=number)
        file.seek(0)
        return file.read()


@given(
    st.lists(st.tuples(st.binary(max_size=200), st.lists(st.binary(max_size=200), max_size=3))),
    st.data(),
)
def test_objects_do_not_depend_on_how_their_bytes_are_cut(
    kept: list[Kept], data: st.DataObject
) -> None:
    whole = written(kept)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    found: list[tuple[Any, Kept]] = []
    ends = [0]
    for facts, (pickle, buffers, _), end in stored.arriving(parts):
        found.append((facts, (bytes(pickle), [bytes(each) for each in buffers])))
        ends.append(end)

    assert found == list(enumerate(kept))
    assert ends[-1] == len(whole)


def test_an_object_that_has_not_come_whole_is_not_told() -> None:
    assert list(stored.arriving([written([(b"pickle", [bytes(100)])])[:-1]])) == []


def test_a_damaged_head_is_refused() -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        list(stored.arriving([(3).to_bytes(8, "little") + b"\xc1\xc1\xc1"]))
