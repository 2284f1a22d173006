"""The frozen values that describe a pool: its nodes, workers, image, volumes and options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from skyward import checks
from skyward.errors import ConfigurationError
from skyward.former import explained

__all__ = ["Image", "Nodes", "Options", "PipIndex", "Project", "Variables", "Volume", "Worker"]

_PYTHON_VERSION = re.compile(r"3\.(\d{1,2})(?:\.\d{1,3})?")
_OLDEST_MINOR = 11
_INDEX_URL = re.compile(r"(?:https?://[^/\s]|file:///)\S*")
_PROJECT_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_TWO_REQUIREMENTS = re.compile(r"[A-Za-z0-9][\w.\-\[\],]*\s+[A-Za-z0-9]")
_APT_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+:~=_/-]*")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Variables(Mapping[str, str]):
    """Environment variables as an immutable mapping that pickles, hashes and never shows values.

    Any variable may hold a token, and the `repr` of a value often ends up in a log.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(sorted(values.items()))

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: '***'" for name in self) + "}"

    def __reduce__(self) -> tuple[type[Variables], tuple[dict[str, str]]]:
        return Variables, (dict(self._values),)


@dataclass(frozen=True, slots=True)
class PipIndex:
    """A package index that serves only the packages named, and no others.

    >>> PipIndex("https://download.pytorch.org/whl/cpu", packages=["torch"]).packages
    ('torch',)
    """

    url: str
    packages: Sequence[str]

    def __post_init__(self) -> None:
        url = checks.text(self, "url", self.url)
        if not _INDEX_URL.fullmatch(url):
            raise checks.refused(
                self,
                {"url": url},
                "not the address of an index; "
                "write a whole URL, such as 'https://download.pytorch.org/whl/cpu'",
            )
        packages = checks.texts(self, "packages", self.packages)
        if not packages:
            raise checks.refused(
                self,
                {"url": url, "packages": packages},
                "an index without packages would serve nothing; "
                "name those it is for, such as packages=['torch']",
            )
        for package in packages:
            if not _PROJECT_NAME.fullmatch(package):
                raise checks.refused(
                    self,
                    {"packages": [package]},
                    "packages takes names alone; "
                    "put the version in Image(pip=[...]) and only the name here",
                )
        checks.store(self, packages=packages)

    def __repr__(self) -> str:
        return checks.shown(self)


@explained
@dataclass(frozen=True, slots=True)
class Image:
    """What a node has installed: Python, packages, environment and the user's files.

    `python="auto"` means the version that this process runs. `includes` are paths of the user's
    own code to send along; `excludes` are glob patterns of what to leave out of them.

    >>> Image(pip=["torch"], env={"OMP_NUM_THREADS": "4"}).pip
    ('torch',)
    """

    python: str = "auto"
    pip: Sequence[str] = ()
    pip_indexes: Sequence[PipIndex] = ()
    apt: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    includes: Sequence[str] = ()
    excludes: Sequence[str] = ()

    def __post_init__(self) -> None:
        checks.store(
            self,
            python=_python_version(self, self.python),
            pip=checks.texts(self, "pip", self.pip, _check_requirement),
            pip_indexes=_indexes(self, self.pip_indexes),
            apt=checks.texts(self, "apt", self.apt, _check_apt_package),
            env=_variables(self, self.env),
            includes=checks.texts(self, "includes", self.includes),
            excludes=checks.texts(self, "excludes", self.excludes),
        )

    def __repr__(self) -> str:
        return checks.shown(self)


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many nodes: the number to start with and, for an elastic pool, its bounds.

    The pool starts when `min` nodes are ready, and then starts the other nodes up to `desired`.
    While tasks wait, the pool grows up to `max`; while it is idle, it shrinks to `min`. With
    `min=0` it shrinks to no nodes at all; then a task waits for the node that it makes start.

    >>> Nodes.of((2, 8))
    Nodes(desired=2, min=2, max=8)
    """

    desired: int
    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        desired = checks.whole(self, "desired", self.desired, at_least=0)
        low = None if self.min is None else checks.whole(self, "min", self.min, at_least=0)
        high = None if self.max is None else checks.whole(self, "max", self.max, at_least=1)
        if low is not None and high is not None and low > high:
            raise checks.refused(
                self, {"min": low, "max": high}, f"min exceeds max; write min={high}, max={low}"
            )
        if low is not None and desired < low:
            raise checks.refused(
                self,
                {"desired": desired, "min": low},
                f"desired is below min; start with at least {low} or lower min to {desired}",
            )
        if high is not None and desired > high:
            raise checks.refused(
                self,
                {"desired": desired, "max": high},
                f"desired exceeds max; start with at most {high} or raise max to {desired}",
            )
        if not desired and high is None:
            raise checks.refused(
                self,
                {"desired": desired},
                "a pool without nodes cannot grow unless max is given; start with at least 1, or "
                "write Nodes(0, max=4)",
            )
        checks.store(self, desired=desired, min=low, max=high)

    @classmethod
    def of(cls, value: int | tuple[int, int] | Nodes) -> Nodes:
        """Read the argument of `Compute(nodes=...)`: a number, `(min, max)`, or `Nodes` itself."""
        given: Any = value
        if isinstance(given, Nodes):
            return given
        if not isinstance(given, list | tuple):
            return cls(given)
        if len(given) != 2:
            raise ConfigurationError(
                f"nodes={given!r}: a pair means (min, max); "
                "write nodes=2, nodes=(2, 8) or nodes=Nodes(desired=4, min=2, max=8)"
            )
        low, high = given
        return cls(desired=low, min=low, max=high)

    @property
    def floor(self) -> int:
        """The fewest nodes the pool may shrink to."""
        return self.desired if self.min is None else self.min

    @property
    def ceiling(self) -> int:
        """The most nodes the pool may grow to."""
        return self.desired if self.max is None else self.max

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change with the load."""
        return self.floor != self.ceiling


