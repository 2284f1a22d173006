"""Run as a script: the device's cores, whose other end says what it likes; prints how it goes.

In a process of its own: a crash there is seen in the test.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Callable

import torch

from skyward.device import build
from skyward.device.core import core

OK = 0
FLOAT, TENSOR, NONE, NUMBER, INTS = 6, 2, 0, 4, b"\x0a\x02"
"""Numbers of dtypes and of kinds of arguments."""
DEFINE, ASK, NEW, COPY_OUT = 0x7FFFFF01, 0x7FFFFF02, 0x7FFFFF04, 0x7FFFFF15

u64, pointer, whole = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64
Send = ctypes.CFUNCTYPE(whole, pointer, pointer, u64, ctypes.c_int)
Await = ctypes.CFUNCTYPE(whole, pointer, ctypes.c_int)
End = ctypes.CFUNCTYPE(None, pointer, ctypes.c_char_p)
Why = ctypes.CFUNCTYPE(None, pointer, pointer, ctypes.c_size_t)


class Functions(ctypes.Structure):
    """`sky_link_functions`, but for those of long copies."""

    _fields_ = (
        ("send", Send),
        ("receive", Send),
        ("await_bytes", Await),
        ("send_striped", pointer),
        ("receive_striped", pointer),
        ("end", End),
        ("why", Why),
    )


class OtherEnd:
    """A link over which some bytes come, and then its end."""

    def __init__(self) -> None:
        self.coming = b""
        self.table = Functions(
            Send(lambda link, data, size, at_once: size),
            Send(self._receive),
            Await(lambda link, milliseconds: 1 if self.coming else -1),
            None,
            None,
            End(lambda link, why: None),
            Why(lambda link, into, size: ctypes.memset(into, 0, 1) and None),
        )
        self.ways = (u64 * 2)(1, 2)

    def _receive(self, link: int, into: int, size: int, milliseconds: int) -> int:
        if not self.coming:
            return -1
        part, self.coming = self.coming[:size], self.coming[size:]
        ctypes.memmove(into, part, len(part))
        return len(part)


def reply(content: bytes) -> bytes:
    """What a worker answers."""
    return struct.pack("<IB", len(content), OK) + content


def layout(sizes: list[int], strides: list[int], dtype: int = FLOAT, bits: int = 0) -> bytes:
    """How a tensor lies in its storage."""
    count = len(sizes)
    return struct.pack(f"<BBB{2 * count}q", dtype, count, bits, *sizes, *strides)


def output(sizes: list[int], strides: list[int], stored: int, dtype: int = FLOAT) -> bytes:
    """A new tensor, as a worker tells of it, with nothing resized."""
    return b"\0" + layout(sizes, strides, dtype) + struct.pack("<QI", stored, 0)


ANSWERS = {
    "good": reply(output([2, 1], [1, 1], 16, 4)),
    "a dtype that is not": reply(output([2, 1], [1, 1], 16, 200)),
    "a negative size": reply(output([-2, 1], [1, 1], 16)),
    "more than its memory": reply(output([5, 1], [1, 1], 16)),
    "more than any memory": reply(output([1 << 62, 1 << 62], [1 << 62, 1], 16)),
    "lists in lists": reply(b"\3\1\0\0\0" * 200_000),
    "a kind that is not": reply(b"\x63"),
    "less than it says": struct.pack("<IB", (1 << 32) - 1, OK) + b"x",
}


def client() -> dict[str, str]:
    """What the program sees of each answer to `nonzero`."""
    other, library = OtherEnd(), core()._library
    library.sky_use_links(ctypes.byref(other.table))
    seen = {}
    for index, (name, answer) in enumerate(ANSWERS.items()):
        other.coming = b""
        assert library.sky_open(index, other.ways, 2, 0, 1) == 0
        core()._serials[index] = index + 1
        there = torch.empty(3, device=torch.device("sky", index))
        other.coming = answer
        try:
            seen[name] = str(torch.nonzero(there).shape)
        except RuntimeError as problem:
            seen[name] = str(problem)
    return seen


def text(words: str) -> bytes:
    """A text in a record."""
    return struct.pack("<I", len(words)) + words.encode()


def sessions() -> dict[str, bytes]:
    """Records of clients that lie."""
    vector, made = layout([2], [1]), struct.pack("<IIQ", NEW, 1, 8)
    tensor = bytes([TENSOR]) + vector[:3] + b"\0" + vector[3:]
    definition = (
        text("aten::to_sparse") + text("") + text("") + struct.pack("<II", 4, 4)
        + tensor + bytes([NONE] * 3) + b"\1\0" + vector
    )  # fmt: skip
    unknown = (
        text("aten::zeros") + text("") + text("") + struct.pack("<II", 0, 5)
        + INTS + struct.pack("<I", 0) + struct.pack("<Bq", NUMBER, 222) + bytes([NONE] * 3) + b"\0"
    )  # fmt: skip
    place = struct.pack("<I", 1) + vector[:2] + vector[3:] + struct.pack("<q", 1 << 20)
    shared = place + struct.pack("<IQ", 1, 0)
    return {
        # Its result cannot be told; so what it was promised to be does not count any more.
        "an operation after an answer that failed": made
        + struct.pack("<II", DEFINE, len(definition)) + definition
        + struct.pack("<IIII", ASK, 8, 0, 1) + struct.pack("<III", 0, 1, 2),
        # PyTorch would look it up without a check.
        "a dtype that is not": struct.pack("<II", DEFINE, len(unknown)) + unknown,
        "a copy to memory that is not shared": made
        + struct.pack("<II", COPY_OUT, len(shared)) + shared,
    }  # fmt: skip


def worker() -> dict[str, str]:
    """What the worker says at the end of each session."""
    other, library = OtherEnd(), ctypes.CDLL(str(build.library("worker")))
    library.sky_worker_use_links(ctypes.byref(other.table))
    seen, said = {}, ctypes.create_string_buffer(1024)
    for name, records in sessions().items():
        pieces = [records[at : at + 31] for at in range(0, len(records), 31)]
        other.coming = b"".join(bytes([len(piece) << 2]) + piece for piece in pieces)
        library.sky_worker_serve(
            other.ways, 2, 0, b"cpu", None, None, None, said, ctypes.c_size_t(1024)
        )
        seen[name] = said.value.decode()
    return seen


if __name__ == "__main__":
    ends: dict[str, Callable[[], dict[str, str]]] = {"client": client, "worker": worker}
    print(json.dumps(ends[sys.argv[1]]()))
