"""The three stages of a save, each alone: classify, hash, upload."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import skyward as sky
from skyward.objects import memory
from skyward.store import save, values
from skyward.store.catalog import Catalog
from skyward.store.local import LocalFiles
from skyward.store.manifest import StoredObject, object_path
from skyward.store.progress import UNWATCHED
from skyward.store.save import Classified, Inventory, Location, Piece, Saving, Uploads, hashed
from skyward.store.values import Span, lay_out

LARGE = LocalFiles.whole // 4
"""Elements of a tensor that is an object of its own."""


@pytest.fixture
def files(folder: Path) -> LocalFiles:
    return LocalFiles(folder)


def spans_of(*tensors: torch.Tensor) -> list[Span]:
    spans, _ = lay_out([(str(number), tensor) for number, tensor in enumerate(tensors)])
    return spans


def pieces_of(*tensors: torch.Tensor) -> list[Piece]:
    return [Piece("", span, span.read()) for span in spans_of(*tensors)]


def classified(files: LocalFiles, *tensors: torch.Tensor) -> Classified:
    (batch,) = save.classify(spans_of(*tensors), Inventory(), files)
    return batch


def stored(files: LocalFiles, *pieces: Piece) -> list[tuple[str, bytes]]:
    """Upload, and read back what each digest stands for."""
    with Uploads(files, UNWATCHED) as uploads:
        for piece in pieces:
            uploads.add(piece)
        written = uploads.finish()
    return [
        (
            each.digest,
            files.read(object_path(each.location.object.name), each.location.start, each.span.size),
        )
        for each in written
    ]


def test_large_regions_of_an_empty_store_are_new(files: LocalFiles) -> None:
    batch = classified(files, torch.zeros(LARGE), torch.ones(LARGE), torch.ones(3))

    assert [piece.span.size for piece in batch.new] == [4 * LARGE, 4 * LARGE]
    assert [piece.span.size for piece in batch.unsure] == [12]
    assert batch.resembled == []


def test_a_region_of_a_size_that_is_stored_is_unsure(files: LocalFiles) -> None:
    inventory = Inventory()
    inventory.add("0" * 32, Location(StoredObject("x", 1), 0, 4 * LARGE, ("m", 1)))

    (batch,) = save.classify(spans_of(torch.ones(LARGE), torch.ones(LARGE + 1)), inventory, files)

    assert [piece.span.size for piece in batch.unsure] == [4 * LARGE]
    assert [piece.span.size for piece in batch.new] == [4 * LARGE + 4]


def test_a_region_that_begins_like_a_new_one_waits_for_its_digest(files: LocalFiles) -> None:
    batch = classified(files, torch.ones(LARGE), torch.ones(LARGE))

    assert batch.resembled == [piece.span for piece in batch.new]
    assert len(batch.unsure) == 1


def test_an_object_left_over_by_an_interrupted_save_makes_its_size_unsure(
    files: LocalFiles,
) -> None:
    stored(files, *hashed(pieces_of(torch.zeros(LARGE))))

    batch = classified(files, torch.ones(LARGE))

    assert (len(batch.new), len(batch.unsure)) == (0, 1)


def test_batches_end_at_the_size_of_a_pack(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "PACK", 100)
    spans = spans_of(*(torch.full((15,), number) for number in range(5)))

    sizes = [
        sum(piece.span.size for piece in batch.unsure)
        for batch in save.classify(spans, Inventory(), files)
    ]

    assert sizes == [120, 120, 120, 120, 120]


def test_hashing_names_every_piece_by_its_bytes() -> None:
    pieces = pieces_of(torch.ones(3), torch.zeros(70, dtype=torch.uint8))

    named = hashed(pieces)

    assert [piece.digest for piece in named] == [
        memory.digests([piece.data])[0].hex() for piece in pieces
    ]
    assert [piece.span for piece in named] == [piece.span for piece in pieces]


def test_small_pieces_share_an_object_and_large_ones_do_not(
    files: LocalFiles, folder: Path
) -> None:
    pieces = hashed(pieces_of(torch.ones(3), torch.zeros(LARGE), torch.zeros(5)))

    found = dict(stored(files, *pieces))

    assert found == {piece.digest: bytes(piece.data) for piece in pieces}
    assert len(list(folder.glob("objects/*/*"))) == 2


def test_a_piece_without_a_digest_is_named_while_it_is_written(files: LocalFiles) -> None:
    (piece,) = pieces_of(torch.ones(LARGE))

    ((digest, data),) = stored(files, piece)

    assert digest == memory.digests([piece.data])[0].hex()
    assert data == bytes(piece.data)


def test_an_object_that_is_left_over_is_not_written_again(files: LocalFiles) -> None:
    pieces = hashed(pieces_of(torch.ones(LARGE)))
    stored(files, *pieces)

    with Uploads(files, UNWATCHED) as uploads:
        uploads.add(pieces[0])
        (written,) = uploads.finish()

    assert not written.is_new
    assert len(files.list("objects")) == 1


def test_settling_leaves_the_small_pieces_for_a_fuller_object(files: LocalFiles) -> None:
    small, large = hashed(pieces_of(torch.ones(3), torch.zeros(LARGE)))
    with Uploads(files, UNWATCHED) as uploads:
        uploads.add(small)
        uploads.add(large)

        assert [each.digest for each in uploads.settle()] == [large.digest]
        assert [each.digest for each in uploads.finish()] == [small.digest]


def test_the_inventory_knows_other_models_and_drops_what_is_lost(
    store: sky.ModelStore, files: LocalFiles
) -> None:
    store.save_model({"x": torch.ones(LARGE)}, "other")
    catalog = Catalog(files)
    (region,) = catalog.read("other", 1).regions

    inventory = Inventory.of(catalog, "m")
    assert inventory[region.digest].source == ("other", 1)
    assert inventory.has_size(region.size)
    inventory.drop([inventory[region.digest].object])
    assert region.digest not in inventory


def test_equal_new_regions_are_stored_once(files: LocalFiles, folder: Path) -> None:
    saving = Saving(Catalog(files), "m")

    value = {str(number): torch.ones(LARGE) for number in range(3)}
    manifest = saving.save(*values.encode(value), {}, None)

    assert manifest.added == 4 * LARGE
    assert len({region.digest for region in manifest.regions}) == 1
    assert len(list(folder.glob("objects/*/*"))) == 1