@explained
@dataclass(frozen=True, slots=True)
class Worker:
    """The workers on each node: how many, of which kind, and how many tasks each runs at once.

    With `executor="process"`, each of a worker's `concurrency` tasks has a process of its own, of
    20 MB or more; for hundreds that mostly wait, "thread" has them in one.

    >>> Worker(per_node="accelerator").per_node
    'accelerator'
    """

    concurrency: int = 1
    executor: Literal["process", "thread"] = "process"
    per_node: int | Literal["accelerator"] = 1

    def __post_init__(self) -> None:
        concurrency = checks.whole(self, "concurrency", self.concurrency, at_least=1)
        if self.executor not in ("process", "thread"):
            raise checks.refused(
                self,
                {"executor": self.executor},
                "no such executor; write 'process' for isolation or 'thread' for shared memory",
            )
        per_node: int | str = self.per_node
        if isinstance(per_node, str):
            if per_node != "accelerator":
                raise checks.refused(
                    self,
                    {"per_node": per_node},
                    "the only word it takes is 'accelerator', one worker for each; "
                    "otherwise write a number",
                )
        else:
            per_node = checks.whole(self, "per_node", per_node, at_least=1)
        checks.store(self, concurrency=concurrency, per_node=per_node)


@explained
@dataclass(frozen=True, slots=True)
class Options:
    """How a pool behaves; every time is in seconds.

    With `cluster=False`, workers have no connection to each other: they know no peers, and pass no
    data on. `idle_timeout` is how long the pool keeps a node without tasks. `orphan_timeout` is how
    long a node lives on without its client, and so how long an outage of the network may last.
    `fail_grace` is how long the other ranks of a process group go on after one of them has failed;
    with None, a broadcast waits for all of them. `collective_timeout` is how long the ranks of a
    `compute.mesh()` wait for one that does not come to a collective.
    `console=None` shows progress in the way that the terminal allows. `log` is a file to which
    every event is written as a line of JSON, or "-" for stderr; without it, `SKYWARD_LOG` says so.
    `tensorboard` is a folder in which TensorBoard finds what `sky.log` takes.

    >>> Options(default_timeout=30).retries
    0
    """

    cluster: bool = True
    console: bool | None = None
    default_timeout: float | None = None
    idle_timeout: float = 300.0
    orphan_timeout: float = 60.0
    retries: int = 0
    log: str | None = None
    tensorboard: str | None = None
    fail_grace: float | None = 3.0
    collective_timeout: float = 300.0

    def __post_init__(self) -> None:
        checks.store(
            self,
            log=None if self.log is None else checks.text(self, "log", self.log),
            tensorboard=(
                None
                if self.tensorboard is None
                else checks.text(self, "tensorboard", self.tensorboard)
            ),
            cluster=checks.flag(self, "cluster", self.cluster),
            console=None if self.console is None else checks.flag(self, "console", self.console),
            default_timeout=(
                None
                if self.default_timeout is None
                else checks.seconds(self, "default_timeout", self.default_timeout)
            ),
            idle_timeout=checks.seconds(self, "idle_timeout", self.idle_timeout),
            orphan_timeout=checks.seconds(self, "orphan_timeout", self.orphan_timeout),
            retries=checks.whole(self, "retries", self.retries, at_least=0),
            fail_grace=(
                None
                if self.fail_grace is None
                else checks.seconds(self, "fail_grace", self.fail_grace)
            ),
            collective_timeout=checks.seconds(self, "collective_timeout", self.collective_timeout),
        )


