"""Where machines of these tests get PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import skyward as sky

INDEX = "https://download.pytorch.org/whl/cpu"


def torch_index() -> str:
    """A folder with its wheel that pip is told of here; else PyTorch's own index."""
    if named := os.environ.get("SKYWARD_TORCH_INDEX"):
        return named
    links = (
        os.environ.get("PIP_FIND_LINKS")
        or subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
            capture_output=True,
            text=True,
        ).stdout
    )
    for folder in links.split():
        if any(Path(folder).glob("torch-*.whl")):
            return Path(folder).resolve().as_uri()
    return INDEX


def torch_image() -> sky.Image:
    """An image with the PyTorch that runs here."""
    import torch

    version = torch.__version__.split("+")[0]
    return sky.Image(
        pip=[f"torch=={version}"],
        pip_indexes=[sky.PipIndex(torch_index(), packages=["torch"])],
    )
