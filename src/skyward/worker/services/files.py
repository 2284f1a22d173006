"""Files: folders of the node that follow folders of the client, volumes, and copies."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from skyward.closing import Closing
from skyward.errors import PoolError
from skyward.files.items import FileItem, decode, encode, parents
from skyward.files.scanner import Scanner
from skyward.files.transfer import PIECE, Told, arriving, listed, look, pieces
from skyward.files.tree import STAGING, Tree
from skyward.files.volumes import NodeVolume
from skyward.wire import messages
from skyward.wire.channel import whole_of
from skyward.wire.messages import Question
from skyward.worker.services import Caller, Parts, answers

Mode = Annotated[int, msgspec.Meta(ge=0, le=0o777)]


class NodeFolders(Closing):
    """The folders of this node that follow others, and its volumes."""

    def __init__(self) -> None:
        self._trees: dict[Path, tuple[Tree, threading.Lock]] = {}
        """What was sent once is not sent again."""
        self._volumes: dict[str, NodeVolume] = {}
        """By their paths."""
        self._closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def tree(self, caller: Caller, root: str) -> Iterator[Tree]:
        """The folder at a root, for one at a time; without a root the working directory."""
        place = Path(root or caller.node.config.working_directory)
        with self._lock:
            tree, lock = self._trees.setdefault(place, (Tree(place), threading.Lock()))
        with lock:
            yield tree

    def mount(self, target: str, volume: NodeVolume, tell: Told) -> None:
        """Have a volume at a path."""
        volume.open(tell)
        with self._lock:
            if not self._closed:
                self._volumes[target] = volume
                return
        volume.close(lambda what: None)
        raise PoolError("the node is ending")

    def volumes(self, target: str = "", *, go: bool = False) -> list[NodeVolume]:
        """The volume at a path, if there is one, or all; those that `go` are forgotten."""
        with self._lock:
            found = {path: each for path, each in self._volumes.items() if target in ("", path)}
            if go:
                for path in found:
                    del self._volumes[path]
        return list(found.values())

    def close(self) -> None:
        """Write volumes back and take them away: the client may be gone."""
        with self._lock:
            self._closed = True
        for volume in self.volumes(go=True):
            try:
                volume.close(lambda what: None)
            except Exception as problem:
                # The other volumes are written back all the same.
                print(f"{volume.target}: {problem}", file=sys.stderr)


# Volumes. What fsspec and its packages raise, the client is told, too.


@answers("files")
def mount(caller: Caller, source: str, target: str, read_only: bool) -> int:
    """Mount a volume, and tell meanwhile how far that is."""
    volume = NodeVolume(source, target, read_only=read_only)
    with _told():
        caller.node.own(NodeFolders).mount(target, volume, caller.reply)
    return 0


@answers("files", "write back")
def write_back(caller: Caller, target: str = "") -> int:
    """Write a volume back, or all; raises at the end what failed."""
    written, problems = 0, []
    for volume in caller.node.own(NodeFolders).volumes(target):
        try:
            with _told():
                written += volume.write_back(caller.reply)
        except PoolError as problem:
            problems.append(str(problem) if target else f"{volume.target}: {problem}")
    if problems:
        raise PoolError("; ".join(problems))
    return written


@answers("files")
def unmount(caller: Caller, target: str) -> int:
    """Write a volume back, and take it away."""
    with _told():
        folders = caller.node.own(NodeFolders)
        return sum(each.close(caller.reply) for each in folders.volumes(target, go=True))


# Folders.


@answers("files")
def sent(caller: Caller, root: str) -> Parts:
    """What clients are known to have of a folder."""
    with caller.node.own(NodeFolders).tree(caller, root) as tree:
        known = encode(list(tree.known.values()))
    yield None, (known,)


@answers("files")
def brought(caller: Caller, root: str, body: bytearray) -> None:
    """Note what a client has brought back from a folder."""
    with _told():
        brought = {item.name: item for item in decode(body)}
    folders = {name for name, item in brought.items() if item.kind == "folder"}
    gone = brought.keys() - folders
    with caller.node.own(NodeFolders).tree(caller, root) as tree:
        kept = {n: i for n, i in tree.known.items() if gone.isdisjoint(parents(n))}
        tree.known = kept | brought


@answers("files")
def follow(caller: Caller, root: str, body: bytearray) -> dict[str, Any]:
    """Make a folder as a list of files says.

    The first reply has the numbers of those whose bytes are missing, which come then.
    """
    with caller.node.own(NodeFolders).tree(caller, root) as tree:
        try:
            return _fill(caller, tree, body)
        finally:
            tree.abandon()


def _fill(caller: Caller, tree: Tree, listing: bytearray) -> dict[str, Any]:
    with _told():
        items = decode(listing)
        tree.root.mkdir(parents=True, exist_ok=True)
        missing = tree.compare(items)
        size = sum(items[number].size for number in missing)
        free = shutil.disk_usage(tree.root).free
    if size > free:
        raise PoolError(
            f"{tree.root} has room for {free / 1e9:.1f} GB, and {size / 1e9:.1f} GB are to "
            "come; leave files out with excludes=[...], or use a larger disk (disk_gb=...)"
        )
    caller.reply(missing)
    problem: OSError | None = None
    while (part := _next(caller))[0].what != "finish":
        try:
            # After a failure, the rest is still taken, since it is on its way already.
            if problem is None:
                _take(tree, *part)
        except OSError as failure:
            problem = failure
    with _told():
        if problem is not None:
            raise problem
        return tree.finish()


def _next(caller: Caller) -> tuple[Question, bytearray]:
    frame = caller.channel.receive()
    part = messages.decode_as(Question, frame.kind, frame.meta)
    return part, whole_of(caller.channel, frame)


def _take(tree: Tree, part: Question, body: bytearray) -> None:
    view, at = memoryview(body), 0
    for number, length, last in part.arguments["parts"]:
        tree.add(number, view[at : at + length], last)
        at += length


@answers("files")
def read(caller: Caller, root: str) -> Parts:
    """What a folder holds; then the files that the caller asks for."""
    place = Path(root or caller.node.config.working_directory)
    with _told():
        scanner = Scanner(place, [f"{STAGING}*"], everything=True, remember=False)
        listing = scanner.scan().items
    yield from _send(caller, place, listing)


def _send(caller: Caller, root: Path, items: Sequence[FileItem]) -> Parts:
    yield len(items), (encode(items),)
    asked, _ = _next(caller)
    with _told():
        yield from pieces(root, items, asked.arguments["missing"], PIECE)


# Copies: of paths that are relative to the working directory, or begin with the user's home.


@answers("files", "look")
def look_at(caller: Caller, path: str, whole: bool = False) -> Any:
    """What is at a path; with `whole`, also how much a folder holds."""
    place = os.path.join(caller.node.config.working_directory, os.path.expanduser(path))
    return msgspec.to_builtins(look(Path(os.path.normpath(place)), whole=whole))


@answers("files")
def fetch(caller: Caller, path: str, without: str = "", digests: bool = True) -> Parts:
    """What is copied of a path; then the files that the caller asks for."""
    yield from _send(caller, *listed(Path(path), without, digests))


@answers("files")
def take(caller: Caller, root: str, new: str, mode: Mode) -> None:
    """Put items into a folder, or into a new one there; without all of them, it does not appear.

    Lists of "items" come, and are answered as by `follow`; then "done".
    """
    with arriving(Path(root), new, mode) as tree:
        while (part := _next(caller))[0].what == "items":
            caller.reply(_fill(caller, tree, part[1]))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Have the client told of whatever fails, whether it is ours or of a package for volumes."""
    try:
        yield
    except Exception as problem:
        if not isinstance(problem, OSError) or problem.errno is None:
            raise PoolError(str(problem)) from problem
        where = f": {problem.filename}" if problem.filename else ""
        raise PoolError(f"{problem.strerror}{where}") from problem
