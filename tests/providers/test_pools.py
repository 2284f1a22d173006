"""Pools on SSH hosts: functions, peers, files, lost hosts, and nothing left of any of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.nodes.records import Journal

from ..conftest import PATIENCE, only_in_all, other_case
from .leftovers import (
    Script,
    on_this_host,
    phases,
    press_ctrl_c,
    show_and_remove_after_a_kill,
    sky_says,
)
from .ssh_hosts import Sshd
from .torch_index import torch_image

QUIET = sky.Options(console=False)
IMPATIENT = sky.Options(console=False, orphan_timeout=5)
"""An agent that may come back is waited for that long before it is replaced."""


@sky.function
def place() -> tuple[str, str, tuple[str, ...]]:
    import os

    peers = tuple(peer.address for peer in sky.instance_info().peers)
    return os.getcwd(), os.environ.get("GREETING", ""), peers


@sky.function
def doubled(values: list[int]) -> list[int]:
    return [2 * value for value in values]


@sky.function
def text(path: str) -> str:
    return Path(path).read_text()


@sky.function
def write(path: str, content: str) -> None:
    Path(path).write_text(content)


@pytest.fixture(scope="module")
def pool(sshd: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.Compute]:
    """A pool of two hosts with a file and a variable, for the tests that do it no harm."""
    folder = tmp_path_factory.mktemp("included")
    (folder / "note.txt").write_text("from home")
    image = sky.Image(env={"GREETING": "hello"}, includes=[str(folder / "note.txt")])
    project = tmp_path_factory.mktemp("project")
    (project / "settings.txt").write_text("1")
    data = tmp_path_factory.mktemp("data")
    (data / "numbers.txt").write_text("1 2")
    with sky.Compute(
        sshd.provider(),
        nodes=2,
        image=image,
        project=str(project),
        volumes=[sky.Volume(str(data), str(data.parent / "data-of-nodes"))],
        options=QUIET,
    ) as compute:
        yield compute


def test_hosts_have_the_project_and_follow_it(pool: sky.Compute) -> None:
    (folder,) = (each for each in pool._spec.folders if not each.root)
    assert text("settings.txt") @ pool == ["1", "1"]

    (folder.source / "settings.txt").write_text("2")

    assert pool.sync().files == 2
    assert text("settings.txt") @ pool == ["2", "2"]


def test_a_folder_goes_to_hosts_and_what_they_write_comes_back(pool: sky.Compute) -> None:
    (folder,) = (each for each in pool._spec.folders if each.root)
    assert text(f"{folder.root}/numbers.txt") >> pool == "1 2"
    pool.run(write(f"{folder.root}/result.txt", "3"), on=1)

    assert pool.write_back().files >= 1

    assert (folder.source / "result.txt").read_text() == "3"


def test_functions_run_on_the_hosts(pool: sky.Compute) -> None:
    assert doubled([1, 2]) >> pool == [2, 4]
    assert doubled([3]) @ pool == [[6], [6]]


def test_nodes_know_each_other_by_the_addresses_of_their_hosts(
    pool: sky.Compute, sshd: Sshd
) -> None:
    assert [peers for _, _, peers in place() @ pool] == [sshd.hosts, sshd.hosts]
    assert [node.address for node in pool.nodes] == list(sshd.hosts)


def test_variables_and_files_of_the_image_arrive(pool: sky.Compute) -> None:
    @sky.function
    def note() -> str:
        return Path("note.txt").read_text()

    assert [greeting for _, greeting, _ in place() @ pool] == ["hello", "hello"]
    assert note() @ pool == ["from home", "from home"]
    assert len({folder for folder, _, _ in place() @ pool}) == 2


def test_where_only_ssh_gets_through_everything_goes_that_way(sshd: Sshd) -> None:
    @sky.function
    def reversed_values(values: bytes) -> bytes:
        return values[::-1]

    @sky.function
    def counting(count: int) -> Iterator[int]:
        yield from range(count)

    def ends() -> set[tuple[str, int]]:
        found = [each.raddr for each in psutil.Process().net_connections("tcp") if each.raddr]
        return {(end.ip, end.port) for end in found if end.ip in sshd.hosts}

    data = os.urandom(1 << 20) * 24
    others = ends()
    with sky.Compute(sshd.provider(direct=False), nodes=2, options=QUIET) as compute:
        assert doubled([3]) @ compute == [[6], [6]]
        assert reversed_values(data) >> compute == data[::-1]
        assert list(counting(100) >> compute) == list(range(100))
        assert ends() - others <= {(host, sshd.port) for host in sshd.hosts}


@only_in_all
@pytest.mark.slow
@pytest.mark.parametrize(
    "direct",
    [pytest.param(True, marks=other_case), False],
    ids=["straight", "through SSH"],
)
def test_a_torch_device_on_a_host(sshd: Sshd, direct: bool) -> None:
    """Slow the first time: PyTorch is installed on the host, and kept there."""
    import torch

    provider = sshd.provider(direct=direct)
    with sky.Compute(provider, image=torch_image(), options=QUIET) as compute:
        device = compute.device("cpu")
        weights = torch.arange(12.0).reshape(3, 4).requires_grad_()
        remote = weights.detach().to(device).requires_grad_()
        (remote @ remote.T).sum().backward()
        (weights @ weights.T).sum().backward()

        assert torch.equal(remote.grad.cpu(), weights.grad)


@only_in_all
def test_a_pool_survives_an_agent_that_dies(sshd: Sshd, eventually: Callable[..., None]) -> None:
    @sky.function
    def parent() -> int:
        import os

        return os.getppid()

    with sky.Compute(sshd.provider(), nodes=2, options=IMPATIENT) as compute:
        before = parent() @ compute
        os.kill(before[1], signal.SIGKILL)
        eventually(lambda: compute.nodes[1].state != "ready", 30, "noticing it")
        eventually(lambda: compute.nodes[1].state == "ready", 60, "another agent")
        after = parent() @ compute

        assert after[0] == before[0]
        assert after[1] != before[1]


@pytest.fixture(scope="module")
def setup(sshd: Sshd) -> str:
    return (
        f"provider = sky.SSH({list(sshd.hosts)!r}, user={sshd.user!r}, port={sshd.port}, "
        f"key={sshd.key!r}, known_hosts={sshd.known_hosts!r}, config=None)"
    )


@pytest.mark.parametrize("phase", phases("starting the agent"))
def test_what_a_killed_script_leaves_is_shown_and_removed(
    state: Journal, setup: str, phase: str
) -> None:
    pool = show_and_remove_after_a_kill(Script("provider", setup), phase, state)

    assert on_this_host(pool) == []


@pytest.mark.parametrize("phase", phases("looking at"))
def test_ctrl_c_leaves_nothing(state: Journal, setup: str, phase: str) -> None:
    pools = press_ctrl_c(Script("provider", setup), phase, state)

    assert [on_this_host(pool) for pool in pools] == [[] for _ in pools]


@only_in_all
def test_an_agent_whose_client_was_killed_ends_by_itself(
    state: Journal, setup: str, eventually: Callable[..., None]
) -> None:
    with Script("provider", setup, "orphan_timeout=2").reaching("ready") as process:
        (pool,) = state.pools()
        assert on_this_host(pool.id)
        process.kill()
        process.wait()

    # The provider's own mark stays until somebody looks: it says that the pool was here.
    eventually(lambda: not agents(pool.id), 30, "the end of the agents")
    sky_says("down")
    assert on_this_host(pool.id) == []


def agents(pool: str) -> list[str]:
    return [each for each in on_this_host(pool) if "/machines/" not in each]


def lose_host(sshd: Sshd, number: int, folder: str) -> None:
    """End a host's sshd and all that a node has there."""
    sshd.lose(number)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == folder or folder in " ".join(process.cmdline()):
                process.kill()


