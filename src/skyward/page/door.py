"""The doors through which a user's processes show each other their pools.

A process has one while it has pools: a socket that only this user may use. Who connects says a
wish, and gets lines of JSON: a page all that its pools' watches hear, `sky stacks` one line with
the stacks of the pools' workers.

On Linux, the sockets have names instead of files, so a process that is killed leaves nothing.
Elsewhere they are files, and who finds one that nobody listens at removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from skyward import kernel
from skyward.errors import SkywardError
from skyward.nodes import records
from skyward.nodes.fleet import Fleet
from skyward.nodes.kept import ReachedPool
from skyward.nodes.stacks import PoolStacks, Stacks, read_stacks
from skyward.page.pool import Message
from skyward.page.watch import SAMPLE_SECONDS, FleetWatch

VIEW, STACKS = b"watch\n", b"stacks\n"
"""The wish of one who connects: to hear all that changes, or once where the workers are."""
TICK_SECONDS = 0.1
"""What comes within so many seconds is told together."""
SETTLE_SECONDS = 0.03
"""What comes after a pause waits so long for more: nodes often tell of the same call."""
CONNECT_SECONDS = 2.0
SEND_SECONDS = 10.0
AGAIN_SECONDS = 0.1
"""How long to wait after somebody could not be let in."""
ANSWER_SECONDS = 10.0
"""How long a process has to answer for its pools."""
AT_ONCE = 16
"""How many processes and pools are asked at the same time."""
# A name may be a kind of str, which is no plain one.
encode = msgspec.json.Encoder(enc_hook=str).encode
_LISTED = Path("/proc/net/unix")
_CREDENTIALS = struct.Struct("3i")


def _prefix() -> str:
    return f"skyward-pools-{os.getuid()}-"


def _folder() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def own_address() -> str:
    """Where this process listens; an address that begins with NUL is no file."""
    if kernel.IS_LINUX:
        return f"\0{_prefix()}{os.getpid()}"
    return str(_folder() / f"{_prefix()}{os.getpid()}.sock")


def addresses() -> list[str]:
    """Where this user's processes with pools listen."""
    if not kernel.IS_LINUX:
        return [str(path) for path in sorted(_folder().glob(f"{_prefix()}*.sock"))]
    listed = ""
    with contextlib.suppress(OSError):
        # Anybody may give a socket a name that is no text.
        listed = _LISTED.read_text("utf-8", "surrogateescape")
    # The name ends its line; a machine may have thousands of other sockets.
    names = re.findall(f" @({_prefix()}.*)$", listed, re.MULTILINE)
    return sorted({f"\0{name}" for name in names})


def listen(address: str) -> socket.socket:
    """A socket at which others of this user can connect."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        forget(address)
        listener.bind(address)
        if not address.startswith("\0"):
            # Nobody can connect before `listen`, and then only this user.
            os.chmod(address, 0o600)
        listener.listen(8)
    except OSError:
        listener.close()
        raise
    return listener


def forget(address: str) -> None:
    """Remove the file of a socket, if it has one."""
    if not address.startswith("\0"):
        with contextlib.suppress(OSError):
            os.unlink(address)


def connect(address: str, wish: bytes) -> socket.socket | None:
    """A connection to a process of this user; None if nobody of this user listens."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CONNECT_SECONDS)
    try:
        if not address.startswith("\0") and not _is_own_file(address):
            raise PermissionError
        connection.connect(address)
        if is_own(connection):
            connection.sendall(wish)
            return connection
    except ConnectionRefusedError:
        forget(address)
    except OSError:
        pass
    connection.close()
    return None


