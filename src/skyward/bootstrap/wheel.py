"""A wheel of the client's own skyward, editable or not, so that a node runs the same code."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from skyward.errors import ImageError

DISTRIBUTION = "skyward-torch"
"""What an installer calls this skyward: the name `skyward` belongs to another project."""
PACKAGES = ("skyward", "skytorch")
_LEFT_OUT = ("*.pyc", "*.pyo", "*.so", ".*")
_KEPT = ("device/cores/worker-*.so", "device/cores/link-linux-*.so")
"""Compiled for nodes, which then need no compiler."""
_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The time of all members; real times would make every wheel differ."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel in memory."""

    name: str
    data: bytes = field(repr=False)
    digest: str


@functools.cache
def own_wheel() -> Wheel:
    """The wheel of the skyward that runs here; the same code gives the same bytes."""
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise ImageError(
            "this skyward is not installed, so it cannot be sent to a node; "
            f"install it with: pip install {DISTRIBUTION} (from a source tree: pip install -e .)"
        ) from None
    version = distribution.version
    named = f"{DISTRIBUTION.replace('-', '_')}-{version}"
    info = f"{named}.dist-info"
    members = dict(_package_files())
    members[f"{info}/METADATA"] = _metadata(distribution).encode()
    members[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: skyward\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    entry_points = distribution.read_text("entry_points.txt")
    if entry_points:
        members[f"{info}/entry_points.txt"] = entry_points.encode()
    lines = [f"{name},{_record_hash(data)},{len(data)}\n" for name, data in members.items()]
    members[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in members.items():
            member = zipfile.ZipInfo(name, _EARLIEST)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o100644 << 16
            wheel.writestr(member, data)
    data = archive.getvalue()
    digest = hashlib.sha256(data).hexdigest()[:20]
    return Wheel(f"{named}-py3-none-any.whl", data, digest)


def _package_files() -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ImageError(f"the package {package} is not where this skyward is; reinstall it")
        home = Path(spec.origin).parent
        for file in sorted(home.rglob("*")):
            inside = file.relative_to(home)
            is_left_out = any(map(file.match, _LEFT_OUT)) and not any(map(file.match, _KEPT))
            if not file.is_file() or is_left_out:
                continue
            if any(part == "__pycache__" or part.startswith(".") for part in inside.parts):
                continue
            yield f"{package}/{inside.as_posix()}", file.read_bytes()


def _metadata(distribution: metadata.Distribution) -> str:
    """The metadata that an installer needs, without the description."""
    fields = ["Metadata-Version: 2.1", f"Name: {DISTRIBUTION}", f"Version: {distribution.version}"]
    for name in ("Requires-Python", "Provides-Extra", "Requires-Dist"):
        fields += [f"{name}: {value}" for value in distribution.metadata.get_all(name) or ()]
    return "\n".join([*fields, "", ""])


def _record_hash(data: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={encoded.rstrip(b'=').decode()}"
