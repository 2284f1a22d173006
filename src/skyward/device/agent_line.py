"""The line to the agent: it says what of a device process is to outlive its client.

The agent and the process have a socket between them, with lines of JSON. The agent says which
storages stay (`hold`, `drop`), that a client is over (`leave`) and where the process is to listen
for the next one (`serve`). The process answers, and says when it is free for another client.
"""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from skyward.device.visit import Visit


class AgentLine:
    """The process's end of the socket; a thread listens to the agent."""

    def __init__(self, descriptor: int, library: ctypes.CDLL, kind: str) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._library, self._kind = library, kind
        self._library.sky_worker_held.restype = ctypes.c_uint64
        self._lock = threading.Lock()
        self._saying = threading.Lock()
        self._visit: Visit | None = None
        self._called: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._question = 0
        """The question that the next endpoint answers."""
        self._is_free = False
        self._is_over = False
        """Whether the client that the process was to serve has left before it came."""
        threading.Thread(target=self._listen, name="skyward-agent-line", daemon=True).start()

    @property
    def holds(self) -> bool:
        """Whether storages are to stay when the client leaves."""
        return bool(self._library.sky_worker_held())

    def visited_by(self, visit: Visit) -> None:
        """Note the visit that `leave` is to end."""
        with self._lock:
            self._visit, is_over = visit, self._is_over
        if is_over:
            visit.leave()

    def next_place(self) -> str:
        """Say that the client is gone, and wait until the next one comes; returns where to listen.

        If nothing is to stay any more, the process ends here.
        """
        self._rest()
        with self._lock:
            self._visit = None
            self._is_free, self._is_over = True, False
            self._end_if_empty()
        self._say({"free": True})
        return self._called.get()

    def listens(self, endpoint: str) -> None:
        """Say where the next client finds the process."""
        self._say({"question": self._question, "endpoint": endpoint})

    def _rest(self) -> None:
        """Give back all memory but what stays; ends the process if its device is broken."""
        message = ctypes.create_string_buffer(4096)
        if self._library.sky_worker_rest(
            self._kind.encode(), message, ctypes.c_size_t(len(message))
        ):
            # Whoever reads it is told what the tensors were lost with.
            os.write(2, message.value + b"\n")
            os._exit(1)

    def _end_if_empty(self) -> None:
        if not self.holds:
            os._exit(0)

    def _say(self, what: dict[str, Any]) -> None:
        with self._saying:
            self._socket.sendall(msgspec.json.encode(what) + b"\n")

    def _listen(self) -> None:
        try:
            self._answer_all()
        except Exception:
            # Without this thread nothing of the process can be kept or freed, and no client comes.
            os.write(2, f"the line to the agent failed: {traceback.format_exc()}\n".encode())
            os._exit(1)

    def _answer_all(self) -> None:
        answers: dict[str, Callable[[dict[str, Any]], None]] = {
            "hold": self._hold,
            "drop": self._drop,
            "leave": self._leave,
            "serve": self._serve,
        }
        with self._socket.makefile("rb") as lines:
            for line in lines:
                said = msgspec.json.decode(line, type=dict[str, Any])
                answers[said["do"]](said)
        # The agent is gone: the lifeline ends this process.

    def _hold(self, said: dict[str, Any]) -> None:
        held = not self._library.sky_worker_hold(*_numbers(said["numbers"]))
        self._say({"question": said["question"], "held": held})

    def _drop(self, said: dict[str, Any]) -> None:
        self._library.sky_worker_drop(*_numbers(said["numbers"]))
        with self._lock:
            if self._is_free:
                self._end_if_empty()
                self._rest()

    def _leave(self, _: dict[str, Any]) -> None:
        with self._lock:
            visit = self._visit
            self._is_over = not self._is_free
        if visit is not None:
            visit.leave()

    def _serve(self, said: dict[str, Any]) -> None:
        with self._lock:
            self._is_free, self._question = False, said["question"]
        self._called.put(said["where"])


def _numbers(numbers: Sequence[int]) -> tuple[Any, ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(numbers))(*numbers), ctypes.c_uint64(len(numbers))
