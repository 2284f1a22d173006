"""Import and export: files of other tools, safetensors and files of `torch.save`."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyward.checks import argument
from skyward.errors import StoreError
from skyward.store.catalog import manifest_url
from skyward.store.exchange import safetensors
from skyward.store.format import tree
from skyward.store.format.manifest import Manifest
from skyward.store.loading import Loading
from skyward.store.places.files import Files
from skyward.store.progress import Progress

SAFETENSORS = ".safetensors"
_ZIP, _PICKLE, _TAR = b"PK\x03\x04", b"\x80", b"ustar"
"""How a file of torch.save begins: today, before torch 1.6, and in its first year."""
_TAR_AT = 257
_BEGINNING = _TAR_AT + len(_TAR)


def read(path: Path) -> tuple[Any, dict[str, str]]:
    """The contents of a file and its metadata; only tensors and plain values are read."""
    if path.is_dir():
        return safetensors.read_folder(path)
    if path.suffix == SAFETENSORS:
        return safetensors.read(path)
    return _read_pickled(path), {}


def _read_pickled(path: Path) -> Any:
    import torch

    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as problem:
        raise _refusal(path, problem) from problem


def _refusal(path: Path, problem: Exception) -> StoreError:
    """What is wrong with the file, without torch's advice to trust it."""
    if isinstance(problem, OSError):
        reason = problem.strerror or str(problem)
        return StoreError(f"{path}: cannot be read: {reason}; check the file, and that you may")
    refused = f"{path}: cannot be imported, because it"
    with path.open("rb") as file:
        start = file.read(_BEGINNING)
    if not start.startswith((_ZIP, _PICKLE)) and start[_TAR_AT:] != _TAR:
        return StoreError(
            f"{refused} is not a file of torch.save; check which file it is, "
            "and let the name of a safetensors file end in .safetensors"
        )
    reason = str(problem)
    if found := re.search(r"Unsupported (?:global|class): (?:GLOBAL )?([\w.]+)", reason):
        return StoreError(
            f"{refused} holds more than tensors and plain values: {found[1]}; "
            "load it where you trust it, and save its state_dict()"
        )
    return StoreError(
        f"{refused} is damaged or holds more than tensors and plain values ({_gist(problem)}); "
        "load it where you trust it, and save its state_dict()"
    )


def _gist(problem: Exception) -> str:
    """The sentence of the message that says what is wrong with the file."""
    lines = [line.strip() for line in str(problem).splitlines()] or [""]
    telling = next((line for line in lines if "Unsupported" in line), lines[0])
    sentence = telling.removeprefix("WeightsUnpickler error: ").partition(". ")[0].rstrip(".")
    kind = type(problem).__name__
    if isinstance(problem, LookupError):  # its message is the key alone
        return f"{kind}: {sentence}"
    return textwrap.shorten(sentence, 200, placeholder=" ...") or kind


def write_pickled(value: object, path: Path) -> None:
    """Write a file as `torch.save` does, whole or not at all."""
    import torch

    with _whole(path) as temporary:
        try:
            torch.save(value, temporary)
        except RuntimeError as problem:  # torch raises this for a full disk
            raise OSError(str(problem).splitlines()[0].rstrip(".")) from problem


def write_safetensors(files: Files, manifest: Manifest, path: Path, progress: Progress) -> None:
    """Write a version as a safetensors file, whole or not at all."""
    value = tree.outline(manifest.tree, len(manifest.tensors), manifest_url(files, manifest))
    obstacle = safetensors.unsuited(value, manifest.tensors)
    if obstacle:
        pt = path.with_suffix(".pt").name
        raise StoreError(
            f"{manifest.name!r} version {manifest.version} holds {obstacle}, and a safetensors "
            f"file has named tensors only; write a .pt file: {argument('output', pt, python=pt)}"
        )
    named = {name: each.index for name, each in value.items()}
    loading = Loading(files, manifest, progress)
    with _whole(path) as temporary:
        safetensors.write(temporary, named, manifest.tensors, manifest.metadata, loading)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary file beside the path, renamed when it is complete and removed when it is not."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        os.replace(temporary, path)
    except StoreError:
        raise
    except OSError as problem:
        raise StoreError(
            f"{path}: writing failed: {problem.strerror or problem}; "
            "check that the folder is there, that you may write to it, and that it has room"
        ) from problem
    finally:
        with contextlib.suppress(OSError):  # it may never have been made
            temporary.unlink()
