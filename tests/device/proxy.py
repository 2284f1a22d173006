"""A TCP proxy that loses connections on purpose."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable, Iterator

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """Stands between a client and a server, and cuts, holds or refuses what passes."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.connections = 0
        self.cuts = 0
        self.refusing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._cut_after: list[int] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="proxy", daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Reset every connection."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self.cuts += 1
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut_after(self, counts: Iterable[int]) -> None:
        """Reset every connection after so many bytes, then after so many more, and so on."""
        with self._lock:
            self._cut_after = list(counts)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """A link without a word: nothing passes, and nothing is closed either."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def close(self) -> None:
        """End it with all its threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._flowing.set()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        host, _, port = self.server.removeprefix("tcp:").rpartition(":")
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.refusing:
                near.close()
                continue
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
            for source, target in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=(source, target), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                allowed = self._allowed(len(data))
                target.sendall(data[:allowed])
                if allowed < len(data):
                    self.cut()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _allowed(self, count: int) -> int:
        with self._lock:
            if not self._cut_after:
                return count
            if count < self._cut_after[0]:
                self._cut_after[0] -= count
                return count
            return self._cut_after.pop(0)
