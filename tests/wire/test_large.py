"""A large write: the cursor over its bytes, and the records it is cut into."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.wire.link import large
from skyward.wire.link.large import Cursor, Spread, may_be_striped
from skyward.wire.link.pair import RECORD, STRIPE_BIT, STRIPED_MIN, Pair


@given(
    st.lists(st.binary(max_size=20), min_size=1, max_size=6),
    st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=20),
)
def test_a_cursor_is_where_it_was_moved_to_and_takes_what_follows(
    parts: list[bytes], moves: list[tuple[bool, int]]
) -> None:
    whole = b"".join(parts)
    cursor, at = Cursor([memoryview(part) for part in parts]), 0
    for goes_back, count in moves:
        if goes_back:
            at = min(count, len(whole))
            cursor.seek(at)
        else:
            assert b"".join(cursor.take(count)) == whole[at : at + count]
            at = min(at + count, len(whole))
        assert (cursor.position, cursor.left) == (at, len(whole) - at)


def test_only_a_large_frame_with_a_small_beginning_is_striped() -> None:
    head, body = memoryview(bytes(10)), memoryview(bytes(STRIPED_MIN))
    assert may_be_striped([head, body])
    assert not may_be_striped([head, body[: STRIPED_MIN - 11]])
    assert not may_be_striped([body, body])


class Ends:
    """A pair with one stripe, and the other ends of what it sends on."""

    def __init__(self) -> None:
        (main, self.main), (receiver, self._receiver) = socket.socketpair(), socket.socketpair()
        stripe, self.stripe = socket.socketpair()
        self.pair = Pair(main, receiver)
        self.pair.add_stripe(1, stripe, to_send=True)

    def close(self) -> None:
        self.pair.close()
        for end in (self.main, self._receiver, self.stripe):
            end.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(large, "RECORD_MAX", 8)
    monkeypatch.setattr(large, "STRIPE_PART", 4)
    made = Ends()
    yield made
    made.close()


def test_without_stripes_all_records_go_over_the_main_connection(ends: Ends) -> None:
    cursor = Cursor([memoryview(b"abc"), memoryview(b"defghijkl")])
    spread = Spread(ends.pair, striped=False)
    while cursor.left:
        spread.send(cursor)
    assert ends.main.recv(100) == RECORD.pack(8) + b"abcdefgh" + RECORD.pack(4) + b"ijkl"


def test_the_first_record_goes_over_the_main_connection_and_announces_what_a_stripe_carries(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripe = ends.pair._out[1]
    monkeypatch.setattr(ends.pair, "roomiest", lambda: (1, stripe))
    cursor = Cursor([memoryview(b"abc"), memoryview(b"defghij"), memoryview(b"klmn")])
    spread = Spread(ends.pair, striped=True)
    while cursor.left:
        spread.send(cursor)
    announced = RECORD.pack(4 | 1 << STRIPE_BIT) + RECORD.pack(2 | 1 << STRIPE_BIT)
    assert ends.main.recv(100) == RECORD.pack(8) + b"abcdefgh" + announced
    assert ends.stripe.recv(100) == b"ijklmn"


def test_after_a_loss_the_next_pair_begins_on_its_main_connection(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends.pair, "roomiest", lambda: (1, ends.pair._out[1]))
    cursor = Cursor([memoryview(b"abcdefghijkl")])
    list(cursor.take(12))
    cursor.seek(5)
    Spread(ends.pair, striped=True).send(cursor)
    assert ends.main.recv(100) == RECORD.pack(7) + b"fghijkl"
