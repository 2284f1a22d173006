"""`docs/store.md` says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import torch
import xxhash

import skyward as sky
from skyward.objects import memory
from skyward.store import catalog, manifest, values

PAGE = Path(__file__).parents[2] / "docs" / "store.md"


def test_the_limits_are_those_of_the_code() -> None:
    written = dict(re.findall(r"^\| ([A-Z_]+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE))

    assert {name: int(value) for name, value in written.items()} == {
        "FORMAT": manifest.FORMAT,
        "MANIFEST_LIMIT": manifest.MANIFEST_LIMIT,
        "HEADER_LIMIT": manifest.HEADER_LIMIT,
        "SIZE_LIMIT": manifest.SIZE_LIMIT,
        "RANK_LIMIT": manifest.RANK_LIMIT,
        "DEPTH_LIMIT": values.DEPTH_LIMIT,
        "GRACE": int(catalog.GRACE),
    }


def test_the_manifest_has_the_fields_of_the_page() -> None:
    section = PAGE.read_text().split("## Manifests")[1].split("A *region*")[0]
    names = re.findall(r"^\| ([a-z_, ]+) \|", section, re.MULTILINE)
    written = [name for row in names if row != "field" for name in row.split(", ")]

    assert written == list(manifest.Manifest.__struct_fields__)


def test_a_store_can_be_read_from_the_page_alone(store: sky.ModelStore, folder: Path) -> None:
    """Without any of our code but the digest, which `docs/wire.md` describes."""
    weight = torch.randn(4, 3).t()
    store.save_model({"weight": weight, "lr": 0.5}, "a/b")

    data = (folder / "models" / "a" / "b" / "1.json").read_bytes()
    document = msgspec.json.decode(data)
    body = document["manifest"]
    ((key, tensor), (_, rate)) = body["tree"]["dict"]
    view = body["tensors"][tensor["tensor"]]
    region = body["regions"][view["region"]]
    name = body["objects"][region["object"]]["name"]
    file = (folder / "objects" / name[:2] / name).read_bytes()
    length = int.from_bytes(file[:8], "little")
    part = file[region["start"] : region["start"] + region["size"]]
    values = torch.frombuffer(bytearray(part), dtype=getattr(torch, view["dtype"]))

    assert data.endswith(b"}\n")
    assert (
        xxhash.xxh3_128_hexdigest(data[len('{"checksum":"",') + 32 + 11 : -2])
        == (document["checksum"])
    )
    assert name.startswith(xxhash.xxh3_128_hexdigest(file[: 8 + length]) + "-")
    assert (8 + length) % 64 == 0
    assert memory.digests([memoryview(part)])[0].hex() == region["digest"]
    assert (key, rate) == ("weight", 0.5)
    assert torch.equal(values.as_strided(view["shape"], view["strides"]), weight)
