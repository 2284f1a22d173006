"""SkyTorch's interface over Skyward: computes named, awaited and deleted as in a cluster."""

from __future__ import annotations
