"""Transfer: the client's end of the service that makes folders of nodes follow its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.errors import PoolError
from skyward.files.items import FileItem, Listing, decode, encode
from skyward.files.scanning import holds
from skyward.files.tree import Tree, blocked
from skyward.wire import messages
from skyward.wire.asking import ServiceConnection, whole_of
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
            while not last:
                piece = file.read(min(most - size, promised - sent)) or b""
                sent += len(piece)
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
    channel = connection.channel
    # The node says what it was sent, since that may have been another client's doing.
    before = {item.name: item for item in _listed(connection, "sent", root)}
    connection.next_reply()
    there = _listed(connection, "read", root)
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
        channel.send(Question("send", {"missing": missing}))
        more = True
        while more:
            frame, reply = _next(connection)
            body = memoryview(whole_of(channel, frame))
            at = 0
            for number, length, last in reply.value or ():
                tree.add(number_of[number], body[at : at + length], last)
                at += length
            came += at
            (progress or told)(f"bringing files back, {came / 1e6:.1f} MB")
            more = reply.more
        result: dict[str, Any] = tree.finish()
    finally:
        tree.abandon()
    channel.send(Question("brought", {"root": root}), [encode(list(tree.known.values()))])
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


def _listed(connection: ServiceConnection, what: str, root: str) -> list[FileItem]:
    connection.channel.send(Question(what, {"root": root}))
    frame, _ = _next(connection)
    return decode(whole_of(connection.channel, frame))


def _next(connection: ServiceConnection) -> tuple[Frame, Reply]:
    frame = connection.channel.receive()
    reply = messages.decode_as(Reply, frame.kind, frame.meta)
    if reply.problem:
        raise PoolError(reply.problem)
    return frame, reply
