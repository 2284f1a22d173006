"""Records: what a link's connections carry, each with 8 bytes in front that say what follows."""

from __future__ import annotations

import struct

RECORD = struct.Struct("<Q")
"""In front of every record: the length of a part of the stream, or a count, with `IS_COUNT`."""
IS_COUNT = 1 << 63
STRIPE_BIT = 32
"""From this bit on: the number of the stripe that carries the part; 0 if none does."""
RECORD_MAX = 4 << 20
STRIPED_MIN = 8 << 20
"""Writes from this length on go over several connections, between machines that are far apart."""
JOINED = (16 << 10) - RECORD.size
"""The most of a part that is sent in one write with the 8 bytes: TLS encrypts 16 KiB at a time."""