@only_in_all
def test_a_host_that_is_out_of_reach_for_a_while_keeps_its_node(
    sshd: Sshd, eventually: Callable[..., None]
) -> None:
    """Slow: nobody may judge it by seconds of silence."""

    @sky.function
    def slept(seconds: float) -> int:
        import time

        time.sleep(seconds)
        return os.getpid()

    with sky.Compute(sshd.provider(direct=False), options=QUIET) as compute:
        process = slept(0) >> compute
        future = slept(3) > compute
        try:
            sshd.lose(1)
            eventually(lambda: compute.nodes[0].state == "reconnecting", 60, "noticing it")
            time.sleep(6)
        finally:
            sshd.up()
        assert future.result(100) == process
        assert compute.stats().nodes_lost == 0


@pytest.mark.parametrize(
    "direct",
    [True, pytest.param(False, marks=other_case)],
    ids=["straight", "through SSH"],
)
def test_a_lost_host_is_used_again_when_it_comes_back(
    sshd: Sshd,
    state: Journal,
    eventually: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
    direct: bool,
) -> None:
    with sky.Compute(sshd.provider(direct=direct), nodes=2, options=IMPATIENT) as compute:
        folders = [folder for folder, _, _ in place() @ compute]
        try:
            lose_host(sshd, 2, folders[1])
            eventually(lambda: compute.nodes[1].state == "lost", 60, "giving it up")
            waiting = compute.submit(doubled([5]), on=1)
            assert doubled([4]) >> compute == [8]
            said = ""

            def gave_up_an_attempt() -> bool:
                nonlocal said
                said += capfd.readouterr().err
                return "node 1 is out of reach" in said

            eventually(gave_up_an_attempt, 60, "an attempt that failed")
            time.sleep(2)
        finally:
            sshd.up()
        assert waiting.result(60) == [10]
        assert doubled([3]) @ compute == [[6], [6]]
        # A worker may have answered a moment before its node counts as ready.
        eventually(lambda: [node.state for node in compute.nodes] == ["ready", "ready"])
    said += capfd.readouterr().err
    assert re.search(r"node 1 was lost: .*; it is started anew", said)
    assert re.search(
        r"node 1 is out of reach: SSH host 127\.0\.0\.2:\d+: connection refused; .*; it is tried "
        "again for 10 minutes",
        said,
    )
    assert said.count("node 1 is out of reach") == 1
    assert state.pools() == []


