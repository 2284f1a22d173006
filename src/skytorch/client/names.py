"""Names in the words of Kubernetes: what a compute and a namespace may be called."""

from __future__ import annotations

import re

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

RULE = "has small letters, digits and hyphens, at most 63"


def is_name(name: object) -> bool:
    """Whether Kubernetes would take it.

    >>> is_name("trainer-1"), is_name("My_Node")
    (True, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None
