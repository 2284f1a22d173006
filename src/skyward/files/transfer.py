"""Transfer: the client's end of the service for files, which makes folders equal and copies."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from skyward.console.measures import size as shown_size
from skyward.errors import ConfigurationError, NodeLostError, PoolError, ProtocolError
from skyward.files.items import FileItem, Listing, decode, encode, parents
from skyward.files.scanner import Scanner, digest_of, holds
from skyward.files.tree import Tree, blocked
from skyward.wire import messages
from skyward.wire.channel import Bytes, ServiceConnection, whole_of
from skyward.wire.frames import Frame
from skyward.wire.messages import Question, Reply

PIECE = 4 << 20
"""How many bytes travel in one message."""
ATTEMPTS = 3
"""How often files that change while they are sent are sent again."""
MOST_TOLD = 10
"""How many files that are not brought back are named."""

Part = tuple[int, int, bool]
"""The number of an item, how many bytes of it follow, and whether these are the last."""
Told = Callable[[str], None]
Pieces = Iterator[tuple[list[Part], Sequence[Bytes]]]
Give = Callable[[list[int]], Pieces]
"""Gives the bytes of items by their numbers."""
Fill = Callable[[list[FileItem], Give], list[str]]
"""Puts items in their places; returns the names of those that changed meanwhile."""


@dataclass(frozen=True, slots=True)
class Synced:
    """What was done so that one folder is as another."""

    files: int = 0
    """Files that were written."""
    removed: int = 0
    """Files that were removed."""
    bytes: int = 0
    """Bytes that were sent."""

    def __add__(self, other: Synced) -> Synced:
        return Synced(
            self.files + other.files, self.removed + other.removed, self.bytes + other.bytes
        )


def pieces(
    root: Path, items: Sequence[FileItem], missing: Sequence[int], most: int
) -> Iterator[tuple[list[Part], list[bytes]]]:
    """The bytes of files, in messages: many small files in one, a large file in several."""
    parts: list[Part] = []
    data: list[bytes] = []
    size = 0
    for number in missing:
        promised = items[number].size
        try:
            file = (root / items[number].name).open("rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError):
            # Deleted since the scan: the other end misses it, and the next scan knows.
            continue
        with file:
            sent, last = 0, False
            begun = os.fstat(file.fileno())
            while not last:
                piece = file.read(min(most - size, promised - sent)) or b""
                sent += len(piece)
                if sent == promised and not items[number].content:
                    now = os.fstat(file.fileno())
                    # Of a file without a digest, only its times tell that its bytes are old and new
                    # ones; what is added to a log is not among them. The other end misses the rest.
                    if now.st_mtime_ns != begun.st_mtime_ns and now.st_size == begun.st_size:
                        sent, piece = sent - len(piece), b""
                # A file that has become shorter ends early, and its digest is another one.
                last = sent == promised or not piece
                parts.append((number, len(piece), last))
                data.append(piece)
                size += len(piece)
                if size >= most:
                    yield parts, data
                    parts, data, size = [], [], 0
    if parts:
        yield parts, data


def send(
    connection: ServiceConnection,
    listing: Listing,
    scan: Callable[[], Listing],
    source: Path,
    root: str = "",
    told: Told = lambda what: None,
) -> tuple[Synced, Listing]:
    """Make a folder of a node as the folder here; without `root` it is the working directory.

    `scan` is called again when files change while they are sent. Returns what the node has then.
    """
    done = Synced()
    again: list[str] = []
    channel = connection.channel
    for attempt in range(ATTEMPTS):
        if attempt:
            listing = scan()
        channel.send(Question("follow", {"root": root}), [encode(listing.items)])
        missing: list[int] = connection.next_reply().value
        size = sum(listing.items[number].size for number in missing)
        sent = 0
        for parts, data in pieces(source, listing.items, missing, PIECE):
            channel.send(Question("part", {"parts": parts}), data)
            sent += sum(map(len, data))
            told(f"sending files, {sent / 1e6:.1f} of {size / 1e6:.1f} MB")
        channel.send(Question("finish"))
        result = connection.next_reply().value
        done += Synced(result["written"], result["removed"], sent)
        again = result["again"]
        if not again:
            return done, listing
    raise PoolError(
        f"{', '.join(again[:3])} changed {ATTEMPTS} times while being sent; leave out what is "
        "written all the time, with excludes=[...]"
    )


def bring(
    connection: ServiceConnection,
    root: str,
    target: Path,
    brought: dict[str, FileItem],
    told: Told = lambda what: None,
    progress: Told | None = None,
) -> Synced:
    """Write here what has changed in a node's folder since it was sent; nothing is removed here.

    A file that has changed here, too, is not overwritten, unless it is as in `brought`: what came
    from nodes before, to which this adds. `told` hears of such files, and of the progress, unless
    `progress` does.
    """
    # The node says what it was sent, since that may have been another client's doing.
    connection.send("sent", root=root)
    before = {item.name: item for item in _listed(connection)}
    connection.next_reply()
    connection.send("read", root=root)
    there = _listed(connection)
    changed: list[int] = []
    left: list[str] = []
    for number, item in enumerate(there):
        known = [each[item.name] for each in (before, brought) if item.name in each]
        if item.name in before and before[item.name].is_like(item):
            continue
        if reason := _why_not(target, item, known):
            left.append(f"{target / item.name} stays as it is: {reason}")
        else:
            changed.append(number)
    for each in left[:MOST_TOLD]:
        told(each)
    if len(left) > MOST_TOLD:
        told(f"and so do {len(left) - MOST_TOLD} more files of {target}")
    tree = Tree(target, keeps_modes=True)
    # Files that are here already, since another node wrote the same, need not come.
    missing = [changed[number] for number in tree.compare([there[each] for each in changed])]
    number_of = {number: at for at, number in enumerate(changed)}
    came = 0
    try:
        for parts, data in _asked_for(connection, missing):
            for (number, _, last), piece in zip(parts, data, strict=True):
                tree.add(number_of[number], piece, last)
            came += sum(map(len, data))
            (progress or told)(f"bringing files back, {came / 1e6:.1f} MB")
        result = tree.finish()
    finally:
        tree.abandon()
    listing = encode(list(tree.known.values()))
    connection.channel.send(Question("brought", {"root": root}), [listing])
    connection.next_reply()
    brought.update(tree.known)
    return Synced(result["written"], 0, came)


def _why_not(target: Path, item: FileItem, known: Sequence[FileItem]) -> str:
    """Why what a node has may not be written here; empty if it may."""
    path = target / item.name
    if in_the_way := blocked(target, item.name):
        return f"{target / in_the_way} is a link or a file here, and a folder on the node"
    if item.leads_out:
        return f"on the node it is a link to {os.fsdecode(item.content)}, out of the folder"
    if not os.path.lexists(path):
        return ""
    if (item.kind == "folder") != (path.is_dir() and not path.is_symlink()):
        return f"on the node it is a {item.kind}"
    if any(holds(path, each) for each in (item, *known)):
        return ""
    return "it has changed here, too, since the node got it"


def _listed(connection: ServiceConnection) -> list[FileItem]:
    """The items that a node lists."""
    frame, _ = _next(connection)
    return decode(whole_of(connection.channel, frame))


def _asked_for(connection: ServiceConnection, missing: Sequence[int]) -> Pieces:
    """The bytes of items that a node has listed, by their numbers."""
    connection.channel.send(Question("send", {"missing": missing}))
    while True:
        frame, reply = _next(connection)
        body = memoryview(whole_of(connection.channel, frame))
        if not reply.more:
            return
        ends = list(itertools.accumulate(length for _, length, _ in reply.value))
        yield reply.value, [body[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _next(connection: ServiceConnection) -> tuple[Frame, Reply]:
    frame = connection.channel.receive()
    reply = messages.decode_as(Reply, frame.kind, frame.meta)
    if reply.problem:
        raise PoolError(reply.problem)
    return frame, reply


# Copies: a file or a folder from one place to another, as `sky cp` makes them. A file appears when
# it is complete, and so does a folder that was not there before. Links inside a folder stay links.


class PathLook(msgspec.Struct):
    """What is at a path, through links."""

    path: str
    """The whole path."""
    kind: Literal["file", "folder", "other", ""] = ""
    """Empty if nothing is there."""
    parent: bool = True
    """Whether the folder above is there."""
    free: int = 0
    """Bytes that are free there."""
    size: int = 0
    """Bytes of the file, or of all files of a folder that was looked at as a whole."""
    passed_over: int = 0
    """How many sockets, pipes and devices such a folder has, which are not copied."""
    mode: int = 0o644
    identity: str = ""
    """The same for two paths that lead to one thing on one machine."""


@dataclass(slots=True)
class Copied:
    """What was copied."""

    files: int = 0
    bytes: int = 0
    passed_over: int = 0
    """Sockets, pipes and devices, which are not copied."""


def look(path: Path, *, whole: bool = False) -> PathLook:
    """What is at a path; with `whole`, also how much a folder holds."""
    has_parent = path.parent.is_dir()
    free = shutil.disk_usage(path.parent).free if has_parent else 0
    try:
        seen = path.stat()
    except FileNotFoundError:
        return PathLook(str(path), "", has_parent, free)
    found = PathLook(str(path), "other", free=free, mode=seen.st_mode & 0o777)
    found.identity = _identity(seen)
    if stat.S_ISREG(seen.st_mode):
        found.kind, found.size = "file", seen.st_size
    elif stat.S_ISDIR(seen.st_mode):
        found.kind = "folder"
    if found.kind == "folder" and whole:
        for folder, _, names in os.walk(path, onerror=_fail):
            for name in names:
                status = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(status.st_mode):
                    found.size += status.st_size
                elif not stat.S_ISLNK(status.st_mode):
                    found.passed_over += 1
    return found


def _fail(problem: OSError) -> None:
    raise problem


def _identity(seen: os.stat_result) -> str:
    return f"{_machine()}:{seen.st_dev}:{seen.st_ino}"


@functools.cache
def _machine() -> str:
    """The same for all processes of a machine since it was started."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def listed(path: Path, without: str, digests: bool) -> tuple[Path, list[FileItem]]:
    """What is copied of a path: a root, and the items below it.

    Of a folder, everything but a folder in it whose identity is `without`: a folder is not copied
    into itself. Without `digests`, no file is read.
    """
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        size, mode = status.st_size, status.st_mode & 0o777
        digest = digest_of(path, size) if digests else b""
        return path.parent, [FileItem(path.name, "file", size, mode, digest)]
    items, left = [], set[str]()
    scanner = Scanner(path, everything=True, remember=False, digests=digests)
    for item in scanner.scan().items:
        if item.kind == "folder":
            status = (path / item.name).stat()
            if _identity(status) == without:
                left.add(item.name)
            item = msgspec.structs.replace(item, mode=status.st_mode & 0o777)
        if left.isdisjoint((item.name, *parents(item.name))):
            items.append(item)
    return path, items