def test_a_broadcast_that_loses_a_host_names_it_and_what_to_do(
    sshd: Sshd,
    state: Journal,
    tmp_path: Path,
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its folder is removed when the host is back, however long a busy machine takes for that.
    monkeypatch.setattr("skyward.nodes.host.LAST_TRY_SECONDS", PATIENCE)
    begun = tmp_path / "begun"

    @sky.function
    def resting(begun: str) -> int:
        """Ends on node 0 alone."""
        if sky.instance_info().node == 1:
            Path(begun).touch()
            time.sleep(600)
        return sky.instance_info().node

    def lose(folder: str) -> None:
        eventually(begun.exists, 60, "the task's start")
        lose_host(sshd, 2, folder)

    try:
        with sky.Compute(sshd.provider(), nodes=2, options=IMPATIENT) as compute:
            folders = [folder for folder, _, _ in place() @ compute]
            losing = threading.Thread(target=lose, args=(folders[1],))
            losing.start()
            with pytest.raises(
                sky.BroadcastError, match=r"resting failed on 1 of 2 workers \(node 1\)"
            ) as caught:
                resting(str(begun)) @ compute
            losing.join()
            assert [outcome.value for outcome in caught.value.outcomes] == [0, None]
            (lost,) = caught.value.exceptions
            assert isinstance(lost, sky.NodeLostError)
            assert re.search(
                "resting lost node 1: its agent is gone; call again, or have `retries` do that",
                str(lost),
            )
            sshd.up()
    finally:
        sshd.up()
    assert state.pools() == []


@only_in_all
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=other_case), 2])
def test_what_needs_a_host_that_does_not_come_back_says_why(
    sshd: Sshd,
    state: Journal,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
    nodes: int,
) -> None:
    """The only host, or one of two in a broadcast."""
    monkeypatch.setattr("skyward.nodes.node.RETURN_SECONDS", 4.0)
    why = (
        rf"doubled has nowhere to run: node {nodes - 1} was lost and did not come back: "
        r"SSH host 127\.0\.0\.\d:\d+: connection refused; is sshd running there, and is this its "
        r"port\?; enter a new Compute"
    )
    try:
        with sky.Compute(sshd.provider(), nodes=nodes, options=IMPATIENT) as compute:
            folders = [folder for folder, _, _ in place() @ compute]
            lose_host(sshd, nodes, folders[-1])
            eventually(lambda: compute.nodes[-1].state == "lost", 60, "giving it up")
            if nodes == 1:
                with pytest.raises(sky.NodeLostError, match=why):
                    doubled([1]) >> compute
            else:
                with pytest.raises(
                    sky.BroadcastError, match=r"doubled failed on 1 of 2 workers \(node 1\)"
                ) as caught:
                    doubled([1]) @ compute
                assert [outcome.ok for outcome in caught.value.outcomes] == [True, False]
                assert isinstance(caught.value.exceptions[0], sky.NodeLostError)
                assert re.search(why, str(caught.value.exceptions[0]))
                assert doubled([2]) >> compute == [4]
        # What could not be removed is on record.
        (pool,) = state.pools()
        assert [machine.node for machine in pool.machines] == [nodes - 1]
    finally:
        sshd.up()
    sky_says("down", "--all", "--yes")
    assert state.pools() == []
