"""The line between an agent and a device process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading

import msgspec

from skyward.worker.devices import DeviceLine

LONG = list(range(100_000))
"""Storages whose numbers do not fit into a socket's memory at once."""


def test_what_several_threads_say_to_a_device_process_is_not_mixed() -> None:
    line = DeviceLine()
    heard = socket.socket(fileno=os.dup(line.inherited))
    line.handed_over()
    threads = [threading.Thread(target=line.drop, args=(LONG,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    with heard, heard.makefile("rb") as lines:
        said = [lines.readline() for _ in threads]
    for thread in threads:
        thread.join()
    line._socket.close()
    assert [msgspec.json.decode(each)["numbers"] for each in said] == [LONG] * 4


def test_a_device_process_that_cannot_listen_to_its_agent_ends_and_says_why() -> None:
    ours, others = socket.socketpair()
    program = """
        import sys, threading, types
        from skyward.device.agent_line import AgentLine
        library = types.SimpleNamespace(sky_worker_held=types.SimpleNamespace())
        line = AgentLine(int(sys.argv[1]), library, "cpu")
        threading.Event().wait()
    """
    with ours, others:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(others.fileno())],
            pass_fds=[others.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            ours.sendall(b'{"do": "dance"}\n')
            _, problems = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "the line to the agent failed" in problems
    assert "dance" in problems
