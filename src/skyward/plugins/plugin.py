"""A plugin: a frozen value whose hooks prepare machines, processes and calls for a framework."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from skyward import checks
from skyward.accelerators import Accelerator
from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError, PluginError, SkywardError
from skyward.spec import Image, Nodes, Options, PipIndex, Worker

Transform = Callable[[Image, "Cluster"], Image]
Bootstrap = Callable[["Cluster"], Sequence[str]]
Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]
Around = Callable[[InstanceInfo], contextlib.AbstractContextManager[Any]]
AroundClient = Callable[[Any], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The arguments of `Compute` that a plugin may want to know."""

    nodes: Nodes
    accelerator: Accelerator | None
    worker: Worker
    options: Options


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster that a plugin prepares for."""

    name: str
    spec: ClusterSpec


@dataclass(frozen=True, slots=True)
class Plugin:
    """Hooks under a name; each may be absent.

    On the client: `transform(image, cluster)` returns the image to use. `bootstrap(cluster)`
    returns the shell commands that every node runs before its worker processes start.
    `around_client(compute)` is entered while the pool is open. On each node: `around_app(info)` is
    entered once, before the worker processes start; they inherit the environment that it sets. In
    each worker process: `around_process(info)` is entered once, before the first task, and left at
    shutdown; `decorate(function)` wraps every called function.

    With `distributed`, the workers form a group: they are prepared together, and again when one of
    them was replaced. The `around` hooks are context managers or generator functions that yield
    once.

    >>> timing = sky.Plugin.create("timing").with_decorate(timed)
    >>> sky.Compute(nodes=2, plugins=[timing])
    """

    name: str
    transform: Transform | None = None
    bootstrap: Bootstrap | None = None
    decorate: Decorate | None = None
    around_app: Around | None = None
    around_process: Around | None = None
    around_client: AroundClient | None = None
    distributed: bool = False
    needs: tuple[str, ...] = ()
    """Plugins that must come before this one."""

    def __post_init__(self) -> None:
        name = checks.text(self, "name", self.name)
        if not name.replace("-", "_").isidentifier():
            raise checks.refused(
                self, {"name": name}, "a plugin's name is one word, such as 'my-plugin'"
            )
        for hook in _HOOKS:
            given = getattr(self, hook)
            if given is not None and not callable(given):
                raise checks.refused(
                    self, {hook: given}, f"{hook} is a function, not {checks.kind(given)}"
                )
        checks.flag(self, "distributed", self.distributed)

    @classmethod
    def create(cls, name: str) -> Plugin:
        """A plugin without hooks; add hooks with the `with_` methods.

        >>> sky.Plugin.create("seeded").with_around_process(seeded)
        """
        return cls(name)

    def with_transform(self, transform: Transform) -> Plugin:
        """Change the image: `transform(image, cluster)` returns the new one."""
        return replace(self, transform=transform)

    with_image_transform = with_transform

    def with_bootstrap(self, *commands: str | Bootstrap) -> Plugin:
        """Run shell commands on every node before its workers; or a function that lists them.

        >>> sky.Plugin.create("cache").with_bootstrap("mkdir -p /var/tmp/cache")
        """
        if len(commands) == 1 and callable(commands[0]):
            return replace(self, bootstrap=commands[0])
        lines = checks.texts(self, "bootstrap", commands)
        return replace(self, bootstrap=functools.partial(_listed, lines))

    def with_decorate(self, decorate: Decorate) -> Plugin:
        """Wrap every function that is called: `decorate(function)` returns the wrapped one."""
        return replace(self, decorate=decorate)

    with_decorator = with_decorate

    def with_around_app(self, around: Around) -> Plugin:
        """Enter `around(info)` once on each node."""
        return replace(self, around_app=around)

    def with_around_process(self, around: Around) -> Plugin:
        """Enter `around(info)` once in each worker process, before its first task."""
        return replace(self, around_process=around)

    def with_around_client(self, around: AroundClient) -> Plugin:
        """Enter `around(compute)` on the client while the pool is open."""
        if _takes_two(around):
            raise ConfigurationError(
                f"with_around_client({around!r}): it takes two arguments, and gets one, the "
                "compute, which knows its nodes; write `def around(compute):`"
            )
        return replace(self, around_client=around)

    def with_launcher(self, launcher: object) -> Plugin:
        """Refused: workers are processes of the node's agent, and no launcher starts them."""
        raise ConfigurationError(
            f"with_launcher({launcher!r}): no command starts a worker here, so there is none to "
            "wrap; set up each worker with with_around_process(around), or each node with "
            "with_around_app(around)"
        )

    def with_distributed(self) -> Plugin:
        """Prepare all workers together, and again when one was replaced."""
        return replace(self, distributed=True)

    def __repr__(self) -> str:
        # Hooks hold the plugin's arguments, and one of them may be a token.
        hooks = [hook for hook in _HOOKS if getattr(self, hook) is not None]
        return f"<sky plugin {self.name!r}: {', '.join(hooks) or 'no hooks'}>"


