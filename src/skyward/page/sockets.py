"""The sockets through which a user's processes show each other their pools.

On Linux they have names instead of files, so a process that is killed leaves nothing. Elsewhere
they are files, and who finds one that nobody listens at removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import tempfile
from pathlib import Path

from skyward import kernel

VIEW, STACKS = b"view\n", b"stacks\n"
"""The wish of one who connects: to see all that changes, or once where the workers are."""
CONNECT_SECONDS = 2.0
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
