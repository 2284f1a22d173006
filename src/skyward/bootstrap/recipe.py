"""A recipe: the key of the environment that an image asks for, and the input of its build."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from skyward.bootstrap.wheel import Wheel
from skyward.spec import Image

FORMAT = "1"
"""Part of every key; a new number makes all old environments unused."""
_SCRIPTS = Path(__file__).parent / "sh"
_PROJECT = "skyward-image"
_GIVEN = (
    *("pool", "node", "includes", "given_python", "key", "want", "apt", "wheel", "minor"),
    *("uv_allowed", "requirements", "project", "candidates"),
)
"""The shell variables that the scripts are given."""
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:$|[\[<>=!~;@\s(,])")


def project_name(requirement: str) -> str | None:
    """The normalised name of the package that a requirement is for; None for a path or URL."""
    match = _NAME.match(requirement)
    return normalised(match[1]) if match else None


def normalised(name: str) -> str:
    """A package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name.strip("-_.")).lower()


def _quoted(value: object) -> str:
    # A JSON string or list is valid TOML.
    return msgspec.json.encode(value).decode()


def _folder(url: str) -> str:
    """The path of an index that is a folder on the machine."""
    parts = urlsplit(url)
    return shlex.quote(unquote(parts.path)) if parts.scheme == "file" else ""


def _more_project(*lines: str) -> str:
    """A shell command that adds lines to the project's file."""
    text = "\n".join([*lines, ""])
    return f'project="$project"{shlex.quote(text)}'


def script(*names: str, prelude: str = "", between: str = "") -> bytes:
    """Our scripts as one, to be read by `sh -s`; `between` comes after the first of them."""
    texts = [(_SCRIPTS / f"{name}.sh").read_text("utf-8") for name in names]
    # In braces, so that sh reads all of it first: a command must not read the rest as its input.
    whole = "\n".join(["{", prelude, texts[0], between, *texts[1:], "exit 0", "} </dev/null", ""])
    return whole.encode()


def assignments(**values: str) -> str:
    """Shell variables with these values."""
    return "\n".join(f"{name}={shlex.quote(value)}" for name, value in values.items())


