"""Attaching to a kept pool: from other processes, one after another and at once."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.compute import reach
from skyward.nodes import records
from skyward.nodes.host import CUT_TRIES
from skyward.wire.channel import ServiceConnection
from skyward.wire.handshake import CLIENT, Authority, connect, node_name
from skyward.wire.messages import Hello

from ..conftest import PATIENCE

Eventually = Callable[..., None]
Script = Callable[[str], "subprocess.Popen[str]"]

PIDS = """
@sky.function
def pid():
    return os.getpid()
"""


@sky.function
def pid() -> int:
    return os.getpid()


@sky.function
def remember(value: int) -> list[int]:
    """Appends to a list that the process keeps as long as it lives."""
    import builtins

    kept: list[int] = builtins.__dict__.setdefault("kept_by_tests", [])
    kept.append(value)
    return kept


@sky.function
def last_forever(marker: str) -> None:
    Path(marker).touch()
    while True:
        time.sleep(0.05)


def said(process: subprocess.Popen[str]) -> str:
    out, problems = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, problems
    return out.strip()


def test_the_next_client_finds_the_executors_as_they_were(kept: str) -> None:
    with sky.attach(kept) as compute:
        before = pid() @ compute
        remember(1) @ compute
    with sky.attach(kept) as compute:
        assert pid() @ compute == before
        assert (remember(2) @ compute)[0][-2:] == [1, 2]


def test_another_process_attaches_and_leaves_the_pool_as_it_is(kept: str, script: Script) -> None:
    with sky.attach(kept) as compute:
        mine = pid() @ compute
    theirs = said(script(PIDS + f"print(pid() @ sky.attach({kept!r}))"))
    assert json.loads(theirs) == mine
    with sky.attach(kept) as compute:
        assert pid() @ compute == mine


def test_a_client_whose_connection_is_cut_while_it_attaches_asks_again(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, cuts = ServiceConnection.ask, [EOFError("cut")]

    def cut_once(connection: ServiceConnection, what: str, **arguments: Any) -> Any:
        answer = ask(connection, what, **arguments)
        if what == "choose" and cuts:
            raise cuts.pop()
        return answer

    monkeypatch.setattr(ServiceConnection, "ask", cut_once)
    with sky.attach(kept) as compute, compute._open_fleet.service(0, "clients") as head:
        assert not cuts
        assert len(head.ask("who")["clients"]) == 1

    cuts += [EOFError("cut")] * CUT_TRIES
    with pytest.raises(sky.errors.PoolError, match="connection to its agent was lost: cut; try"):
        sky.attach(kept)


def test_two_clients_at_once_share_no_executor(kept: str, script: Script) -> None:
    other = script(
        PIDS
        + f"""
with sky.attach({kept!r}) as compute:
    print(*(pid() @ compute), flush=True)
    sys.stdin.readline()
    print(*(pid() @ compute), flush=True)
"""
    )
    assert other.stdout is not None
    theirs = other.stdout.readline().split()
    with sky.attach(kept) as compute:
        mine = list(map(str, pid() @ compute))
        assert not set(mine) & set(theirs)
        assert said_after(other, "go on\n").split() == theirs
        assert list(map(str, pid() @ compute)) == mine


def said_after(process: subprocess.Popen[str], words: str) -> str:
    out, problems = process.communicate(words, timeout=PATIENCE)
    assert process.returncode == 0, problems
    return out


def test_a_call_that_runs_when_the_client_leaves_is_stopped(
    kept: str, tmp_path: Path, eventually: Eventually
) -> None:
    with sky.attach(kept) as compute:
        going = last_forever(str(tmp_path / "begun")) > compute
        eventually((tmp_path / "begun").exists)
    with pytest.raises(
        sky.errors.PoolClosedError, match="last_forever was not done: its client left"
    ):
        going.result()
    with sky.attach(kept) as compute:
        assert len(pid() @ compute) == 2


def test_a_client_that_is_killed_leaves_the_pool_to_others(
    kept: str, script: Script, eventually: Eventually
) -> None:
    other = script(PIDS + f"c = sky.attach({kept!r}); print(*(pid() @ c), flush=True); input()")
    assert other.stdout is not None
    theirs = [int(each) for each in other.stdout.readline().split()]
    other.kill()
    other.communicate()
    with sky.attach(kept) as compute:
        assert not set(pid() @ compute) & set(theirs)
    eventually(lambda: not any(map(psutil.pid_exists, theirs)), what="the end of its executors")
    with reach(kept) as pool, pool.head() as head:
        eventually(lambda: head.ask("who")["clients"] == [], what="the pool to be free")


def test_a_client_can_be_ended_by_sigterm_without_hurting_the_pool(
    kept: str, script: Script
) -> None:
    other = script(f"c = sky.attach({kept!r}); print(1, flush=True); input()")
    assert other.stdout is not None
    other.stdout.readline()
    other.send_signal(signal.SIGTERM)
    other.communicate()
    with sky.attach(kept) as compute:
        assert len(pid() @ compute) == 2


def test_the_record_is_for_its_owner_alone(kept: str) -> None:
    path = records.path_of(kept)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_client_with_the_keys_of_another_pool_is_refused(kept: str) -> None:
    record = records.read(kept)
    where = record.nodes[0].endpoint.split()[0]
    if record.credentials is None:
        with pytest.raises(sky.errors.AuthenticationError, match="another pool"):
            connect(where, Hello("other", "control"), None, "")
        return
    stranger = Authority(record.id).issue(CLIENT)
    with pytest.raises((sky.errors.AuthenticationError, OSError, EOFError)):
        connect(where, Hello(record.id, "control"), stranger, node_name(record.id, 0))


def test_an_attached_client_can_use_services_and_see_nodes(kept: str) -> None:
    with sky.attach(kept) as compute:
        assert [node.state for node in compute.nodes] == ["ready", "ready"]
    with reach(kept) as pool:
        assert pool.nodes == (0, 1)
        for node in pool.nodes:
            with pool.service(node, "about") as about:
                assert about.ask("facts")["pool"] == records.read(kept).id


def test_others_are_named_when_a_client_would_end_the_pool(kept: str, script: Script) -> None:
    other = script(f"c = sky.attach({kept!r}); print(os.getpid(), flush=True); input()")
    assert other.stdout is not None
    number = other.stdout.readline().strip()
    with (
        sky.attach(kept) as compute,
        pytest.raises(
            sky.errors.PoolError, match=rf"in use by .*process {number} .*since.*--force"
        ),
    ):
        compute.down()
    said_after(other, "\n")


def test_a_pool_of_that_name_cannot_be_made_twice(kept: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=f"{kept}.*is kept already.*sky down"):
        sky.Compute(name=kept, keep=True)


def test_a_compute_is_used_without_a_block_too(kept: str) -> None:
    compute = sky.attach(kept)
    assert len(pid() @ compute) == 2
    compute.close()
    with pytest.raises(sky.errors.PoolClosedError):
        pid() >> compute
