"""The first stage of a save: separate regions that are certainly new from all others.

A region that cannot equal a stored one is hashed while it is written, in one pass over its memory.
All others are hashed first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from skyward.store.format import objects
from skyward.store.format.layout import Span
from skyward.store.format.objects import Piece
from skyward.store.places.files import Files
from skyward.store.saving.inventory import Inventory

PACK = 48 << 20
"""The size of a batch of regions; a batch is hashed together, and its small regions are packed."""
_BEGINNING = 4096
"""Regions of one length are probably equal if this many of their first bytes are the same."""


@dataclass(frozen=True, slots=True)
class Classified:
    """One batch of regions, read."""

    new: list[Piece] = field(default_factory=list)
    """Regions that equal no stored region, and no earlier region of the save."""
    unsure: list[Piece] = field(default_factory=list)
    """Regions that may be stored already; only their digests can tell."""
    resembled: list[Span] = field(default_factory=list)
    """New regions that one of `unsure` may equal: their digests are needed first."""


def classify(spans: Sequence[Span], inventory: Inventory, files: Files) -> Iterator[Classified]:
    """Read the regions of a save in batches, and sort each batch."""
    left_over: set[int] | None = None
    first: dict[tuple[int, bytes], Span] = {}

    def is_new(piece: Piece) -> bool:
        nonlocal left_over
        size = len(piece.data)
        if not files.drafts or size < files.whole or inventory.has_size(size):
            return False
        if left_over is None:
            left_over = _unnamed_sizes(files, inventory)
        return len(objects.header([piece])[0]) + size not in left_over

    for batch in _batches(spans):
        found = Classified()
        for span in batch:
            piece = Piece("", span, span.read())
            key = (len(piece.data), bytes(piece.data[:_BEGINNING]))
            if key in first:
                found.resembled.append(first[key])
                found.unsure.append(piece)
            elif is_new(piece):
                first[key] = span
                found.new.append(piece)
            else:
                found.unsure.append(piece)
        yield found


def _unnamed_sizes(files: Files, inventory: Inventory) -> set[int]:
    """The sizes of objects that the inventory does not name: an interrupted save left them."""
    named = inventory.object_names()
    return {
        entry.size for entry in files.list("objects") if entry.path.rpartition("/")[2] not in named
    }


def _batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    batch: list[Span] = []
    size = 0
    for span in spans:
        batch.append(span)
        size += span.size
        if size >= PACK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
