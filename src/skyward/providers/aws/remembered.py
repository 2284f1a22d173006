"""What AWS said about its catalogue, kept in a file with the time at which it was said."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import platformdirs

from skyward.providers.aws.instance_types import InstanceType

if TYPE_CHECKING:
    from skyward.providers.aws.account import Account

_FORMAT = 1


class SpotPrices(msgspec.Struct):
    """The spot prices of a type, by zone."""

    at: float
    zones: dict[str, float]


class Remembered(msgspec.Struct):
    """The catalogue of a region; a time of 0 means that AWS was not asked yet."""

    format: int = _FORMAT
    types: list[InstanceType] = []
    types_at: float = 0.0
    zones: dict[str, list[str]] = {}
    zones_at: float = 0.0
    on_demand: dict[str, float] = {}
    """Empty if AWS did not say."""
    on_demand_at: float = 0.0
    spot: dict[str, SpotPrices] = {}
    spot_refused_at: float = 0.0
    """When AWS did not say what spot instances cost."""


def place(account: Account) -> Path:
    """The file for a region and a profile: zones may have other names in another account."""
    folder = os.environ.get("SKYWARD_CACHE") or platformdirs.user_cache_dir("skyward")
    profile = account.profile or os.environ.get("AWS_PROFILE") or ""
    other = f"{account.endpoint}\n{profile}".strip()
    suffix = f"-{hashlib.sha256(other.encode()).hexdigest()[:12]}" if other else ""
    return Path(folder, "aws", f"{account.region}{suffix}.json")


def read(path: Path) -> Remembered:
    """What the file has; nothing if there is none, or one that cannot be read."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Remembered)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return Remembered()
    return found if found.format == _FORMAT else Remembered()


def write(path: Path, remembered: Remembered) -> None:
    """Replace the file; what cannot be written is asked for again the next time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(remembered))
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
