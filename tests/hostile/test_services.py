"""Services of an agent that is asked nonsense: it refuses, goes on, and keeps nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.errors import PoolError
from skyward.files.items import FileItem, encode
from skyward.nodes.fleet import Fleet
from skyward.wire.channel import ServiceConnection
from skyward.wire.frames import INLINE_BODY
from skyward.wire.messages import Question, Reply


@pytest.fixture(scope="module")
def pool() -> Iterator[Fleet]:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        yield compute._open_fleet


@pytest.fixture
def agent(pool: Fleet, eventually) -> Iterator[psutil.Process]:
    """The agent: the same process afterwards, with no more threads, files and children."""
    with pool.service(0, "about") as about:
        process = psutil.Process(about.ask("facts")["pid"])
    before = _held(process)
    yield process
    eventually(
        lambda: all(now <= then for now, then in zip(_held(process), before, strict=True)),
        what="an agent that holds no more than before",
    )
    with pool.service(0, "about") as about:
        assert about.ask("facts")["pid"] == process.pid


def _held(process: psutil.Process) -> tuple[int, int, int]:
    return process.num_fds(), process.num_threads(), len(process.children(recursive=True))


WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("exec", "walk", {}),
    ("exec", "run", {}),
    ("exec", "run", {"command": "ls"}),
    ("exec", "run", {"command": [b"\xff"]}),
    ("exec", "run", {"command": ["ls"], "more": 1}),
    ("exec", "run", {"command": ["ls\0"]}),
    ("exec", "run", {"command": ["ls"], "environment": {"A=B": "c"}}),
    ("exec", "run", {"command": ["ls"], "working_directory": "/no/such/folder"}),
    ("exec", "run", {"command": ["sh"], "terminal": [1 << 40, 1]}),
    ("exec", "run", {"command": ["x" * 200_000]}),
    ("files", "look", {}),
    ("files", "look", {"path": "a\0b"}),
    ("files", "fetch", {"path": "/dev/null"}),
    ("files", "fetch", {"path": "/no/such/file"}),
    ("files", "fetch", {"path": "x" * 10_000}),
    ("files", "take", {"root": "/no/such/folder", "new": "x", "mode": 0o755}),
    ("files", "take", {"root": "/tmp", "new": "../x", "mode": 0o755}),
    ("files", "take", {"root": "/tmp", "new": "x", "mode": 0o7777}),
    ("files", "follow", {"root": "/dev/null"}),
    ("files", "mount", {"source": "x"}),
    ("jobs", "start", {"name": 3, "function": "f", "command": ["true"]}),
    ("jobs", "look", {"job": "../../etc", "kind": "call"}),
    ("jobs", "look", {"job": "x", "kind": "runner"}),
    ("jobs", "forget", {}),
    ("jobs", "ends", {"since": -1}),
    ("jobs", "serve", {"client": 3}),
    ("jobs", "serve", {"job": "x"}),
    ("jobs", "follow", {"job": "x", "log": "../job.json"}),
    ("jobs", "start", {"name": 3, "command": ["true"]}),
    ("jobs", "cancel", {"job": "../../etc"}),
    ("jobs", "follow", {"job": "x", "tail": -1}),
    ("jobs", "follow", {"job": "x", "position": 1 << 60}),
    ("jobs", "weather", {}),
]


@pytest.mark.parametrize(("service", "what", "arguments"), WRONG)
def test_a_wrong_question_is_refused_with_a_reason(
    pool: Fleet, agent: psutil.Process, service: str, what: str, arguments: dict[str, Any]
) -> None:
    with pool.service(0, service) as connection:
        connection.send(what, **arguments)
        with pytest.raises(PoolError) as refused:
            connection.next_reply()
        assert str(refused.value)


def _ends(connection: ServiceConnection) -> None:
    """The agent has closed the connection, though replies may be on their way."""
    with pytest.raises((EOFError, OSError)):
        while True:
            connection.channel.receive()


def test_a_body_that_is_too_large_ends_the_connection(pool: Fleet, agent: psutil.Process) -> None:
    for name in ("exec", "files", "jobs"):
        with pool.service(0, name) as connection:
            try:
                connection.send("run", b"x" * (INLINE_BODY + 1))
            except OSError:
                continue
            _ends(connection)


def test_other_messages_than_questions_end_the_connection(
    pool: Fleet, agent: psutil.Process
) -> None:
    for name in ("exec", "files", "jobs"):
        with pool.service(0, name) as connection:
            connection.channel.send(Reply())
            _ends(connection)


@pytest.mark.parametrize(
    "part",
    [
        Question("signal", {"number": 99}),
        Question("signal", {"number": "INT"}),
        Question("size", {"rows": -1, "columns": 1}),
        Question("dance"),
        Question("input"),
    ],
)
def test_a_wrong_part_ends_the_command(
    pool: Fleet, agent: psutil.Process, part: Question, eventually
) -> None:
    with pool.service(0, "exec") as connection:
        connection.send("run", command=["sleep", "600"])
        pid = connection.next_reply().value["pid"]
        connection.channel.send(part)
        _ends(connection)
    eventually(lambda: not psutil.pid_exists(pid))


def test_input_without_end_is_not_collected(pool: Fleet, agent: psutil.Process) -> None:
    with pool.service(0, "exec") as connection:
        connection.send("run", command=["sleep", "600"], takes_input=True)
        connection.next_reply()
        with pytest.raises(OSError):
            for _ in range(1000):
                connection.send("input", b"x" * (INLINE_BODY // 2))


def test_files_that_are_no_archive_start_no_job(pool: Fleet, agent: psutil.Process) -> None:
    with pool.service(0, "jobs") as connection:
        connection.send("start", name="x", command=["true"])
        connection.send("part", os.urandom(1000))
        connection.send("part")
        with pytest.raises(PoolError):
            connection.next_reply()
        assert connection.ask("list") == []


def test_a_client_that_leaves_within_a_question_leaves_nothing(
    pool: Fleet, agent: psutil.Process, tmp_path: Path
) -> None:
    with pool.service(0, "jobs") as connection:
        connection.send("start", name="x", command=["true"])
    with pool.service(0, "jobs") as connection:
        connection.send("start", name="x", function="f", command=["true"])
        connection.send("part", b"x")
    with pool.service(0, "files") as connection:
        connection.send("take", root=str(tmp_path), new="x", mode=0o755)
        connection.channel.send(Question("items"), [encode([FileItem("a", "file", 5)])])
        connection.next_reply()
        connection.channel.send(Question("part", {"parts": [(0, 1, False)]}), [b"x"])
    with pool.service(0, "exec") as connection:
        connection.send("run", command=["sleep", "600"])
