"""An image on this machine: nothing is installed, so its packages must be here already."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from skyward import checks
from skyward.errors import ConfigurationError, ImageError
from skyward.files import includes
from skyward.spec import Image

_QUERY_SECONDS = 30.0
_FIELDS = "${Package}\t${Architecture}\t${db:Status-Status}\t${Version}\t${Provides}\n"


def check_python(image: Image) -> None:
    """Refuse a version of Python that is not the one that runs here."""
    version = platform.python_version()
    if image.python != "auto" and not f"{version}.".startswith(f"{image.python}."):
        raise ConfigurationError(
            f"Image(python={image.python!r}): local workers run this Python, {version}; use "
            "python='auto', or a provider that builds environments"
        )


def check(image: Image) -> None:
    """Raise one error that names everything in the image that this machine does not have."""
    lacks: list[str] = []
    steps: list[str] = []
    if image.pip:
        # packaging takes 10 ms to load, and most local pools have no use for it.
        from skyward.providers.local.requirements import unmet

        packages = unmet(tuple(image.pip))
        lacks += [f"pip: {each.requirement} ({each.reason})" for each in packages]
        if packages:
            steps.append(_pip_command(image, [each.requirement for each in packages]))
    if missing := _missing_apt(image.apt):
        lacks += [f"apt: {package} (not installed)" for package in missing]
        steps.append(shlex.join(["sudo", "apt-get", "install", "-y", *missing]))
    lacks += [f"includes: {problem}" for problem in _include_problems(image)]
    if lacks:
        lines = ["local workers share this environment, and it lacks what the image asks for:"]
        lines += [f"  {line}" for line in lacks]
        if steps:
            lines += ["install it here:", *(f"  {step}" for step in steps)]
            lines += ["or use a provider that builds environments"]
        raise ImageError(checks.without_credentials("\n".join(lines)))


def place_includes(image: Image, folder: Path) -> Path | None:
    """Make the working directory of a node's workers; None where the image includes nothing.

    As on every other node, it holds the includes and nothing else; the files are links.
    """
    if not image.includes:
        return None
    work = folder / "work"
    work.mkdir()
    includes.find(image.includes, image.excludes).link_into(work)
    return work


def _pip_command(image: Image, requirements: Sequence[str]) -> str:
    names = {re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0].lower() for each in requirements}
    command = [sys.executable, "-m", "pip", "install"]
    for index in image.pip_indexes:
        if names & {package.lower() for package in index.packages}:
            command += ["--extra-index-url", index.url]
    return shlex.join([*command, *requirements])


def _missing_apt(packages: Sequence[str]) -> list[str]:
    """The packages of the system that dpkg does not know as installed."""
    if not packages:
        return []
    program = shutil.which("dpkg-query")
    if program is None:
        warnings.warn(
            f"Image(apt={list(packages)}): this machine has no dpkg, so nobody can tell whether "
            "local workers have these packages",
            stacklevel=2,
        )
        return []
    listed = subprocess.run(
        [program, "-W", "-f", _FIELDS],
        capture_output=True,
        text=True,
        timeout=_QUERY_SECONDS,
        check=False,
    ).stdout
    versions: dict[str, list[str]] = {}
    for line in listed.splitlines():
        name, architecture, status, version, provides = line.split("\t")
        if status == "installed":
            versions.setdefault(name, []).append(version)
            versions.setdefault(f"{name}:{architecture}", []).append(version)
            for virtual in filter(None, provides.split(", ")):
                versions.setdefault(virtual.split(" ")[0].partition(":")[0], [])
    return [package for package in packages if not _is_installed(package, versions)]


def _is_installed(package: str, versions: dict[str, list[str]]) -> bool:
    """Whether apt would leave a package alone: "name", "name:arch", "name=1.2", "name/release"."""
    wanted, _, version = package.partition("=")
    found = versions.get(wanted.partition("/")[0])
    return found is not None and (not version or version in found)


def _include_problems(image: Image) -> list[str]:
    """Why includes cannot be shown to the workers."""
    try:
        includes.find(image.includes, image.excludes)
        return []
    except ImageError as problem:
        together = str(problem)
    problems = []
    for include in image.includes:
        try:
            includes.find([include], image.excludes)
        except ImageError as problem:
            problems.append(str(problem))
    return problems or [together]
