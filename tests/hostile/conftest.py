"""What hostile peers send: frames that lie, bytes that mean nothing, pickles that bite."""

from __future__ import annotations

import os
import pickle
import random
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from skyward.wire import messages
from skyward.wire.frames import GREETING_LIMIT, HEADER, PROTOCOL, header
from skyward.wire.messages import Hello, Message, Payload, Ping, Run

# A busy machine is slow, and that is no failure.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


class Bomb:
    """Makes a directory in whoever unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


class Hostile:
    """A peer that was not invited."""

    @staticmethod
    def framed(message: Message, body: bytes = b"") -> bytes:
        """A proper frame."""
        meta = messages.encode(message)
        return header(message.KIND, len(meta), len(body)) + meta + body

    @classmethod
    def bomb(cls, path: Path) -> bytes:
        """A task whose arguments go off when they are unpickled."""
        data = pickle.dumps(Bomb(path))
        payload = Payload(len(data), inline=len(data))
        return cls.framed(Run(1, "bomb", b"code", payload, [], []), data)

    @classmethod
    def says(cls, pool: str, path: Path) -> dict[str, bytes]:
        """What may come in place of a proper Hello, by name; pickles would make `path`."""
        hello = Hello(pool, "data")
        meta = messages.encode(hello)
        noise = random.Random(7).randbytes(6000)
        too_long = messages.encode(Hello(pool, "data", session="x" * GREETING_LIMIT))
        return {
            "nothing at all": b"",
            "noise": b"\x07\x00\xff\xff" + noise,
            "a web browser": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" * 50,
            "half a header": cls.framed(hello)[:9],
            "half a Hello": cls.framed(hello)[:-3],
            "a huge meta": HEADER.pack(1, 0, PROTOCOL, 2**32 - 1, 0) + noise,
            "a huge body": HEADER.pack(1, 0, PROTOCOL, len(meta), 2**64 - 1) + meta + noise,
            "a Hello over the limit": header(1, len(too_long), 0) + too_long,
            "a Hello with a body": cls.framed(hello, b"body"),
            "a Hello with descriptors": header(1, len(meta), 0, 3) + meta,
            "a malformed Hello": header(1, 40, 0) + noise[:40],
            "a Hello that is no text": cls.framed(hello).replace(b"data", b"d\x80ta"),
            "a Hello of another pool": cls.framed(Hello("another", "data")),
            "a Hello in no direction": cls.framed(Hello(pool, "data", "sideways", "session")),
            "another message first": cls.framed(Ping(1)) + cls.framed(hello),
            "an unknown kind": header(200, len(meta), 0) + meta,
            "another protocol": HEADER.pack(1, 0, PROTOCOL + 1, len(meta), 0) + meta,
            "a task": cls.bomb(path),
            "a bare pickle": pickle.dumps(Bomb(path)),
        }

    @staticmethod
    def hears(end: socket.socket, seconds: float) -> bytes:
        """All that the other end says until it hangs up, which it must do in time."""
        end.settimeout(seconds)
        said = b""
        try:
            while data := end.recv(65536):
                said += data
        except TimeoutError:
            pytest.fail(f"the connection was still open after {seconds} s")
        except OSError:
            pass
        return said


@pytest.fixture(scope="session")
def hostile() -> Hostile:
    """A peer that was not invited."""
    return Hostile()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `saying` runs once for everything a hostile peer says."""
    if "saying" in metafunc.fixturenames:
        metafunc.parametrize("saying", list(Hostile.says("", Path())))