def is_own(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user: anybody may use such a name."""
    if not kernel.HAS_PEER_CREDENTIALS:
        return True  # a file, which only its owner may use
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return bool(user == os.getuid())


def _is_own_file(path: str) -> bool:
    about = os.lstat(path)
    return stat.S_ISSOCK(about.st_mode) and about.st_uid == os.getuid()


class Door:
    """Listens on a socket that only this user may use; opened and shut as pools come and go."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self.fleets: list[Fleet] = []
        """The open pools of this process."""
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.guests: set[Guest] = set()
        """Those who are connected."""

    def _forked(self) -> None:
        """Leave the parent's sockets to the parent: a copy would keep its address in use."""
        connections = [guest.connection for guest in self.guests]
        for inherited in [self._listener, *connections]:
            if inherited is not None and inherited.fileno() >= 0:
                # Also if a file of the connection is open, which would put `close` off.
                os.close(inherited.detach())
        self._reset()

    def enter(self, fleet: Fleet) -> None:
        """Show a pool; the door is open from the first one on."""
        with self._lock:
            self.fleets = [*self.fleets, fleet]
            if self._listener is None:
                # Where no socket can be made, the pool works, and `sky ui` does not see it.
                with contextlib.suppress(OSError):
                    self._open()
            guests = list(self.guests)
        for guest in guests:
            guest.wake()

    def leave(self, fleet: Fleet) -> None:
        """Show a pool no more, since it was closed; after the last one, the door is shut."""
        with self._lock:
            self.fleets = [each for each in self.fleets if each is not fleet]
            if not self.fleets:
                self._shut()
            guests = list(self.guests)
        for guest in guests:
            guest.drop(fleet)

    def _open(self) -> None:
        self._listener = listener = listen(own_address())
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="skyward-door", daemon=True
        )
        self._thread.start()

    def _shut(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        forget(own_address())
        # `shutdown` ends an `accept` of another thread, which `close` alone does not.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        listener.close()
        for guest in list(self.guests):
            guest.end()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is not listener:
                    return
                # Such as too many open files: the next one may be let in.
                time.sleep(AGAIN_SECONDS)
                continue
            if not is_own(connection):
                connection.close()
                continue
            Guest(self, connection)

    def look(self) -> tuple[Guest, socket.socket]:
        """Have this process visit itself, for a page of its own pools; the caller ends both."""
        near, far = socket.socketpair()
        near.sendall(VIEW)
        return Guest(self, far, alone=True), near


class Guest:
    """One who has connected, and is told what it wishes on a thread of its own."""

    def __init__(self, door: Door, connection: socket.socket, *, alone: bool = False) -> None:
        """`alone` says that the other end looks at no records of kept pools."""
        self._door, self.connection, self._alone = door, connection, alone
        self._watches: dict[Fleet, FleetWatch] = {}
        self._last: list[Message] = []
        """The last that is to be told of pools that were closed."""
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._ended = False
        door.guests.add(self)
        threading.Thread(target=self._answer, name="skyward-door-guest", daemon=True).start()

    def wake(self) -> None:
        """Have what is new told soon."""
        if not self._woken.is_set():
            self._woken.set()

    def drop(self, fleet: Fleet) -> None:
        """Watch a pool no more; that it is gone is told soon."""
        with self._lock:
            watch = self._watches.pop(fleet, None)
            if watch is not None:
                self._last += [*watch.news(), {"type": "gone", "pool": fleet.id}]
                watch.close()
        self.wake()

    def end(self) -> None:
        """End when what is new has been told."""
        self._ended = True
        self.wake()

    def _answer(self) -> None:
        connection = self.connection
        try:
            connection.settimeout(SEND_SECONDS)
            with connection.makefile("rb") as lines:
                wish = lines.readline(64)
            if wish == VIEW:
                self._feed()
            elif wish == STACKS:
                connection.sendall(msgspec.json.encode(own_stacks()) + b"\n")
        except OSError:
            pass  # the other end has left, or is too slow
        finally:
            self._door.guests.discard(self)
            with self._lock:
                for watch in self._watches.values():
                    watch.close()
                self._watches.clear()
            connection.close()

    def _feed(self) -> None:
        while True:
            is_last = self._ended
            began = time.monotonic()
            # Also if there is no news: it shows whether the other end is there.
            self.connection.sendall(encode(self._news()) + b"\n")
            if is_last:
                return
            if self._woken.wait(SAMPLE_SECONDS):
                time.sleep(max(SETTLE_SECONDS, began + TICK_SECONDS - time.monotonic()))
            self._woken.clear()

    def _news(self) -> list[Message]:
        with self._lock:
            told, self._last = self._last, []
            for fleet in self._door.fleets:
                if fleet not in self._watches:
                    self._watches[fleet] = FleetWatch(fleet, self.wake, alone=self._alone)
            for watch in self._watches.values():
                told += watch.news()
        return told


# Where the workers are.


def own_stacks() -> list[PoolStacks]:
    """The stacks of all pools of this process."""
    pools = door.fleets
    try:
        return _asked([partial(_of_fleet, each.id, each.spec.name, each.stacks) for each in pools])
    except RuntimeError:
        # The interpreter ends, and starts no thread any more.
        return []


def _of_fleet(pool: str, name: str, look: Callable[[], Stacks]) -> list[PoolStacks]:
    return [PoolStacks.of(pool, name, look)]


def all_stacks(name: str | None = None) -> list[PoolStacks]:
    """The stacks of the pools of this user's processes and of those that are kept, by name.

    A pool of that name, if one is given. A pool that does not answer has a problem instead.
    """
    asked = [partial(_of_process, address) for address in addresses()]
    found = {pool.pool: pool for pool in _asked(asked)}
    kept = [each for each in records.names() if name in (None, each)]
    # A kept pool is also one of the process that is attached to it.
    for pool in _asked([partial(_of_kept, each, set(found)) for each in kept]):
        found[pool.pool] = pool
    wanted = [pool for pool in found.values() if name in (None, pool.name)]
    return sorted(wanted, key=lambda pool: (pool.name, pool.pool))


def _asked(questions: Sequence[Callable[[], list[PoolStacks]]]) -> list[PoolStacks]:
    if not questions:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(questions)), "skyward-stacks") as threads:
        return [pool for pools in threads.map(lambda ask: ask(), questions) for pool in pools]


def _of_process(address: str) -> list[PoolStacks]:
    connection = connect(address, STACKS)
    if connection is None:
        return []
    with connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            with connection.makefile("rb") as lines:
                return msgspec.json.decode(lines.readline(), type=list[PoolStacks])
        except (OSError, msgspec.DecodeError) as problem:
            process = address.removesuffix(".sock").rpartition("-")[2]
            why = f"the process {process} does not answer for its pools: {problem}"
            return [PoolStacks(f"process {process}", "?", (), why)]


def _of_kept(name: str, known: set[str]) -> list[PoolStacks]:
    try:
        record = records.read(name)
        if record.id in known or record.stopped:
            return []
        with ReachedPool(record) as pool:
            look = partial(read_stacks, pool.nodes, pool.service)
            return [PoolStacks.of(record.id, name, look)]
    except (SkywardError, OSError, EOFError) as problem:
        return [PoolStacks(name, name, (), str(problem) or type(problem).__name__)]


door = Door()
"""The door of this process."""

os.register_at_fork(after_in_child=door._forked)
