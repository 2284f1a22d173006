"""The sockets through which a user's processes show each other their pools."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def _folder() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def own_socket() -> Path:
    """Where this process has its socket."""
    return _folder() / f"skyward-pools-{os.getuid()}-{os.getpid()}.sock"


def sockets() -> list[Path]:
    """The sockets of this user's processes that have pools, and of some that were killed."""
    found = sorted(_folder().glob(f"skyward-pools-{os.getuid()}-*.sock"))
    return [path for path in found if _is_own(path)]


def _is_own(path: Path) -> bool:
    """Whether a socket is this user's: in /tmp, others may make one with such a name."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(about.st_mode) and about.st_uid == os.getuid()
