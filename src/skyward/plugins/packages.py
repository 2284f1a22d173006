"""Packages that plugins add to an image: version words, and indexes scoped to them."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import replace
from types import ModuleType

from skyward.errors import ConfigurationError
from skyward.spec import Image, PipIndex

_BARE_VERSION = re.compile(r"\d[\w.+!-]*")
_SPECIFIER = re.compile(r"\s*(?:~=|===?|!=|<=?|>=?)\s*\S.*")


def requirement(plugin: str, package: str, word: str, *, argument: str = "version") -> str:
    """A package with its version: "latest", a bare version, or a PEP 440 specifier.

    >>> requirement("torch", "torch", "2.3.0")
    'torch==2.3.0'
    >>> requirement("torch", "torch", ">=2.3")
    'torch>=2.3'
    """
    if word == "latest":
        return package
    if isinstance(word, str) and _BARE_VERSION.fullmatch(word):
        return f"{package}=={word}"
    if isinstance(word, str) and _SPECIFIER.fullmatch(word):
        return f"{package}{word.strip()}"
    raise ConfigurationError(
        f"sky.plugins.{plugin}({argument}={word!r}): give 'latest', a version such as '2.3.0', or "
        "a specifier such as '>=2.3'"
    )


def extended(image: Image, pip: list[str], index: PipIndex | None = None) -> Image:
    """The image with packages and an index appended to what it has."""
    indexes = [*image.pip_indexes] + ([index] if index is not None else [])
    return replace(image, pip=[*image.pip, *pip], pip_indexes=indexes)


def check_installed(name: str, package: str = "") -> None:
    """Check that the image has installed a module; the error says what to do."""
    if importlib.util.find_spec(name) is None:
        package = package or name
        raise ModuleNotFoundError(
            f"{package} is not installed for {sys.executable}; install it there, or have the node "
            f"install it with Image(pip=[{package!r}])",
            name=name,
        )


def imported(name: str, package: str = "") -> ModuleType:
    """Check that a module is installed, and import it."""
    check_installed(name, package)
    return importlib.import_module(name)