@contextlib.contextmanager
def arriving(root: Path, new: str = "", mode: int = 0o755) -> Iterator[Tree]:
    """The folder at a path, to put items into; with `new`, a folder of that name there.

    The new folder has its name when all is in it.
    """
    if not new:
        tree = Tree(root)
        try:
            yield tree
        finally:
            tree.abandon()
        return
    staged = root / f".{new[:200]}.{secrets.token_hex(4)}.part"
    staged.mkdir()
    try:
        yield Tree(staged)
        staged.chmod(mode & 0o777 | 0o700)
        staged.rename(root / new)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


class FilesHere:
    """The files of this machine, as one end of a copy."""

    def shown(self, path: str) -> str:
        """A path as the user would write it."""
        return path

    def look(self, path: str, *, whole: bool = False) -> PathLook:
        """What is at a path."""
        return look(Path(os.path.abspath(os.path.expanduser(path))), whole=whole)

    @contextlib.contextmanager
    def reading(
        self, path: str, without: str, digests: bool
    ) -> Iterator[tuple[list[FileItem], Give]]:
        """What is copied of a path, and what gives the bytes of items by their numbers."""
        root, items = listed(Path(path), without, digests)
        yield items, lambda missing: pieces(root, items, missing, PIECE)

    @contextlib.contextmanager
    def writing(self, root: str, new: str, mode: int) -> Iterator[Fill]:
        """What puts items into a folder, or into a new one there, which is complete in the end."""
        with arriving(Path(root), new, mode) as tree:
            yield functools.partial(self._fill, tree)

    def _fill(self, tree: Tree, items: list[FileItem], give: Give) -> list[str]:
        for parts, data in give(tree.compare(items)):
            for (number, _, last), piece in zip(parts, data, strict=True):
                tree.add(number, piece, last)
        return [str(name) for name in tree.finish()["again"]]


