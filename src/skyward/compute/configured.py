"""Pools by name: the arguments of a `Compute` that the settings file describes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skyward import accelerators, plugins
from skyward.errors import ConfigurationError
from skyward.plugins.plugin import Plugin
from skyward.providers import Provider, find_provider, provider_names
from skyward.providers.local import Local
from skyward.settings import ProjectSettings, expanded, meant, required_settings
from skyward.spec import Image, Nodes, Options, PipIndex, Project, Volume, Worker

_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)")
_DURATIONS = re.compile(r"ttl|(?:.*_)?timeout")
"""Keys whose values are times; a string there, such as "8h", is a duration."""


def arguments_of(name: str, *, without: Collection[str] = ()) -> dict[str, Any]:
    """The arguments of the `Compute` that the settings file describes under a name.

    `without` names arguments that the caller has: their values in the file are checked as far as
    their keys go, and not made.

    >>> sky.Compute(**arguments_of("train"))
    """
    settings = required_settings(name)
    return _Reader(settings, name).arguments(settings.pool(name), without)


def seconds_of(text: str) -> float:
    """The seconds of a duration such as "90s", "8h" or "1h 30min".

    >>> seconds_of("1h30m")
    5400.0
    """
    total, end = 0.0, 0
    while match := _PART.match(text.lower(), end):
        if match[2] not in _UNITS:
            break
        total, end = total + float(match[1]) * _UNITS[match[2]], match.end()
    if not end or text[end:].strip():
        raise ConfigurationError(
            "not a duration; write a number of seconds, or one such as '90s', '45min', '8h', '2d'"
        )
    return total


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the table of one pool."""

    settings: ProjectSettings
    pool: str

    def arguments(self, table: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
        readers = self._readers()
        named, inline = self._provider_table(table)
        given = {key: value for key, value in table.items() if key in readers}
        others = {key: value for key, value in table.items() if key not in (*readers, "provider")}
        # Every key that is no argument of `Compute` has to be one of the provider.
        made = self._provider(
            named, {**inline, **others}, [*readers], make="provider" not in without
        )
        found: dict[str, Any] = {"name": self.pool}
        if made is not None and "provider" in table:
            found["provider"] = made
        for key, value in given.items():
            if key not in without:
                found[key] = self._made(key, value, readers[key])
        return {key: value for key, value in found.items() if key not in without}

    def _readers(self) -> dict[str, Callable[[Any], Any]]:
        """How each argument of `Compute` is made from a value of the file."""
        return {
            "nodes": self._nodes,
            "accelerator": lambda value: accelerators.parse(_is(value, str, '"H100:8"')),
            "vcpus": _number,
            "memory_gb": _number,
            "image": self._image,
            "plugins": self._plugins,
            "worker": partial(_call, Worker, "worker"),
            "options": partial(_call, Options, "options"),
            "volumes": _volumes,
            "project": self._project,
            "allocation": lambda value: _is(value, str, '"spot"'),
            "region": lambda value: _is(value, str, '"us-east-1"'),
            "max_hourly_cost": _number,
            "ttl": _duration,
            "disk_gb": _number,
            "keep": lambda value: _is(value, bool, "true"),
        }

    def _made(self, key: str, value: Any, make: Callable[[Any], Any]) -> Any:
        try:
            return make(expanded(value))
        except LookupError as problem:
            raise self.settings.refused(self.pool, key, problem.args[0], value) from None
        except ConfigurationError as problem:
            if str(problem).startswith(str(self.settings.path)):
                raise
            raise self.settings.refused(self.pool, key, str(problem), value) from problem

    # The provider.

    def _provider_table(self, table: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The provider's name, and the arguments that stand in a table of its own."""
        given = table.get("provider", Local.name)
        if isinstance(given, str):
            return self._made("provider", given, lambda value: value), {}
        if isinstance(given, dict) and isinstance(given.get("name"), str):
            name = self._made("provider", given["name"], lambda value: value)
            return name, {key: value for key, value in given.items() if key != "name"}
        raise self.settings.refused(
            self.pool,
            "provider",
            'write its name, provider = "ssh", or a table, provider = {name = "ssh", ...}',
            given,
        )

    def _provider(
        self, name: str, table: Mapping[str, Any], others: list[str], *, make: bool
    ) -> Provider | None:
        try:
            kind = find_provider(name)
        except ConfigurationError as problem:
            hint = meant(name, provider_names())
            raise self.settings.refused(self.pool, "provider", f"{problem}{hint}", name) from None
        except ImportError as problem:
            raise self.settings.refused(
                self.pool, "provider", f"it cannot be imported: {problem}; install it", name
            ) from problem
        known = _parameters(kind)
        for key, value in table.items():
            if key not in known:
                raise self.settings.refused(
                    self.pool,
                    key,
                    f"neither a pool nor the provider {name!r} has it"
                    f"{meant(key, [*others, *known])}; a pool has provider, "
                    f"{', '.join(others)}; {name} has {', '.join(known) or 'none'}",
                    value,
                )
        if not make:
            return None
        given = {key: self._made(key, value, _argument(key)) for key, value in table.items()}
        if missing := [key for key, needed in known.items() if needed and key not in given]:
            raise self.settings.refused(
                self.pool,
                "provider",
                f"it needs {' and '.join(missing)}; add {missing[0]} = ...",
                name,
            )
        try:
            provider: Provider = kind(**given)
        except (TypeError, ValueError) as problem:
            raise self.settings.refused(self.pool, "provider", str(problem), name) from problem
        return provider

    # The values of a pool.

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, dict):
            return _call(Nodes, "nodes", value)
        return Nodes.of((*value,)) if isinstance(value, list) else Nodes(value).desired

    def _image(self, value: Any) -> Image:
        if isinstance(value, str):
            raise ConfigurationError(
                'a table such as {pip = ["numpy"]}; the image of a provider\'s containers goes to '
                'the provider: provider = {name = "container", image = ...}'
            )
        table = dict(_is(value, dict, '{pip = ["numpy"]}'))
        indexes = table.get("pip_indexes")
        if isinstance(indexes, list):
            table["pip_indexes"] = [_call(PipIndex, "pip_indexes", each) for each in indexes]
        if isinstance(table.get("includes"), list):
            # The folder of the file, not the working directory, is what its author saw.
            table["includes"] = [self._below_file(each) for each in table["includes"]]
        image: Image = _call(Image, "image", table)
        return image

    def _project(self, value: Any) -> Project:
        table = {"path": value} if isinstance(value, str) else dict(_is(value, dict, '"."'))
        table["path"] = self._below_file(table.get("path", "."))
        project: Project = _call(Project, "project", table)
        return project

    def _below_file(self, path: Any) -> Any:
        if not isinstance(path, str):
            return path
        return str(self.settings.path.parent / Path(path).expanduser())

    def _plugins(self, value: Any) -> list[Plugin]:
        example = '["torch", {huggingface = {models = ["gpt2"]}}]'
        return [self._plugin(each, example) for each in _is(value, list, example)]

    def _plugin(self, value: Any, example: str) -> Plugin:
        table: Any = {}
        if isinstance(value, dict) and len(value) == 1:
            ((value, table),) = value.items()
        if not isinstance(value, str):
            raise ConfigurationError(f"{value!r} is no plugin; write {example}")
        try:
            make = getattr(plugins, value)
        except AttributeError as problem:
            raise ConfigurationError(f"{problem}{meant(value, dir(plugins))}") from None
        if value not in dir(plugins):
            known = ", ".join(dir(plugins))
            raise ConfigurationError(f"there is no plugin {value!r}; there are {known}")
        if isinstance(make, Plugin):
            if table:
                raise ConfigurationError(f"plugin {value!r} takes no arguments; write its name")
            return make
        plugin: Plugin = _call(make, f"plugin {value!r}", table)
        return plugin


def _call(make: Callable[..., Any], what: str, table: Any) -> Any:
    """Make a value from a table, whose keys are the arguments."""
    known = _parameters(make)
    for key in _is(table, dict, f"{{{next(iter(known), 'key')} = ...}}"):
        if key not in known:
            raise ConfigurationError(
                f"{what} has no {key!r}{meant(key, known)}; it has {', '.join(known) or 'no keys'}"
            )
    if missing := [key for key, needed in known.items() if needed and key not in table]:
        raise ConfigurationError(f"{what} needs {' and '.join(missing)}")
    given = {
        key: seconds_of(value) if _DURATIONS.fullmatch(key) and isinstance(value, str) else value
        for key, value in table.items()
    }
    try:
        return make(**given)
    except (TypeError, ValueError) as problem:
        raise ConfigurationError(str(problem)) from problem


def _argument(key: str) -> Callable[[Any], Any]:
    """How an argument of a provider is made."""
    if _DURATIONS.fullmatch(key):
        return lambda value: seconds_of(value) if isinstance(value, str) else value
    if key == "mounts":
        return _volumes
    return lambda value: value


def _volumes(value: Any) -> list[Volume]:
    example = '["/data", {source = "s3://bucket", target = "/data"}]'
    return [
        Volume(each) if isinstance(each, str) else _call(Volume, "a volume", each)
        for each in _is(value, list, example)
    ]


def _parameters(make: Callable[..., Any]) -> dict[str, bool]:
    """The names of a function's arguments, and whether each is needed."""
    known = inspect.signature(make).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: each.default is each.empty for each in known if each.kind in named}


def _is(value: Any, kind: type, example: str) -> Any:
    if isinstance(value, kind):
        return value
    names = {str: "a string", bool: "true or false", list: "a list", dict: "a table"}
    raise ConfigurationError(f"must be {names[kind]}; write one such as {example}")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError("must be a number above 0; write one such as 16")
    return value


def _duration(value: Any) -> float:
    return seconds_of(value) if isinstance(value, str) else _number(value)
