"""The graphics cards of this machine, and whether they are those that a pool asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from skyward.accelerators import Accelerator, Card, describe, matching
from skyward.errors import ConfigurationError

_GPUS = Path("/proc/driver/nvidia/gpus")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)
_QUERY = ("--query-gpu=memory.total,name", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 30.0


def installed_cards() -> tuple[Card, ...]:
    """The NVIDIA cards that the kernel knows, without their memory: this only reads files."""
    cards = []
    for file in sorted(_GPUS.glob("*/information")):
        model = _MODEL.search(file.read_text(errors="replace"))
        cards.append(Card(model[1] if model else "NVIDIA"))
    return tuple(cards)


def measured_cards() -> tuple[Card, ...]:
    """The same cards with the memory that `nvidia-smi` reports, where it is there and answers."""
    cards = installed_cards()
    program = shutil.which("nvidia-smi")
    if not cards or program is None:
        return cards
    try:
        said = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return cards
    pairs = (line.partition(", ") for line in said.splitlines() if line.strip())
    return tuple(
        Card(name.strip(), int(memory) if memory.isdigit() else None) for memory, _, name in pairs
    )


def check_accelerator(wanted: Accelerator | None) -> None:
    """Refuse a request for cards that this machine does not have."""
    if wanted is None or os.environ.get("SKYWARD_DEVICE") == "cpu":
        return
    cards = measured_cards()
    if len(matching(wanted, cards)) < wanted.count:
        raise ConfigurationError(
            f"accelerator={wanted}: this machine has {describe(cards) or 'none'}; choose a "
            "provider that has it, drop accelerator=, or set SKYWARD_DEVICE=cpu to try GPU code "
            "here"
        )