class FilesOnNode:
    """The files of a node, as one end of a copy."""

    def __init__(self, open_service: Callable[[str], ServiceConnection], label: str) -> None:
        """`label` is the node as the user names it, such as `train/0`."""
        self._open, self._label = open_service, label

    def shown(self, path: str) -> str:
        """A path as the user would write it."""
        return f"{self._label}:{path}"

    def look(self, path: str, *, whole: bool = False) -> PathLook:
        """What is at a path."""
        with self._open("files") as connection, self._told():
            return msgspec.convert(connection.ask("look", path=path, whole=whole), PathLook)

    @contextlib.contextmanager
    def reading(
        self, path: str, without: str, digests: bool
    ) -> Iterator[tuple[list[FileItem], Give]]:
        """What is copied of a path, and what gives the bytes of items by their numbers."""
        with self._open("files") as connection:
            with self._told():
                connection.send("fetch", path=path, without=without, digests=digests)
                items = _listed(connection)
            yield items, functools.partial(self._give, connection)

    def _give(self, connection: ServiceConnection, missing: list[int]) -> Pieces:
        with self._told():
            yield from _asked_for(connection, missing)

    @contextlib.contextmanager
    def writing(self, root: str, new: str, mode: int) -> Iterator[Fill]:
        """What puts items into a folder, or into a new one there, which is complete in the end."""
        with self._open("files") as connection:
            connection.send("take", root=root, new=new, mode=mode)
            yield functools.partial(self._fill, connection)
            with self._told():
                connection.ask("done")

    def _fill(self, connection: ServiceConnection, items: list[FileItem], give: Give) -> list[str]:
        channel = connection.channel
        with self._told():
            channel.send(Question("items"), [encode(items)])
            missing = connection.next_reply().value
        for parts, data in give(missing):
            with self._told():
                channel.send(Question("part", {"parts": parts}), data)
        with self._told():
            return [str(name) for name in connection.ask("finish")["again"]]

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell which node it is that has failed."""
        try:
            yield
        except ProtocolError:
            raise
        except PoolError as problem:
            raise PoolError(f"{self._label}: {problem}") from None
        except (EOFError, OSError) as problem:
            raise NodeLostError(
                f"{self._label}: the node is gone: {problem}; what was not copied completely is "
                "removed; `sky ps` shows the pools that are there"
            ) from problem


FilePlace = FilesHere | FilesOnNode


def copy(
    source: FilePlace,
    path: str,
    destination: FilePlace,
    to: str,
    *,
    recursive: bool = False,
    begin: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Copied:
    """Copy a file or, with `recursive`, a folder; into `to` if that is a folder, else as `to`.

    Calls `begin` with the number of bytes that have to travel, and `advance` as they do.
    """
    found = source.look(path, whole=recursive)
    if not found.kind:
        raise ConfigurationError(f"there is no {source.shown(found.path)}")
    if found.kind == "folder" and not recursive:
        raise ConfigurationError(
            f"{source.shown(found.path)} is a folder; copy it with all that is in it: -r"
        )
    if found.kind == "other":
        raise ConfigurationError(f"{source.shown(found.path)} is neither a file nor a folder")
    target = _target(found, destination, to)
    if found.size > target.free:
        raise ConfigurationError(
            f"no room for {destination.shown(target.path)}: {shown_size(found.size)} are to be "
            f"copied, {shown_size(target.free)} are free there"
        )
    parent, name = os.path.split(target.path)
    # A folder that is there gets what is in the other; all else is made in the folder above.
    merges = target.kind == found.kind == "folder"
    root, new = (target.path, "") if merges else (parent, name if found.kind == "folder" else "")
    # Only where the same may be there already is a file read to tell, before it is read to send it.
    digests = merges or (target.kind == "file" and target.size == found.size)
    with destination.writing(root, new, found.mode) as fill:
        for _ in range(ATTEMPTS):
            with source.reading(found.path, target.identity, digests) as (items, give):
                if found.kind == "file":
                    items = [msgspec.structs.replace(items[0], name=name)]
                again = fill(items, functools.partial(_counted, items, give, begin, advance))
            if not again:
                break
        else:
            raise PoolError(
                f"{', '.join(again[:3])} changed {ATTEMPTS} times while being copied; copy it when "
                "nobody writes it"
            )
    count = sum(item.kind != "folder" for item in items)
    return Copied(count, sum(item.size for item in items), found.passed_over)


def _counted(
    items: list[FileItem],
    give: Give,
    begin: Callable[[int], None],
    advance: Callable[[int], None],
    missing: list[int],
) -> Pieces:
    begin(sum(items[number].size for number in missing))
    for parts, data in give(missing):
        yield parts, data
        advance(sum(map(len, data)))


def _target(found: PathLook, destination: FilePlace, to: str) -> PathLook:
    """What is at the place that the copy will have."""
    there = destination.look(to or ".")
    if there.kind == "folder":
        there = destination.look(f"{there.path.rstrip('/')}/{os.path.basename(found.path)}")
    elif not there.kind and to.endswith("/"):
        raise ConfigurationError(
            f"there is no folder {destination.shown(there.path)}; make it first, or leave out the "
            "'/' at the end to copy to that name"
        )
    elif not there.parent:
        folder = destination.shown(os.path.dirname(there.path))
        raise ConfigurationError(f"there is no folder {folder}; make it first (mkdir -p)")
    if there.kind and there.identity == found.identity:
        raise ConfigurationError(
            f"{destination.shown(there.path)} is the same as the source; give another name"
        )
    if there.kind and (there.kind == "folder") != (found.kind == "folder"):
        raise ConfigurationError(
            f"{destination.shown(there.path)} is there already, and is a {there.kind}, not a "
            f"{found.kind}; give another name"
        )
    return there
