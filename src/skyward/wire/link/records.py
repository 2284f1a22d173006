"""Records: the units that a link's connections carry; the first 8 bytes say what follows."""

from __future__ import annotations

import struct

RECORD = struct.Struct("<Q")
"""The first 8 bytes of a record: the length of a part of the stream, or a count with `IS_COUNT`."""
IS_COUNT = 1 << 63
STRIPE_BIT = 32
"""The bits from here on are the number of the stripe that carries the part; 0 is no stripe."""
RECORD_MAX = 4 << 20
STRIPED_MIN = 8 << 20
"""The shortest write that goes over several connections, between machines that are far apart."""
TLS_RECORD = 16 << 10
"""How many bytes TLS encrypts at a time."""
TLS_OVERHEAD = 22
"""What a record of TLS 1.3 adds: a head of 5 bytes, the kind, and a tag of 16."""
JOINED = TLS_RECORD - RECORD.size
"""The most of a part that is sent in one write with the 8 bytes."""


def size_on_wire(length: int) -> int:
    """How many bytes a part of the stream takes over TLS, with the first 8 of its record."""
    written = length + RECORD.size
    return written + -(-written // TLS_RECORD) * TLS_OVERHEAD
