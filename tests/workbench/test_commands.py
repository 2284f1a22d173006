"""Commands on nodes: output, input, signals, exit codes, and that nothing outlives its client."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.compute.workbench.commands import WINDOW, NodeCommand, run_everywhere
from skyward.errors import PoolError
from skyward.nodes.fleet import Fleet

Eventually = Callable[..., None]


@pytest.fixture
def running(pool: sky.Compute) -> Fleet:
    return pool._open_fleet


def told(command: NodeCommand) -> dict[str, bytes]:
    """Everything that a command writes, by stream."""
    written: dict[str, bytes] = {}
    for stream, data in command.output():
        written[stream] = written.get(stream, b"") + data
    return written


def test_output_and_exit_code_come_back(running: Fleet) -> None:
    with NodeCommand(running, 1, ["sh", "-c", "echo out; echo err >&2; exit 3"]) as command:
        assert told(command) == {"stdout": b"out\n", "stderr": b"err\n"}
        assert command.code == 3


def test_a_signal_is_told_as_a_shell_tells_it(running: Fleet) -> None:
    with NodeCommand(running, 0, ["sh", "-c", "kill -9 $$"]) as command:
        assert told(command) == {}
        assert command.code == 128 + signal.SIGKILL


def test_a_program_that_is_not_there_is_named(running: Fleet) -> None:
    with pytest.raises(PoolError, match="no program 'nvidia-smoo' on the node"):
        NodeCommand(running, 0, ["nvidia-smoo"])


def test_commands_find_the_interpreter_of_the_node(running: Fleet) -> None:
    code = "import sys, skyward; print(sys.executable)"
    with NodeCommand(running, 0, ["python", "-c", code]) as command:
        assert told(command)["stdout"].decode().strip() == sys.executable


def test_with_the_environment_of_a_worker_the_pool_is_known(running: Fleet) -> None:
    code = "import skyward as sky; print(sky.instance_info().node)"
    with NodeCommand(running, 1, ["python", "-c", code], like_worker=True) as command:
        assert told(command) == {"stdout": b"1\n"}


def test_more_input_than_fits_arrives_and_ends(running: Fleet) -> None:
    data = os.urandom(3 * WINDOW)
    with NodeCommand(running, 0, ["cat"], takes_input=True) as command:

        def feed() -> None:
            assert command.send_input(data)
            command.end_input()

        feeder = threading.Thread(target=feed)
        feeder.start()
        assert told(command) == {"stdout": data}
        feeder.join()
        assert command.code == 0


def test_a_command_that_reads_no_more_stops_its_input(running: Fleet) -> None:
    with NodeCommand(running, 0, ["sh", "-c", "exec <&-; sleep 600"], takes_input=True) as command:
        reader = threading.Thread(target=told, args=(command,))
        reader.start()
        while command.send_input(b"x" * 100_000):
            pass
        command.signal(signal.SIGKILL)
        reader.join()


def test_a_signal_reaches_a_command_that_does_not_read(running: Fleet, tmp_path: Path) -> None:
    script = 'trap "echo caught; exit 5" INT; echo ready; while :; do sleep 0.05; done'
    with NodeCommand(running, 0, ["sh", "-c", script], takes_input=True) as command:
        output = command.output()
        assert next(output) == ("stdout", b"ready\n")
        command.send_input(b"x" * WINDOW)
        command.signal(signal.SIGINT)
        assert b"".join(data for _, data in output) == b"caught\n"
        assert command.code == 5


def test_nothing_is_left_of_a_command_whose_client_leaves(
    running: Fleet, tmp_path: Path, eventually: Eventually
) -> None:
    """Not even a daemon with a session of its own, that ignores the signals it can."""
    mark = tmp_path / "daemon"
    script = f"trap '' TERM HUP; setsid sh -c 'echo $$ > {mark}; trap \"\" HUP; sleep 600' & wait"
    with NodeCommand(running, 0, ["sh", "-c", script]):
        eventually(lambda: mark.exists() and mark.read_text().endswith("\n"))
        pid = int(mark.read_text())
        assert psutil.pid_exists(pid)
    eventually(lambda: not psutil.pid_exists(pid))


def test_what_a_command_leaves_behind_ends_with_it(running: Fleet) -> None:
    with NodeCommand(running, 0, ["sh", "-c", "sleep 600 & echo $!"]) as command:
        pid = int(told(command)["stdout"])
        assert command.code == 0
        assert not psutil.pid_exists(pid)


def test_a_command_ends_with_its_agent(eventually: Eventually) -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        node = compute._open_fleet
        facts = node.service(0, "about")
        agent = facts.ask("facts")["pid"]
        facts.close()
        with NodeCommand(node, 0, ["sh", "-c", "echo $$; exec sleep 600"]) as command:
            output = command.output()
            pid = int(next(output)[1])
            os.kill(agent, signal.SIGKILL)
            with pytest.raises(sky.NodeLostError, match="node 0 is gone, and the command with it"):
                list(output)
        eventually(lambda: not psutil.pid_exists(pid))


def test_several_nodes_get_the_same_input_and_tell_their_codes(running: Fleet) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"4")
    os.close(write_end)
    shown: dict[int, bytes] = {}

    def show(node: int, stream: str, data: bytes) -> None:
        shown[node] = shown.get(node, b"") + data

    script = "read N; echo $((N + 1)); exit $N"
    codes = run_everywhere(running, [0, 1], ["sh", "-c", script], show, given=read_end)
    os.close(read_end)

    assert codes == {0: 4, 1: 4}
    assert shown == {0: b"5\n", 1: b"5\n"}


def test_a_terminal_has_a_size_that_follows_and_a_job_control(running: Fleet) -> None:
    prompt = {"PS1": "ready> "}
    with NodeCommand(running, 0, ["sh"], environment=prompt, terminal=(31, 77)) as command:
        seen = b""
        output = command.output()

        def read_until(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                seen += next(output)[1]
            seen = seen.partition(text)[2]

        command.send_input(b"stty size\n")
        read_until(b"31 77")
        command.resize(20, 60)
        command.send_input(b"stty size\n")
        read_until(b"20 60")
        # Ctrl-C ends what runs in the foreground, and not the shell.
        command.send_input(b"sh -c 'echo be\\gin; exec sleep 600'\n")
        read_until(b"begin")
        command.send_input(b"\x03")
        read_until(b"ready> ")
        command.send_input("echo 'gr\u00fc\u00dfe'\n".encode())
        read_until("\ngr\u00fc\u00dfe".encode())
        command.send_input(b"exit 6\n")
        list(output)
        assert command.code == 6