@explained
@dataclass(frozen=True, slots=True, init=False)
class Volume:
    """Storage made visible on every node: `source` appears at the path `target`.

    `source` is a folder of this machine, a URL such as "s3://bucket/path" or "nfs://server/export",
    or, without `target`, a path of the nodes. What is copied to a node is written back when the
    pool ends, unless the volume is read-only.

    >>> Volume("/data").target
    '/data'
    """

    source: str
    target: str
    read_only: bool

    # Written out so that `target` may be left out and still reads as a `str` to a type checker.
    def __init__(self, source: str, target: str | None = None, read_only: bool = False) -> None:
        source = checks.text(self, "source", source)
        if target is None:
            if not source.startswith("/"):
                raise checks.refused(
                    self,
                    {"source": source},
                    "the source is not an absolute path, so it cannot be the target too; "
                    f"say where nodes see it: Volume({source!r}, target='/data')",
                )
            target = source
        target = checks.text(self, "target", target)
        if not target.startswith("/") or not target.strip("/") or ".." in target.split("/"):
            raise checks.refused(
                self,
                {"target": target},
                "nodes need an absolute path below '/' and without '..'; write one such as '/data'",
            )
        read_only = checks.flag(self, "read_only", read_only)
        checks.store(self, source=source, target=target, read_only=read_only)

    def __repr__(self) -> str:
        return checks.shown(self)


@dataclass(frozen=True, slots=True)
class Project:
    """The user's project: a folder whose files every node has in its working directory.

    Only what changed is sent: when a node starts, on `compute.sync()`, and with `before_calls`
    before every call. What git ignores, and the patterns in `excludes`, stay here.

    >>> sky.Compute(provider, project=sky.Project(".", excludes=["data"], before_calls=True))
    """

    path: str = "."
    excludes: Sequence[str] = ()
    before_calls: bool = False

    def __post_init__(self) -> None:
        checks.store(
            self,
            path=checks.text(self, "path", self.path),
            excludes=checks.texts(self, "excludes", self.excludes),
            before_calls=checks.flag(self, "before_calls", self.before_calls),
        )

    def __repr__(self) -> str:
        return checks.shown(self)


def _check_requirement(value: object, requirement: str) -> None:
    if requirement.startswith("-"):
        raise checks.refused(
            value,
            {"pip": [requirement]},
            "an option of pip, not a requirement; "
            "an index goes in pip_indexes=[PipIndex(...)], your own code in includes=[...]",
        )
    if _TWO_REQUIREMENTS.match(requirement):
        names = requirement.split()
        raise checks.refused(
            value, {"pip": [requirement]}, f"one requirement to an entry; write pip={names!r}"
        )


def _check_apt_package(value: object, package: str) -> None:
    # The names end up in a shell command on the node.
    if not _APT_PACKAGE.fullmatch(package):
        raise checks.refused(
            value,
            {"apt": [package]},
            "not the name of one package; write each as apt would list it, such as apt=['ffmpeg']",
        )


def _python_version(value: object, version: object) -> str:
    if version == "auto":
        return "auto"
    given = {"python": version}
    if isinstance(version, int | float):
        # Quoting what arrived would be wrong advice: 3.10 has already become 3.1.
        raise checks.refused(
            value, given, "a number loses its last zero; write it in quotes: python='3.11'"
        )
    match = _PYTHON_VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None:
        raise checks.refused(value, given, "not a version; write 'auto' or one such as '3.11'")
    if int(match[1]) < _OLDEST_MINOR:
        raise checks.refused(
            value, given, f"nodes need Python 3.{_OLDEST_MINOR} or newer; write 'auto' or '3.11'"
        )
    return match[0]


def _indexes(value: object, content: object) -> tuple[PipIndex, ...]:
    if isinstance(content, list | tuple):
        for i, item in enumerate(content):
            if not isinstance(item, PipIndex):
                raise checks.refused(
                    value,
                    {f"pip_indexes[{i}]": item},
                    f"each index must be a PipIndex, not {checks.kind(item)}; "
                    "write PipIndex(url, packages=[...])",
                )
        return tuple(content)
    raise checks.refused(
        value,
        {"pip_indexes": content},
        f"pip_indexes must be a list of PipIndex, not {checks.kind(content)}; "
        "write pip_indexes=[PipIndex(url, packages=[...])]",
    )


def _variables(value: object, content: object) -> Variables:
    # The messages name variables and never show what they hold: any of them may be a token.
    if not isinstance(content, Mapping):
        raise ConfigurationError(
            "Image(env=...): env must be a mapping of names to values, not "
            f"{checks.kind(content)}; write env={{'NAME': 'value'}}"
        )
    for name, text in content.items():
        if not isinstance(name, str) or not _VARIABLE_NAME.fullmatch(name):
            raise ConfigurationError(
                f"Image(env={{{name!r}: ...}}): not a variable's name; "
                "use letters, digits and underscores, and start with no digit"
            )
        if not isinstance(text, str):
            raise ConfigurationError(
                f"Image(env={{{name!r}: ...}}): the value must be a str, not {checks.kind(text)}; "
                "environment variables hold text, so write it in quotes"
            )
        if "\0" in text:
            raise ConfigurationError(
                f"Image(env={{{name!r}: ...}}): the value contains a NUL character, "
                "which no environment can hold; remove it"
            )
    return Variables(content)
