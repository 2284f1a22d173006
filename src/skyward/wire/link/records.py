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
JOINED = (16 << 10) - RECORD.size
"""The most of a part that is sent in one write with the 8 bytes: TLS encrypts 16 KiB at a time."""
