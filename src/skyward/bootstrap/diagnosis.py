"""Diagnosis: which line of an image made a phase fail, and what its user may do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyward.bootstrap.recipe import normalised, project_name
from skyward.errors import ImageError
from skyward.spec import Image

SHOWN_LINES = 20
_NETWORK = re.compile(
    r"timed? ?out|temporary failure|connection (reset|refused|aborted|closed)|dns error|"
    r"could not resolve|unreachable|broken pipe|error sending request|incomplete ?read|"
    r"failed to fetch|\b50[234]\b",
    re.IGNORECASE,
)
_USER_INFORMATION = re.compile(r"(?<=://)[^/\s@]+@")
_SHORTEST_SECRET = 5
_MODULES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def looks_like_network(lines: Sequence[str]) -> bool:
    """Whether a failure looks like one of the network, which may pass."""
    if any("certificate" in line for line in lines):
        return False
    return any(_NETWORK.search(line) for line in lines)


def failure(
    node: int, kind: str, phase: str, image: Image, python: str, lines: Sequence[str]
) -> ImageError:
    """The error for a failed phase: the node, the line of the image, the output, the next step."""
    cause, advice = _cause(kind, image, python, lines)
    where = f"node {node}: {phase} failed" + (f" for Image({cause})" if cause else "")
    if any("No space left" in line for line in lines):
        advice = "make room on the machine; environments are in ~/.cache/skyward and ~/.cache/uv"
    elif any("certificate" in line for line in lines):
        advice = (
            "the machine does not trust the index's certificate; add its authority to those of the "
            "system, or name a file there that has it with Image(env={'SSL_CERT_FILE': ...})"
        )
    elif looks_like_network(lines):
        advice = (
            "the network or an index did not answer, twice; check that the machine reaches it, "
            "with Image(env={'HTTPS_PROXY': ...}) if it takes a proxy; or " + advice
        )
    output = [f"  {line}" for line in scrubbed(lines, image)[-SHOWN_LINES:]]
    return ImageError("\n".join([where, *(output or ["  it said nothing"]), advice]))


def scrubbed(lines: Sequence[str], image: Image) -> list[str]:
    """The lines without the secrets of the image: values of variables, and passwords in URLs."""
    secrets = [value for value in image.env.values() if len(value) >= _SHORTEST_SECRET]
    for index in image.pip_indexes:
        user = _USER_INFORMATION.search(index.url)
        secrets += re.split("[:@]", user[0])[:-1] if user else []
    shown = []
    for line in lines:
        for secret in filter(None, secrets):
            line = line.replace(secret, "***")
        shown.append(_USER_INFORMATION.sub("***@", line))
    return shown


def _cause(kind: str, image: Image, python: str, lines: Sequence[str]) -> tuple[str, str]:
    match kind:
        case "root":
            return (
                f"apt={list(image.apt)}",
                "have them installed on the machine by its owner, or log in there as root",
            )
        case "apt":
            mentioned = _mentioned(
                list(image.apt), [re.split("[=/:]", p)[0] for p in image.apt], lines
            )
            return (
                f"apt={mentioned}",
                "check the names with `apt-cache search` on the machine, take out of apt what it "
                "cannot have, or choose a machine image that has it",
            )
        case "packages":
            mentioned = _mentioned(
                list(image.pip), [project_name(p) or p for p in image.pip], lines
            )
            named = next((project_name(line) for line in mentioned), None) or "name"
            return (
                f"pip={mentioned}" if image.pip else "",
                "check the name and the version; a package from another index takes "
                f"pip_indexes=[PipIndex(url, packages=[{named!r}])]",
            )
        case "python":
            return (
                f"python={python!r}",
                f"install Python {python} on the machine, choose a machine image that has it, or "
                "ask for the version it has and run this script with that",
            )
        case "uv":
            return (
                "",
                "install uv on the machine (https://docs.astral.sh/uv), or Python's venv and pip "
                f"(on Debian: apt install python{python}-venv)",
            )
        case "environment":
            pip = f"pip={list(image.pip)}" if image.pip else ""
            return (
                pip,
                "everything was installed, and does not work together; a library that is missing "
                "belongs to the system: Image(apt=[...]) installs it, or a machine image has it",
            )
        case "includes":
            return f"includes={list(image.includes)}", "check the disk space on the machine"
        case _:
            return "", "check that the machine has a POSIX shell, a home or /tmp, and disk space"


def _mentioned(entries: list[str], names: list[str], lines: Sequence[str]) -> list[str]:
    """The entries that the first complaint mentions; all entries where no line mentions any."""
    for telling in (_complaints(lines), list(lines)):
        for line in telling:
            words = {normalised(word) for word in _MODULES.findall(line)}
            mentioned = [
                entry
                for entry, name in zip(entries, names, strict=True)
                if normalised(name) in words or entry in line
            ]
            if mentioned:
                return mentioned
    return entries


def _complaints(lines: Sequence[str]) -> list[str]:
    """The lines that complain: installers name the package there."""
    said = re.compile(r"error|no solution|not found|because|unable|failed|hint", re.IGNORECASE)
    return [line for line in lines if said.search(line)]
