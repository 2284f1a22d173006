"""Lines: connections on which any thread asks, and one of those that wait reads the answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from skyward.wire import line
from skyward.wire.channel import Channel
from skyward.wire.line import Line, LineRequest
from skyward.wire.messages import Question, Reply


@pytest.fixture
def ends() -> Iterator[tuple[Line, Channel]]:
    """A line on which those that wait read, and its other end."""
    mine, its = socket.socketpair()
    made, other = Line(Channel(mine), threaded=False), Channel(its)
    yield made, other
    other.close()
    made.close()


def test_a_line_that_is_lost_closes_its_connection_at_once(ends: tuple[Line, Channel]) -> None:
    made, other = ends
    request = LineRequest(1)
    assert made.ask(request, Question("what", {}, 1))
    other.close()
    made.wait(request)
    assert "the connection to it was lost" in made.lost
    assert made.channel.closed
    assert made.channel.fileno() == -1


def test_a_line_that_nobody_uses_notices_that_the_other_end_has_left(
    ends: tuple[Line, Channel],
) -> None:
    made, other = ends
    made.check()
    assert not made.lost
    other.close()
    made.check()
    assert made.lost
    assert made.channel.fileno() == -1


def test_what_has_come_is_not_lost_with_an_interrupt(
    ends: tuple[Line, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = ends
    request, plain = LineRequest(1), line.arrive

    def interrupted(*arguments: object) -> None:
        plain(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    made.ask(request, Question("what", {}, 1))
    other.send(Reply("the answer", number=1))
    monkeypatch.setattr(line, "arrive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.wait(request)
    monkeypatch.undo()
    made.wait(request)
    assert request.answers[0][0].value == "the answer"
