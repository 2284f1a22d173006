"""What the client writes of arguments, the worker reads; what nobody wrote, it refuses."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest
import torch

from skyward.device.core import core

from .decoder import MALFORMED, OK, Decoder

SEEDS = 400


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    """The worker's reading, in a process of its own."""
    decoder = Decoder()
    yield decoder
    decoder.close()


def _written(device: torch.device, seed: int, count: int) -> tuple[bytes, bytes, str]:
    """Random arguments as the client writes them to a template and a payload, and as text."""
    definition, payload, text = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_char_p()
    defined, sent = ctypes.c_uint64(), ctypes.c_uint64()
    core()._call(
        "sky_probe",
        device.index,
        ctypes.c_uint64(seed),
        ctypes.c_uint32(count),
        ctypes.byref(definition),
        ctypes.byref(defined),
        ctypes.byref(payload),
        ctypes.byref(sent),
        ctypes.byref(text),
    )
    assert text.value is not None
    return (
        ctypes.string_at(definition, defined.value),
        ctypes.string_at(payload, sent.value),
        text.value.decode(),
    )


def test_the_worker_reads_what_the_client_wrote(device: torch.device, decoder: Decoder) -> None:
    kinds: set[str] = set()
    for seed in range(SEEDS):
        count = seed % 6
        definition, payload, text = _written(device, seed, count)
        assert decoder.read(definition, payload, count) == (OK, text), f"seed {seed}"
        kinds |= {part.split(":")[0] for part in text.replace("[", ";").split(";") if ":" in part}
    assert kinds >= {str(kind) for kind in range(14)}, "not every kind was tried"


def test_kernels_of_plain_tensors_are_called_without_the_dispatcher(decoder: Decoder) -> None:
    assert decoder.skips_dispatcher


def test_arguments_cut_short_are_malformed(device: torch.device, decoder: Decoder) -> None:
    for seed in range(SEEDS // 8):
        definition, payload, _ = _written(device, seed, 3)
        for end in range(len(definition)):
            assert decoder.read(definition[:end], payload, 3)[0] == MALFORMED, f"{seed}, {end}"
        for end in range(len(payload)):
            assert decoder.read(definition, payload[:end], 3)[0] == MALFORMED, f"{seed}, {end}"


def test_changed_bytes_are_read_within_bounds_or_malformed(
    device: torch.device, decoder: Decoder
) -> None:
    chance = random.Random(12)
    seen = {OK: 0, MALFORMED: 0}
    for seed in range(SEEDS):
        definition, payload, _ = _written(device, seed, 4)
        if not definition:
            continue
        for _ in range(8):
            changed = bytearray(definition)
            for _ in range(chance.randint(1, 4)):
                changed[chance.randrange(len(changed))] = chance.choice(
                    (0, 1, 10, 255, chance.randrange(256))
                )
            status, text = decoder.read(bytes(changed), payload, 4)
            assert status in seen, f"seed {seed}: {text}"
            seen[status] += 1
    assert all(seen.values())


def test_lists_in_lists_are_malformed(decoder: Decoder) -> None:
    nested = b"\x0a\x00\x01\x00\x00\x00" * 100_000 + b"\x00"
    assert decoder.read(nested, b"", 1) == (MALFORMED, "a list in a list")


def test_integers_above_those_of_int64_travel(device: torch.device) -> None:
    most = 2**64 - 1
    full = torch.full((2,), most, dtype=torch.uint64, device=device)
    assert full.tolist() == [most, most]
    assert full[0].item() == most
    assert (full == most).tolist() == [True, True]
    assert full.fill_(most - 1).tolist() == [most - 1] * 2
