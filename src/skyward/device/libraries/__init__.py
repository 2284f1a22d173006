"""Libraries that choose devices by themselves use an open sky device."""

from __future__ import annotations

from functools import partial

from skyward.device.libraries import huggingface, torch
from skyward.device.libraries.patches import Choice, Patch, Patches
from skyward.device.library import Core

LIBRARIES = (huggingface, torch)


def install(core: Core) -> None:
    """Patch the libraries that are imported, and the others when they are; once per process.

    Without an open device, and where the user has chosen another, the patches change nothing.
    """
    choice = Choice(core)
    patches: dict[str, Patch] = {}
    for library in LIBRARIES:
        for module, patch in library.PATCHES.items():
            patches[module] = partial(patch, choice=choice)
    Patches(patches).install()
