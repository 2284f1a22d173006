"""Requirements, compared with the packages in the client's own environment."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

_EGG = re.compile(r"(?:^|&)egg=([A-Za-z0-9._-]+)")
_REVISION = re.compile(r"@[^@/]+$")


@dataclass(frozen=True, slots=True)
class Unmet:
    """A requirement of an image that this environment does not meet, and why."""

    requirement: str
    reason: str


def unmet(requirements: tuple[str, ...]) -> list[Unmet]:
    """The requirements that this environment does not meet, in their order."""
    found = []
    for text in requirements:
        reason = next(_reasons(text), None)
        if reason is not None:
            found.append(Unmet(text, reason))
    return found


def _reasons(text: str) -> Iterator[str]:
    """Why a requirement, as the user wrote it, is not met; empty if it is met."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        yield from _source_reasons(text)
        return
    if requirement.marker is None or requirement.marker.evaluate():
        yield from _package_reasons(requirement, set())


def _package_reasons(
    requirement: Requirement, seen: set[tuple[NormalizedName, str]]
) -> Iterator[str]:
    """Why a package is not as required; `seen` are the extras that were judged already."""
    name = requirement.name
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        yield f"{name} is not installed"
        return
    try:
        fits = requirement.specifier.contains(Version(distribution.version), prereleases=True)
    except InvalidVersion:
        fits = not requirement.specifier
    if not fits:
        yield f"{name} {distribution.version} is installed"
    if requirement.url is not None:
        yield from _url_reasons(requirement.url, distribution)
    for extra in sorted(requirement.extras):
        key = canonicalize_name(name), canonicalize_name(extra)
        if key not in seen:
            seen.add(key)
            yield from _extra_reasons(distribution, extra, seen)


def _extra_reasons(
    distribution: metadata.Distribution, extra: str, seen: set[tuple[NormalizedName, str]]
) -> Iterator[str]:
    """Why an extra of an installed package is not there."""
    provided = distribution.metadata.get_all("Provides-Extra") or []
    if canonicalize_name(extra) not in map(canonicalize_name, provided):
        yield f"{distribution.name} {distribution.version} has no extra {extra!r}"
        return
    for line in distribution.requires or ():
        part = Requirement(line)
        if part.marker is None or part.marker.evaluate({"extra": ""}):
            # The package needs it also without the extra, so the installer has installed it.
            continue
        if part.marker.evaluate({"extra": extra}):
            for reason in _package_reasons(part, seen):
                yield f"its extra {extra!r} needs {part.name}{part.specifier}: {reason}"


def _source_reasons(source: str) -> Iterator[str]:
    """Why the package at a path or URL is not installed here."""
    url, fragment = urldefrag(source)
    named = _EGG.search(fragment)
    path = _local_path(url)
    name = named[1] if named else _project_name(path)
    archive = _archive(path.name if path is not None else urlsplit(url).path)
    if archive is not None:
        yield from _package_reasons(Requirement(f"{archive[0]}=={archive[1]}"), set())
    elif name is not None:
        yield from _package_reasons(Requirement(name), set())
    elif not any(_origin(each) == _plain(url) for each in metadata.distributions()):
        yield "no installed package comes from there"


def _url_reasons(url: str, distribution: metadata.Distribution) -> Iterator[str]:
    """Why an installed package is not the one at a URL, as far as its records tell."""
    origin = _origin(distribution)
    archive = _archive(urlsplit(url).path)
    if origin == _plain(url):
        return
    if archive is not None:
        if str(archive[1]) != distribution.version:
            yield f"{distribution.name} {distribution.version} is installed"
    elif origin is not None:
        yield f"the {distribution.name} that is installed comes from {origin}"


def _archive(path: str) -> tuple[NormalizedName, Version] | None:
    """The name and version that the file name of a wheel or source archive says."""
    file = unquote(path).rpartition("/")[2]
    try:
        if file.endswith(".whl"):
            return parse_wheel_filename(file)[:2]
        return parse_sdist_filename(file)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _local_path(url: str) -> Path | None:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(re.sub(r"\[[^\]]*\]$", "", url)).expanduser()


def _project_name(path: Path | None) -> str | None:
    """The name of the project in a folder, where its pyproject.toml says it."""
    if path is None or not (path / "pyproject.toml").is_file():
        return None
    try:
        project = tomllib.loads((path / "pyproject.toml").read_text("utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    name = project.get("name")
    return name if isinstance(name, str) else None


def _origin(distribution: metadata.Distribution) -> str | None:
    """The URL that an installed package came from, where an installer wrote it down."""
    recorded = distribution.read_text("direct_url.json")
    try:
        url = json.loads(recorded).get("url") if recorded else None
    except ValueError:
        return None
    return _plain(url) if isinstance(url, str) else None


def _plain(url: str) -> str:
    """A URL without the version control, user, revision and fragment that do not name a place."""
    parts = urlsplit(urldefrag(url)[0])
    scheme = parts.scheme.rpartition("+")[2]
    path = _REVISION.sub("", parts.path) if "+" in parts.scheme else parts.path
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{path.rstrip('/')}"