_HOOKS = ("transform", "bootstrap", "decorate", "around_app", "around_process", "around_client")


def _takes_two(around: Callable[..., Any]) -> bool:
    """Whether a function cannot be called with one argument alone."""
    try:
        signature = inspect.signature(around)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(None)
    except TypeError:
        return True
    return False


def _listed(lines: tuple[str, ...], _: Cluster) -> Sequence[str]:
    return lines


def entered(
    around: Callable[[Any], Any], subject: InstanceInfo | Any
) -> contextlib.AbstractContextManager[Any]:
    """The context manager of an `around` hook, which may be a generator function."""
    if inspect.isgeneratorfunction(around):
        around = contextlib.contextmanager(around)
    made = around(subject)
    if isinstance(made, Iterator):
        # A partial or a callable object around a generator function.
        return contextlib.contextmanager(lambda: made)()
    if not isinstance(made, contextlib.AbstractContextManager):
        raise TypeError(
            f"it returned {checks.kind(made)}, not a context manager; yield once, or return one"
        )
    return made


def composed(plugins: object) -> tuple[Plugin, ...]:
    """The plugins of a `Compute`, checked: each a `Plugin`, none twice."""
    if not isinstance(plugins, (list, tuple)):
        raise ConfigurationError(
            f"Compute(plugins={plugins!r}): give a list, such as plugins=[sky.plugins.torch()]"
        )
    seen: set[str] = set()
    for plugin in plugins:
        if not isinstance(plugin, Plugin):
            hint = "; call it" if callable(plugin) else ""
            raise ConfigurationError(
                f"Compute(plugins=[{plugin!r}]): expected a plugin such as sky.plugins.torch()"
                + hint
            )
        if plugin.name in seen:
            raise ConfigurationError(
                f"Compute(plugins=[...]): {plugin.name!r} is there twice; give each plugin once"
            )
        for name in plugin.needs:
            if name not in seen:
                raise ConfigurationError(
                    f"Compute(plugins=[{plugin!r}]): as it is set up, it needs {name!r} before it; "
                    f"write plugins=[sky.plugins.{name}(), sky.plugins.{plugin.name}(...)]"
                )
        seen.add(plugin.name)
    return tuple(plugins)


def check_distributed(plugins: tuple[Plugin, ...], worker: Worker, options: Options) -> None:
    """Refuse workers and options with which the workers cannot form a group."""
    names = [plugin.name for plugin in plugins if plugin.distributed]
    if not names:
        return
    if not options.cluster:
        raise ConfigurationError(
            f"Options(cluster=False): the workers have no network between them, and the plugin "
            f"{names[0]!r} needs one; drop cluster=False or the plugin"
        )
    if len(names) > 1:
        raise ConfigurationError(
            f"Compute(plugins=[...]): {' and '.join(map(repr, names))} both make the workers a "
            "group, and a pool has one port for them to meet at; give each a pool of its own"
        )
    if worker.executor == "process" and worker.concurrency > 1:
        raise ConfigurationError(
            f"Worker(concurrency={worker.concurrency}): the plugin {names[0]!r} makes each worker "
            f"process a member of a group, and these would share one rank; write "
            f"Worker(per_node={worker.concurrency}) for more members, or executor='thread'"
        )


def transformed(image: Image, plugins: tuple[Plugin, ...], cluster: Cluster) -> Image:
    """The image after every plugin's transform, in order."""
    for plugin in plugins:
        if plugin.transform is None:
            continue
        try:
            changed = plugin.transform(image, cluster)
        except SkywardError:
            raise
        except Exception as problem:
            raise PluginError(
                f"plugin {plugin.name!r}: its transform failed: {type(problem).__name__}: {problem}"
            ) from problem
        if not isinstance(changed, Image):
            raise ConfigurationError(
                f"the plugin {plugin.name!r} turned the image into {checks.kind(changed)}; its "
                "transform must return an Image"
            )
        image = changed
    return image


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


def extended(image: Image, pip: Sequence[str], index: PipIndex | None = None) -> Image:
    """The image with packages and an index appended to what it has."""
    indexes = [*image.pip_indexes] + ([index] if index is not None else [])
    return replace(image, pip=[*image.pip, *pip], pip_indexes=indexes)


def installing(packages: Sequence[str]) -> Transform:
    """A transform that adds packages to an image."""
    return functools.partial(_with_packages, packages)


def _with_packages(packages: Sequence[str], image: Image, cluster: Cluster) -> Image:
    return extended(image, packages)


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
