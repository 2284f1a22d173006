"""Files: folders of the node that follow folders of the client, and are read back by it."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

from skyward.errors import PoolError, ProtocolError
from skyward.files.items import decode, encode, parents
from skyward.files.scanning import Scanner
from skyward.files.transfer import PIECE, Told, pieces, received
from skyward.files.tree import STAGING, Tree
from skyward.files.volumes import NodeVolume
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.messages import Question, Reply
from skyward.worker.services import ServedNode

_trees: dict[Path, tuple[Tree, threading.Lock]] = {}
"""The folders of this node that follow others; what was sent once is not sent again."""
_volumes: dict[str, NodeVolume] = {}
"""The volumes of this node, by their paths."""
_lock = threading.Lock()


def serve(node: ServedNode, channel: Channel) -> None:
    """Take one folder after the other, until the other end leaves."""
    while True:
        frame = channel.receive()
        question = messages.decode_as(Question, frame.kind, frame.meta)
        root = Path(question.arguments.get("root") or node.config.working_directory)
        body = received(channel, frame)
        if question.what == "follow":
            tree, lock = _tree(root)
            with lock:
                _follow(tree, channel, bytes(body))
        elif question.what in ("sent", "brought"):
            _recall(question, root, channel, bytes(body))
        elif question.what == "read":
            _read(root, channel)
        elif question.what in ("mount", "write back", "unmount"):
            _serve_volume(question, channel)
        else:
            channel.send(Reply(problem=f"this service does not answer {question.what!r}"))


def _serve_volume(question: Question, channel: Channel) -> None:
    """Mount a volume, write it back or unmount it, and tell meanwhile how far that is."""

    def tell(what: str) -> None:
        channel.send(Reply(what, more=True))

    target = str(question.arguments.get("target", ""))
    try:
        if question.what == "mount":
            volume = NodeVolume(
                str(question.arguments["source"]),
                target,
                read_only=bool(question.arguments["read_only"]),
            )
            volume.open(tell)
            with _lock:
                _volumes[target] = volume
            written = 0
        elif question.what == "write back" and not target:
            written = _write_all_back(tell)
        else:
            with _lock:
                found = _volumes.get(target)
                if question.what == "unmount":
                    _volumes.pop(target, None)
            act = None if found is None else found.close
            if found is not None and question.what == "write back":
                act = found.write_back
            written = 0 if act is None else act(tell)
    except Exception as problem:
        # Also of fsspec and its packages: the client is told, and the service goes on.
        channel.send(Reply(problem=_told(problem)))
        return
    channel.send(Reply(written))


def _write_all_back(tell: Told) -> int:
    """Write every volume back; raises at the end what failed."""
    with _lock:
        volumes = list(_volumes.values())
    written, problems = 0, []
    for volume in volumes:
        try:
            written += volume.write_back(tell)
        except Exception as problem:
            problems.append(f"{volume.target}: {_told(problem)}")
    if problems:
        raise PoolError("; ".join(problems))
    return written


def end() -> None:
    """Write volumes back and take them away: the client may be gone."""
    with _lock:
        volumes = list(_volumes.values())
        _volumes.clear()
    for volume in volumes:
        try:
            volume.close(lambda what: None)
        except Exception as problem:
            # The other volumes are written back all the same.
            print(f"{volume.target}: {problem}", file=sys.stderr)


def _tree(root: Path) -> tuple[Tree, threading.Lock]:
    with _lock:
        return _trees.setdefault(root, (Tree(root), threading.Lock()))


def _recall(question: Question, root: Path, channel: Channel, told: bytes) -> None:
    """Tell what clients are known to have of a folder, or take what they have brought back."""
    tree, lock = _tree(root)
    try:
        with lock:
            if question.what == "brought":
                brought = {item.name: item for item in decode(told)}
                folders = {name for name, item in brought.items() if item.kind == "folder"}
                gone = brought.keys() - folders
                kept = {n: i for n, i in tree.known.items() if gone.isdisjoint(parents(n))}
                tree.known = kept | brought
                channel.send(Reply())
            else:
                channel.send(Reply(), [encode(list(tree.known.values()))])
    except ProtocolError as problem:
        channel.send(Reply(problem=_told(problem)))


def _follow(tree: Tree, channel: Channel, told: bytes) -> None:
    try:
        items = decode(told)
        tree.root.mkdir(parents=True, exist_ok=True)
        missing = tree.compare(items)
        size = sum(items[number].size for number in missing)
        free = shutil.disk_usage(tree.root).free
        if size > free:
            raise OSError(
                f"{tree.root} has room for {free / 1e9:.1f} GB, and {size / 1e9:.1f} GB are to "
                "come; leave files out with excludes=[...], or use a larger disk (disk_gb=...)"
            )
    except (OSError, ProtocolError) as problem:
        channel.send(Reply(problem=_told(problem)))
        return
    channel.send(Reply(missing))
    problem_met = ""
    try:
        while True:
            frame = channel.receive()
            part = messages.decode_as(Question, frame.kind, frame.meta)
            body = memoryview(received(channel, frame))
            if part.what == "finish":
                break
            try:
                # After a failure, the rest is still taken, since it is on its way already.
                if not problem_met:
                    _take(tree, part, body)
            except OSError as problem:
                problem_met = _told(problem)
        try:
            reply = Reply(problem=problem_met) if problem_met else Reply(tree.finish())
        except OSError as problem:
            reply = Reply(problem=_told(problem))
        channel.send(reply)
    finally:
        tree.abandon()


def _take(tree: Tree, part: Question, body: memoryview) -> None:
    at = 0
    for number, length, last in part.arguments["parts"]:
        tree.add(number, body[at : at + length], last)
        at += length


def _read(root: Path, channel: Channel) -> None:
    """Tell what a folder holds, and send the files that the other end asks for."""
    try:
        listing = Scanner(root, [f"{STAGING}*"], everything=True, remember=False).scan()
    except OSError as problem:
        channel.send(Reply(problem=_told(problem)))
        return
    channel.send(Reply(len(listing.items)), [encode(listing.items)])
    frame = channel.receive()
    asked = messages.decode_as(Question, frame.kind, frame.meta)
    received(channel, frame)
    try:
        for parts, data in pieces(root, listing.items, asked.arguments["missing"], PIECE):
            channel.send(Reply(parts, more=True), data)
    except OSError as problem:
        channel.send(Reply(problem=_told(problem)))
        return
    channel.send(Reply())


def _told(problem: Exception) -> str:
    return (
        str(problem)
        if not isinstance(problem, OSError) or problem.errno is None
        else (
            f"{problem.strerror}: {problem.filename}" if problem.filename else str(problem.strerror)
        )
    )
