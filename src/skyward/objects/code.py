"""Code: a function's body as it travels, named by its content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from skyward.objects import encoding, modules
from skyward.objects.encoding import Encoded


@dataclass(slots=True, eq=False)
class Code:
    """A function's code, encoded and named by its content."""

    key: bytes
    encoded: Encoded
    references: modules.References

    @classmethod
    def of(cls, body: Callable[..., Any]) -> Code:
        """Encode a function."""
        references = modules.references(body)
        encoded = encoding.encode(body, own_modules=True, names=references.module_names)
        digest = xxhash.xxh3_128()
        for part in (*encoded.pieces, *encoded.buffers):
            digest.update(part)
        for handle in encoded.handles:
            digest.update(handle.key)
        return cls(digest.digest(), encoded, references)