@dataclass(frozen=True, slots=True)
class Recipe:
    """An image, and the wheel of skyward that is installed with it."""

    image: Image
    wheel: Wheel

    @property
    def python(self) -> str:
        """The version asked for, such as "3.11" or "3.11.7"."""
        if self.image.python == "auto":
            return "{}.{}".format(*sys.version_info)
        return self.image.python

    @property
    def key(self) -> str:
        """A name that is the same for the same contents; the machine appends its platform."""
        indexes = [(index.url, list(index.packages)) for index in self.image.pip_indexes]
        what = [FORMAT, self.python, list(self.image.pip), indexes, list(self.image.apt)]
        encoded = msgspec.json.encode([*what, self.wheel.digest])
        return hashlib.sha256(encoded).hexdigest()[:20]

    def facts(self) -> str:
        """The assignments that every script gets."""
        return assignments(
            key=self.key,
            want=self.python,
            apt=" ".join(self.image.apt),
            wheel=f"{self.wheel.digest}/{self.wheel.name}",
        )

    def instructions(self, *, uv: bool) -> str:
        """The assignments for the build script; they may hold secrets and travel as input only."""
        asked = assignments(
            minor=".".join(self.python.split(".")[:2]),
            uv_allowed="yes" if uv else "",
            requirements="".join(f"{line}\n" for line in self._unscoped),
            project=self._project,
            candidates=" ".join(self._only_named),
        )
        return f"{asked}\n{self._indexes}\n{self._exports}\n{self._scoped_with_pip}"

    @property
    def _exports(self) -> str:
        """The image's variables, except those whose names the scripts use themselves."""
        texts = "".join(file.read_text("utf-8") for file in _SCRIPTS.glob("*.sh"))
        taken = {"IFS", *_GIVEN, *re.findall(r"\b([a-z_]+)=", texts)}
        taken.update(re.findall(r"\bfor ([a-z]+) in", texts))
        for names in re.findall(r"read -r ([a-z ]+)", texts):
            taken.update(names.split())
        return "\n".join(
            f"export {name}={shlex.quote(value)}"
            for name, value in self.image.env.items()
            if name not in taken
        )

    @property
    def _scopes(self) -> dict[str, int]:
        """The number of the index that serves a package, by package; the first index wins."""
        scopes: dict[str, int] = {}
        for number, index in enumerate(self.image.pip_indexes):
            for package in index.packages:
                scopes.setdefault(normalised(package), number)
        return scopes

    @property
    def _unscoped(self) -> list[str]:
        scopes = self._scopes
        return [line for line in self.image.pip if project_name(line) not in scopes]

    @property
    def _scoped(self) -> list[str]:
        scopes = self._scopes
        return [line for line in self.image.pip if project_name(line) in scopes]

    @property
    def _only_named(self) -> list[str]:
        """Packages with an index of their own that only other packages may require."""
        asked = {project_name(line) for line in self.image.pip}
        return [package for package in self._scopes if package not in asked]

    @property
    def _project(self) -> str:
        """A pyproject.toml, the one place where uv scopes indexes."""
        if not self.image.pip_indexes:
            return ""

        minor = ".".join(self.python.split(".")[:2])
        lines = [
            "[project]",
            f"name = {_quoted(_PROJECT)}",
            'version = "0"',
            f"requires-python = {_quoted(f'=={minor}.*')}",
            f"dependencies = {_quoted(self._scoped)}",
            "[project.optional-dependencies]",
            *(f"{name} = {_quoted([name])}" for name in self._only_named),
            "[tool.uv.sources]",
            *(
                f'{_quoted(name)} = {{index = "i{number}"}}'
                for name, number in self._scopes.items()
            ),
        ]
        return "\n".join([*lines, ""])

    @property
    def _indexes(self) -> str:
        """The indexes of the project; only the machine can tell an index from a wheel folder."""
        lines = []
        for number, index in enumerate(self.image.pip_indexes):
            table = ["[[tool.uv.index]]", f'name = "i{number}"', f"url = {_quoted(index.url)}"]
            lines.append(_more_project(*table, "explicit = true"))
            if folder := _folder(index.url):
                lines.append(f"if has_wheels {folder}; then")
                lines += [_more_project('format = "flat"'), "fi"]
        return "\n".join(lines)

    @property
    def _scoped_with_pip(self) -> str:
        """Without uv: install packages from their own indexes first; pip keeps them later."""
        lines = []
        scopes = self._scopes
        for number, index in enumerate(self.image.pip_indexes):
            asked = [line for line in self._scoped if scopes[project_name(line) or ""] == number]
            if not asked:
                continue
            # The address may hold a password, which an argument would show to others.
            address = shlex.quote(index.url)
            install = (
                'PIP_EXTRA_INDEX_URL= "$environment/bin/python" -m pip install '
                f"--disable-pip-version-check --no-input --no-deps {shlex.join(asked)} || return 1"
            )
            folder = _folder(index.url)
            if folder:
                lines += [f"if has_wheels {folder}; then"]
                lines += [f"PIP_NO_INDEX=1 PIP_FIND_LINKS={address} {install}", "else"]
            lines += [f"PIP_INDEX_URL={address} PIP_FIND_LINKS= {install}"]
            lines += ["fi"] if folder else []
        body = "\n".join(lines) or ":"
        # The second installation adds the dependencies of what these commands installed.
        again = assignments(requirements="".join(f"{line}\n" for line in self.image.pip))
        write = 'printf %s "$requirements" >"$build/requirements.txt"'
        return "\n".join(["install_scoped_with_pip() {", body, again, write, "}"])
