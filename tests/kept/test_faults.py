"""Kept pools, when something breaks: clients and agents that are killed, and haste."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.cli.main import sky as command
from skyward.compute import reach
from skyward.compute.workbench.commands import NodeCommand
from skyward.nodes import records
from skyward.worker import detached

from ..conftest import PATIENCE, only_in_all

Eventually = Callable[..., None]
Script = Callable[[str], "subprocess.Popen[str]"]
QUIET = sky.Options(console=False)


@sky.function
def pid() -> int:
    return os.getpid()


@sky.function
def meet(folder: str, count: int) -> int:
    """Waits until so many workers are there, and a file says that they may go on."""
    import time

    info = sky.instance_info()
    Path(folder, f"{info.global_worker_index}").touch()
    while len(os.listdir(folder)) < count or not Path(folder, "go").exists():
        time.sleep(0.01)
    return os.getpid()


def agents(home: Path) -> list[int]:
    return [pid for each in home.glob("sky-*") if (pid := detached.running(each))]


@pytest.fixture
def bench(home: Path) -> Iterator[str]:
    with sky.Compute(nodes=2, name="bench", keep=True, options=QUIET):
        pass
    yield "bench"
    if "bench" in records.names():
        sky.attach("bench").down(force=True)
    assert agents(home) == []


def test_a_client_killed_while_it_starts_a_pool_leaves_nothing(
    home: Path, script: Script, eventually: Eventually
) -> None:
    other = script("sky.Compute(nodes=2, name='half', keep=True).__enter__()")
    eventually(lambda: agents(home), what="the first agent")
    other.kill()
    other.communicate()
    if "half" in records.names():
        CliRunner().invoke(command, ["down", "half", "--yes"])
    eventually(lambda: agents(home) == [], what="the end of its agents")
    result = CliRunner().invoke(command, ["down", "half", "--yes"])
    assert result.exit_code in (0, 1)
    assert not list(home.glob("sky-*"))


def test_a_node_whose_agent_was_killed_is_started_again(bench: str, eventually: Eventually) -> None:
    with sky.attach(bench) as compute:
        before = pid() @ compute
        killed = records.read(bench).nodes[1].pid
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: records.read(bench).nodes[1].pid != killed, what="another agent")
        assert len(pid() @ compute) == 2
    with sky.attach(bench) as compute:
        after = pid() @ compute
        assert len(after) == 2
        assert after[0] == before[0]
        assert after[1] != before[1]


def break_worker(compute: sky.Compute, node: int) -> None:
    """End the executor of a node, whose agent can start no other one there."""
    machine: Any = compute._open_fleet.nodes[node].host._machine
    executor = compute.run(pid(), on=node)
    output = Path(machine.id, "output")
    shutil.rmtree(output)
    output.write_text("a file, and no folder")
    os.kill(executor, signal.SIGKILL)


def test_a_node_whose_worker_cannot_be_started_any_more_gets_another_agent(
    bench: str, eventually: Eventually
) -> None:
    """The same agent was found again, and its node never became ready."""
    with sky.attach(bench) as compute:
        agent = records.read(bench).nodes[1].pid
        break_worker(compute, 1)
        eventually(lambda: compute.stats().nodes_lost == 1, what="the loss")
        assert compute.run(pid(), on=1)
        eventually(lambda: records.read(bench).nodes[1].pid != agent, what="another agent")


def test_a_worker_that_cannot_be_started_any_more_costs_other_clients_nothing(
    bench: str, eventually: Eventually
) -> None:
    with sky.attach(bench) as one, sky.attach(bench) as two:
        theirs = two.run(pid(), on=1)
        break_worker(one, 1)
        eventually(lambda: one.nodes[1].state == "failed", what="the end of the node")
        with pytest.raises(
            sky.errors.NodeLostError, match="node 1 worker 0 cannot run: it did not start"
        ):
            one.run(pid(), on=1)
        assert two.run(pid(), on=1) == theirs


def test_a_node_that_two_clients_have_lost_is_started_once(
    bench: str, home: Path, eventually: Eventually
) -> None:
    with sky.attach(bench) as one, sky.attach(bench) as two:
        os.kill(records.read(bench).nodes[1].pid, signal.SIGKILL)
        for each in (one, two):
            eventually(
                lambda each=each: (
                    each.stats().nodes_lost and all(view.state == "ready" for view in each.nodes)
                ),
                what="both nodes",
            )
            assert len(pid() @ each) == 2
        assert sorted(agents(home)) == sorted(node.pid for node in records.read(bench).nodes)


@only_in_all
def test_a_node_that_clients_on_two_machines_have_lost_is_started_once(
    bench: str,
    home: Path,
    script: Script,
    tmp_path: Path,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has a record of its own, and locks that the other does not see."""
    file = str(tmp_path / "bench.key")
    Path(file).write_bytes(records.encode(records.read(bench)))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SKYWARD_STATE", str(tmp_path / "elsewhere"))
        assert CliRunner().invoke(command, ["attach", "--import", file]).exit_code == 0
        other = script(
            f"""
            import time
            from skyward.nodes import records
            with sky.attach({bench!r}) as compute:
                before = records.read({bench!r}).nodes[1].pid
                print("attached", flush=True)
                while records.read({bench!r}).nodes[1].pid == before:
                    time.sleep(0.01)
                while any(node.state != "ready" for node in compute.nodes):
                    time.sleep(0.01)
                input()
                print(*(node.pid for node in records.read({bench!r}).nodes), flush=True)
            """
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "attached\n", other.communicate()[1]
    with sky.attach(bench) as compute:
        before = records.read(bench).nodes[1].pid
        os.kill(before, signal.SIGKILL)
        eventually(
            lambda: (
                records.read(bench).nodes[1].pid != before
                and all(each.state == "ready" for each in compute.nodes)
            ),
            what="both nodes",
        )
        mine = [node.pid for node in records.read(bench).nodes]
        out, problems = other.communicate("\n", timeout=PATIENCE)
        assert out.split() == [str(each) for each in mine], problems
        assert sorted(agents(home)) == sorted(mine)
        assert len(pid() @ compute) == 2


def test_a_client_that_grows_takes_the_nodes_that_another_has_added(bench: str, home: Path) -> None:
    with sky.attach(bench) as one, sky.attach(bench) as two:
        one.resize(3)
        two.resize(3)
        assert len(pid() @ one) == len(pid() @ two) == 3
        assert len(agents(home)) == 3


def test_a_pool_that_has_lost_a_node_can_be_used_with_the_others(bench: str) -> None:
    os.kill(records.read(bench).nodes[1].pid, signal.SIGKILL)
    with sky.attach(bench) as compute:
        assert len(pid() @ compute) == 1


def test_a_pool_whose_agents_are_all_gone_is_forgotten(bench: str, eventually: Eventually) -> None:
    killed = [node.pid for node in records.read(bench).nodes]
    for each in killed:
        os.kill(each, signal.SIGKILL)
    eventually(lambda: not any(map(psutil.pid_exists, killed)), what="the end of the agents")
    with pytest.raises(sky.errors.PoolError, match="its machines are gone, so its record is, too"):
        sky.attach(bench)
    assert bench not in records.names()
    CliRunner().invoke(command, ["down", "bench", "--yes"])


def test_clients_that_attach_at_once_have_executors_of_their_own(bench: str) -> None:
    computes: list[sky.Compute] = []
    threads = [
        threading.Thread(target=lambda: computes.append(sky.attach(bench))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        pids = [each for compute in computes for each in pid() @ compute]
        assert len(set(pids)) == 6
    finally:
        for compute in computes:
            compute.close()


def test_a_broadcast_goes_on_while_another_client_comes_and_goes(
    bench: str, script: Script, tmp_path: Path, eventually: Eventually
) -> None:
    with sky.attach(bench) as compute:
        thread_result: list[list[int]] = []
        running = threading.Thread(
            target=lambda: thread_result.append(meet(str(tmp_path), 2) @ compute)
        )
        running.start()
        eventually(lambda: len(os.listdir(tmp_path)) == 2)
        other = script(
            "@sky.function\ndef pid():\n    return os.getpid()\n"
            f"with sky.attach({bench!r}) as c:\n    print(pid() @ c)"
        )
        out, problems = other.communicate(timeout=PATIENCE)
        (tmp_path / "go").touch()
        running.join(PATIENCE)
        assert len(thread_result[0]) == 2
        assert not set(json.loads(out)) & set(thread_result[0]), problems


def test_a_pool_ends_by_itself_when_nobody_uses_it(home: Path, eventually: Eventually) -> None:
    with sky.Compute(name="brief", keep=0.5, options=QUIET):
        pass
    eventually(lambda: agents(home) == [], what="the end of the pool")
    with pytest.raises(sky.errors.PoolError, match="its machines are gone"):
        sky.attach("brief")


@only_in_all
def test_a_command_on_one_node_keeps_all_nodes_of_the_pool(
    home: Path, eventually: Eventually
) -> None:
    with contextlib.ExitStack() as command:
        with sky.Compute(sky.Local(transport="tcp"), nodes=3, name="used", keep=0.5, options=QUIET):
            pool = command.enter_context(reach("used"))
            command.enter_context(NodeCommand(pool, 1, ["sleep", "600"]))
        # Nodes 0 and 2 would end half a second after the client has left.
        time.sleep(2.5)
        assert len(agents(home)) == 3
    eventually(lambda: agents(home) == [], what="the end of the pool")


def test_a_pool_of_no_name_cannot_stay() -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=r"keep=True\): .* needs a name"):
        sky.Compute(keep=True)
    with pytest.raises(sky.errors.ConfigurationError, match="has at least one node"):
        sky.Compute(name="none", keep=True, nodes=(0, 2))
    with pytest.raises(sky.errors.ConfigurationError, match="cannot be called 'a/b'"):
        sky.Compute(name="a/b", keep=True)


@only_in_all
def test_workers_of_a_group_stay_one_group(home: Path) -> None:
    torch = pytest.importorskip("torch")

    @sky.function
    def total(x: int) -> int:
        tensor = torch.tensor([x])
        torch.distributed.all_reduce(tensor)
        return int(tensor.item())

    with sky.Compute(
        nodes=2, name="group", keep=True, plugins=[sky.plugins.torch(backend="gloo")], options=QUIET
    ) as compute:
        assert total(1) @ compute == [2, 2]
        before = pid() @ compute
    with sky.attach("group") as compute:
        assert pid() @ compute == before
        assert total(2) @ compute == [4, 4]
        compute.down()
