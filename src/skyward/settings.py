"""The settings file of a project: where it is, and the pools that it names."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.errors import ConfigurationError

VARIABLE = "SKYWARD_CONFIG"
"""The environment variable that names the settings file."""
_OWN, _SHARED = "skyward.toml", "pyproject.toml"
_TABLES = ("pools",)
_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REFERENCE = re.compile(r"\$(\$?)\{([^}]*)\}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ProjectSettings:
    """A settings file, as it was read."""

    path: Path
    pools: Mapping[str, Mapping[str, Any]]
    """The tables of the pools, as they are written: variables are not expanded."""
    prefix: str = ""
    """What comes before the names of tables: "tool.skyward." in a pyproject.toml."""

    def pool(self, name: str) -> Mapping[str, Any]:
        """The table of a pool; raises a `ConfigurationError` that names those there are."""
        if name in self.pools:
            return self.pools[name]
        there = ", ".join(sorted(self.pools)) or "none"
        raise ConfigurationError(
            f"{self.path} has no pool {name!r}{meant(name, self.pools)}; it has {there}; add a "
            f"table [{self.prefix}pools.{name}]"
        )

    def refused(self, pool: str, key: str, problem: str, *value: object) -> ConfigurationError:
        """The error for a key of a pool's table, with its value as it is written."""
        told = f"{key} = {_toml(value[0])}" if value else key
        return ConfigurationError(f"{self.path}: [{self.prefix}pools.{pool}] {told}: {problem}")


def settings_file() -> Path | None:
    """The file that `SKYWARD_CONFIG` names, or the nearest one upwards; None if there is none.

    In each folder, a skyward.toml comes before a pyproject.toml that has a table `tool.skyward`.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / _OWN).is_file():
            return folder / _OWN
        shared = folder / _SHARED
        if shared.is_file() and "skyward" in _read(shared).get("tool", {}):
            return shared
    return None


def read_settings() -> ProjectSettings | None:
    """The settings of the working directory; None if there is no file."""
    path = settings_file()
    if path is None:
        return None
    document = _read(path)
    prefix = ""
    if path.name == _SHARED:
        document, prefix = document.get("tool", {}).get("skyward", {}), "tool.skyward."
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path}: tool.skyward must be a table; write [tool.skyward]")
    for key in document:
        if key not in _TABLES:
            raise ConfigurationError(
                f"{path}: {prefix}{key}: there is no such table{meant(key, _TABLES)}; pools are "
                f"written as [{prefix}pools.NAME]"
            )
    pools = document.get("pools", {})
    if not isinstance(pools, dict):
        raise ConfigurationError(f"{path}: {prefix}pools must be a table; write [pools.NAME]")
    for name, table in pools.items():
        if not isinstance(table, dict):
            raise ConfigurationError(
                f"{path}: {prefix}pools.{name} = {_toml(table)}: a pool is a table; write "
                f"[{prefix}pools.NAME] above its keys"
            )
        if not _POOL_NAME.fullmatch(name):
            raise ConfigurationError(
                f"{path}: [{prefix}pools.{_toml(name)}]: not a name of a pool; use letters, digits "
                "and . _ -, and begin with a letter or a digit"
            )
    return ProjectSettings(path, pools, prefix)


def required_settings(name: str) -> ProjectSettings:
    """The settings that must have a pool of this name; raises if there is no file."""
    found = read_settings()
    if found is None:
        raise ConfigurationError(
            f"there is no pool {name!r}: neither {Path.cwd()} nor a folder above it has a "
            f"{_OWN}, or a {_SHARED} with [tool.skyward]; write one, or name it in {VARIABLE}"
        )
    return found


def expanded(value: Any) -> Any:
    """A value with "${NAME}" replaced by environment variables, also inside lists and tables.

    "$${NAME}" stands for "${NAME}" itself. Raises `LookupError` with what to do.
    """
    if isinstance(value, str):
        return _REFERENCE.sub(_variable, value)
    if isinstance(value, list):
        return [expanded(each) for each in value]
    if isinstance(value, dict):
        return {key: expanded(each) for key, each in value.items()}
    return value


def meant(name: str, known: Iterable[str]) -> str:
    """The part of a message that asks for the nearest of the known names; empty without one."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def _variable(match: re.Match[str]) -> str:
    escaped, name = match.groups()
    if escaped:
        return match[0][1:]
    if not _VARIABLE_NAME.fullmatch(name):
        raise LookupError(
            f"{match[0]!r} names no variable; write ${{NAME}}, or $${{ for a plain ${{"
        )
    if name not in os.environ:
        raise LookupError(f"the environment variable {name} is not set; set it")
    return os.environ[name]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as problem:
        hint = f"; {VARIABLE} names it" if os.environ.get(VARIABLE) else ""
        raise ConfigurationError(f"{path}: {problem.strerror}{hint}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"{path} is not TOML: {problem}; mend it there") from problem


def _toml(value: object) -> str:
    """A value as TOML writes it, near enough for a message."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(each)}' for key, each in value.items())}}}"
    return str(value)
