"""Tenants of an agent: each client has its own, and the next one gets what another has left."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyward.errors import ProtocolError
from skyward.wire.channel import Channel
from skyward.wire.messages import ExecutorUp, decode_as
from skyward.worker.config import AgentConfig
from skyward.worker.supervision import STARTS_MAX, ExecutorProcesses
from skyward.worker.tenants import Tenants


def config_of(folder: Path) -> AgentConfig:
    return AgentConfig(
        pool="pool",
        node=0,
        folder=str(folder),
        address="unix",
        workers=1,
        slots=1,
        threads=False,
        compute_pool=["{}"],
        visible=[""],
        env={},
        search_path=[],
        working_directory=str(folder),
        orphan_timeout=60.0,
        client_pid=os.getpid(),
        credentials=None,
        blob_cap=1,
        plugged=False,
        client="first",
    )


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    """The tenants of a node that stays; no executor is started."""
    made = Tenants(config_of(tmp_path), queue.SimpleQueue())
    made.keep(0)
    return made


def test_two_clients_never_get_the_same_tenant(tenants: Tenants) -> None:
    tenants.leave(tenants.first, "")
    names = [tenants.choose({"user": user}) for user in ("ann", "bob")]
    assert names[0] != names[1]
    ann, bob = (tenants.enter(name, number) for number, name in enumerate(names, 1))
    assert ann is tenants.first, "it was left for the next client"
    assert bob is not ann
    assert [ann.identity["user"], bob.identity["user"]] == ["ann", "bob"]
    assert tenants.enter(names[0], 1) is ann, "it has come again"


def test_a_tenant_whose_client_is_connected_is_not_given_to_another(tenants: Tenants) -> None:
    here, there = socket.socketpair()
    with here, there:
        tenants.enter("first", 1).connect(Channel(here))
        with pytest.raises(ProtocolError, match="another client has this tenant"):
            tenants.enter("first", 2)


def test_executors_that_failed_for_nobody_are_started_again_for_the_next_client(
    tmp_path: Path,
) -> None:
    starts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    executors = ExecutorProcesses(config_of(tmp_path), lambda _: None, starts)
    executors._failed_starts[0, 0] = STARTS_MAX
    executors.announce_again("", frozenset(), lambda: None)
    assert starts.qsize() == 1


def test_a_second_client_may_come_before_the_word_that_the_node_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has heard of the node from the first client, whose word is on its way."""
    tenants = Tenants(config_of(tmp_path), queue.SimpleQueue())
    with monkeypatch.context() as impatient:
        impatient.setattr("skyward.worker.tenants.KEEP_SECONDS", 0.0)
        with pytest.raises(ProtocolError, match="is not kept"):
            tenants.enter("second", 2)
    late = threading.Timer(0.2, tenants.keep, [0])
    late.start()
    assert tenants.enter("second", 2) is not tenants.first
    late.join()


def test_a_client_is_not_gone_because_this_machine_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(
        "skyward.worker.tenants.time",
        SimpleNamespace(monotonic=lambda: now, time=time.time),
    )
    config = config_of(tmp_path)
    tenants = Tenants(config, queue.SimpleQueue())
    tenants.first.pid = os.getpid()
    now += 2 * config.orphan_timeout
    assert not tenants.look(), "nobody could be heard"
    while now < 2.9 * config.orphan_timeout:
        now += 0.25
        assert not tenants.look()
    while now < 3.1 * config.orphan_timeout:
        now += 0.25
        gone = tenants.look()
    assert gone, "this process ran all the time, and heard nothing"


def test_a_client_hears_anew_what_a_connection_that_it_never_used_was_told(
    tenants: Tenants,
) -> None:
    ends = contextlib.ExitStack()

    def connect() -> tuple[Channel, Channel]:
        there, here = (Channel(end) for end in socket.socketpair())
        ends.callback(there.close)
        ends.callback(here.close)
        first.connect(here)
        return there, here

    def heard(there: Channel) -> list[int]:
        frames = [there.receive() for _ in range(2)]
        return [decode_as(ExecutorUp, frame.kind, frame.meta).pid for frame in frames]

    first = tenants.first
    first.tell(ExecutorUp(0, 0, 11, "unix:a"))
    with ends:
        given_up, _ = connect()
        first.tell(ExecutorUp(0, 1, 12, "unix:b"))
        assert heard(given_up) == [11, 12]
        there, here = connect()
        assert heard(there) == [11, 12], "nothing has come on the other connection"
        first.hear(here)
        last, _ = connect()
        first.tell(ExecutorUp(0, 0, 13, "unix:c"))
        first.tell(ExecutorUp(0, 1, 14, "unix:d"))
        assert heard(last) == [13, 14]
