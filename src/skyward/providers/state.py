"""The user's state folder: what outlives a process, such as the journal and pools' keys."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def state_folder() -> Path:
    """The folder, which `SKYWARD_STATE` may name; it need not exist yet."""
    return Path(os.environ.get("SKYWARD_STATE") or platformdirs.user_state_dir("skyward"))
