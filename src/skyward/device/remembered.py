"""Files with what workers have answered about the shapes of results, so that nobody asks twice.

Over a network a question costs a round trip. There is one file for each kind of worker: the same
device with the same torch, and the same cores here, answer alike. A file that cannot be read counts
as empty. Workers check every result, so a wrong answer is noticed: the session forgets all of the
file and asks, and the file is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyward.device import build

MAGIC = b"skyward-shapes-1\n"
DIGEST = hashlib.sha256().digest_size
BYTES_MAX = 8 << 20
"""The size of a file; the oldest answers make room for new ones."""
FILES_MAX = 32
"""How many files stay, for as many kinds of workers."""
IDENTITY = (
    "type",
    "name",
    "major",
    "minor",
    "torch_version",
    "cuda_version",
    "cudnn_version",
    "instructions",
)
"""The properties of a device that its answers depend on: they decide which kernels it runs."""


def folder() -> Path:
    """Where the files are; all of it may be deleted at any time."""
    return Path(os.environ.get("SKYWARD_SHAPES") or build.cache() / "shapes")


def file_for(properties: Mapping[str, Any]) -> Path:
    """The file of a device with these properties, which need not exist."""
    identity = [str(properties.get(name)) for name in IDENTITY]
    identity.append(build.library("client").name)
    return folder() / hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]


def read(path: Path) -> bytes:
    """The answers in a file, as the core takes them; empty without a file or with a broken one."""
    try:
        content = path.read_bytes()
    except OSError:
        return b""
    answers = content[len(MAGIC) + DIGEST :]
    return answers if content == _sealed(answers) else b""


def add(path: Path, learned: bytes, right: bool) -> None:
    """Add the answers of a session to a file. If earlier ones were not right, the file goes."""
    with contextlib.suppress(OSError):  # the cache may be read-only, or full
        if not right:
            path.unlink(missing_ok=True)
        elif learned:
            # Of two clients that end at once, the last one wins: the other asks again.
            _replace(path, _sealed(_joined(read(path), learned)))
            _remove_old()


def _sealed(answers: bytes) -> bytes:
    return MAGIC + hashlib.sha256(answers).digest() + answers


def _joined(before: bytes, learned: bytes) -> bytes:
    """All answers, each once, and of those that do not fit the newest."""
    known = dict((*_entries(before), *_entries(learned)))
    kept: list[bytes] = []
    size = 0
    for entry in reversed(known.values()):
        size += len(entry)
        if size > BYTES_MAX:
            break
        kept.append(entry)
    return b"".join(reversed(kept))


def _entries(answers: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The key of each answer, and both together as they are written."""
    at = 0
    while at < len(answers):
        start = at
        at += 4 + int.from_bytes(answers[at : at + 4], "little")
        key = answers[start:at]
        at += 4 + int.from_bytes(answers[at : at + 4], "little")
        yield key, answers[start:at]


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _remove_old() -> None:
    files = [path for path in folder().iterdir() if not path.name.startswith(".")]
    files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[FILES_MAX:]:
        path.unlink(missing_ok=True)
