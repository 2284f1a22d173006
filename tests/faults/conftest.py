"""Fault tests leave nothing behind, whatever they break."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _clean(nothing_left: None) -> None:
    """Every fault test ends with no process and no folder of its own."""
