"""The worker's reading of arguments, in a process of its own: a crash there is seen here.

A request is three u32 (bytes of the definition, bytes of the payload, number of arguments) and
the bytes; the answer is a u8 status and a text with its u32 length before it.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys

OK, MALFORMED, DEFECT = range(3)
CAPACITY = 1 << 16


class Decoder:
    """The process, and a way to ask it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout
        self.skips_dispatcher = self._process.stdout.read(1) == b"\1"
        """Whether the worker calls the kernels of plain tensors without the dispatcher."""

    def read(self, definition: bytes, payload: bytes, count: int) -> tuple[int, str]:
        """How the worker read these bytes, and what it made of them."""
        assert self._process.stdin
        assert self._process.stdout
        head = struct.pack("<III", len(definition), len(payload), count)
        self._process.stdin.write(head + definition + payload)
        self._process.stdin.flush()
        answer = self._process.stdout.read(5)
        assert len(answer) == 5, f"the decoder died: {self._process.wait()}"
        status, length = struct.unpack("<BI", answer)
        return status, self._process.stdout.read(length).decode(errors="replace")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    """Answer requests until there are no more."""
    from skyward.device import build

    library = ctypes.CDLL(str(build.library("worker")))
    text = ctypes.create_string_buffer(CAPACITY)
    sys.stdout.buffer.write(bytes([library.sky_worker_probe_keys()]))
    sys.stdout.buffer.flush()
    while len(head := sys.stdin.buffer.read(12)) == 12:
        defined, sent, count = struct.unpack("<III", head)
        # Each in memory of exactly its size, where a sanitizer or an unmapped page would notice.
        definition, payload = sys.stdin.buffer.read(defined), sys.stdin.buffer.read(sent)
        status = library.sky_worker_probe(
            definition,
            ctypes.c_size_t(defined),
            payload,
            ctypes.c_size_t(sent),
            ctypes.c_uint32(count),
            text,
            ctypes.c_size_t(CAPACITY),
        )
        sys.stdout.buffer.write(struct.pack("<BI", status, len(text.value)) + text.value)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    import torch  # noqa: F401  (its libraries must be there before ours)

    main()
