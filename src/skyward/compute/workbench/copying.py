"""Copying files and folders between this machine and nodes.

A file appears under its name when it is complete, and so does a folder that was not there before.
Modes are kept; links inside a folder stay links.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skyward.compute.workbench.files import FilePlace, FoundEntry, Look
from skyward.console.measures import size as shown_size
from skyward.errors import ConfigurationError, ProtocolError
from skyward.worker.services.copying import FILE, FOLDER, LINK

AHEAD = 16
"""How many files are asked for before their turn."""


@dataclass(slots=True)
class Copied:
    """What was copied."""

    files: int = 0
    bytes: int = 0
    passed_over: int = 0
    """Sockets, pipes and devices, which are not copied."""


Told = Callable[[int], None]


def copy(
    source: FilePlace,
    path: str,
    destination: FilePlace,
    to: str,
    *,
    recursive: bool = False,
    begin: Told = lambda total: None,
    advance: Told = lambda count: None,
) -> Copied:
    """Copy a file or, with `recursive`, a folder; into `to` if that is a folder, else as `to`.

    Calls `begin` with the number of bytes, and `advance` as they are copied.
    """
    found = source.look(path)
    if not found.kind:
        raise ConfigurationError(f"there is no {source.shown(found.path)}")
    if found.kind == FOLDER and not recursive:
        raise ConfigurationError(
            f"{source.shown(found.path)} is a folder; copy it with all that is in it: -r"
        )
    if found.kind not in (FILE, FOLDER):
        raise ConfigurationError(f"{source.shown(found.path)} is neither a file nor a folder")
    target = _target(found, destination, to)
    transfer = _Transfer(source, destination, Copied(), advance)
    if found.kind == FILE:
        _check_room(found.size, destination, target)
        begin(found.size)
        source.ask(found.path)
        destination.write(target.path, found.size, found.mode, transfer.counted(source.answered()))
        destination.settle()
        transfer.copied.files = 1
        return transfer.copied
    total = sum(each.size for each in source.walk(found.path))
    _check_room(total, destination, target)
    begin(total)
    if target.kind == FOLDER:
        transfer.folder(found, target.path)
        return transfer.copied
    parent, name = os.path.split(target.path)
    staged = f"{parent}/.{name[:200]}.{secrets.token_hex(4)}.part"
    destination.make_folder(staged, found.mode, staged=True)
    try:
        transfer.folder(found, staged)
        destination.move(staged, target.path)
    except BaseException:
        with contextlib.suppress(Exception):
            # If the node is gone, the first error says so.
            destination.remove(staged)
        raise
    return transfer.copied


def _target(found: Look, destination: FilePlace, to: str) -> Look:
    """What is at the place that the copy will have."""
    there = destination.look(to or ".")
    if there.kind == FOLDER:
        name = os.path.basename(found.path)
        there = destination.look(f"{there.path.rstrip('/')}/{name}")
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
    if there.kind and (there.kind == FOLDER) != (found.kind == FOLDER):
        raise ConfigurationError(
            f"{destination.shown(there.path)} is there already, and is a {there.kind}, not a "
            f"{found.kind}; give another name"
        )
    return there


def _check_room(size: int, destination: FilePlace, target: Look) -> None:
    if size > target.free:
        raise ConfigurationError(
            f"no room for {destination.shown(target.path)}: {shown_size(size)} are to be copied, "
            f"{shown_size(target.free)} are free there"
        )


class _Transfer:
    """The copy of one folder or file."""

    def __init__(
        self, source: FilePlace, destination: FilePlace, copied: Copied, advance: Told
    ) -> None:
        self._source, self._destination = source, destination
        self.copied = copied
        self._advance = advance

    def counted(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Pass parts on, and count their bytes."""
        for part in parts:
            yield part
            self.copied.bytes += len(part)
            self._advance(len(part))

    def folder(self, found: Look, target: str) -> None:
        """Copy everything in a folder into a folder that is there."""
        inside = self._destination.look(target).identity
        made, links, skipped = {""}, set[str](), set[str]()
        waiting: deque[FoundEntry] = deque()
        for entry in self._source.walk(found.path):
            parent, _, name = entry.name.rpartition("/")
            listed = parent in made or parent in skipped
            if name in ("", ".", "..") or "\0" in name or not listed or entry.name in links:
                # Nothing is written outside of the target, whatever the other end says.
                raise ProtocolError(f"the other end lists {entry.name!r}, which its folder lacks")
            if parent in skipped or entry.identity == inside:
                # A folder is not copied into itself.
                skipped.add(entry.name)
            elif entry.kind == FOLDER:
                self._destination.make_folder(f"{target}/{entry.name}", entry.mode & 0o777)
                made.add(entry.name)
            elif entry.kind == LINK:
                self._destination.make_link(f"{target}/{entry.name}", entry.target)
                links.add(entry.name)
                self.copied.files += 1
            elif entry.kind == FILE:
                self._source.ask(f"{found.path}/{entry.name}")
                waiting.append(entry)
                if len(waiting) >= AHEAD:
                    self._next_file(waiting.popleft(), target)
            else:
                self.copied.passed_over += 1
        while waiting:
            self._next_file(waiting.popleft(), target)
        self._destination.settle()

    def _next_file(self, entry: FoundEntry, target: str) -> None:
        parts = self.counted(self._source.answered())
        self._destination.write(f"{target}/{entry.name}", entry.size, entry.mode & 0o777, parts)
        self.copied.files += 1
