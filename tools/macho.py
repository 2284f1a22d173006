"""The symbols of a 64-bit Mach-O file, such as a dylib of macOS."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_MAGIC = 0xFEEDFACF
_LC_SYMTAB = 2
_EXTERNAL, _DEBUG, _TYPE = 0x01, 0xE0, 0x0E


@dataclass(frozen=True)
class Symbols:
    """The external symbols of a file, by name."""

    defined: frozenset[str]
    undefined: frozenset[str]


def symbols(path: Path) -> Symbols:
    """Read an object file or a dylib."""
    data = path.read_bytes()
    if struct.unpack_from("<I", data)[0] != _MAGIC:
        raise ValueError(f"{path} is no 64-bit Mach-O file")
    commands, position = struct.unpack_from("<I", data, 16)[0], 32
    defined: set[str] = set()
    undefined: set[str] = set()
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, position)
        if command == _LC_SYMTAB:
            table, count, names, _ = struct.unpack_from("<4I", data, position + 8)
            for at in range(table, table + 16 * count, 16):
                name, kind = struct.unpack_from("<IB", data, at)
                if kind & _EXTERNAL and not kind & _DEBUG:
                    start = names + name
                    text = data[start : data.index(b"\0", start)].decode()
                    (defined if kind & _TYPE else undefined).add(text)
        position += size
    return Symbols(frozenset(defined), frozenset(undefined))
