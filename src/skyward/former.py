"""Names of the other Skyward, gabfssilva/skyward, and what a program writes here in their place."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from skyward.errors import ConfigurationError

Made = TypeVar("Made", bound=type)

GUIDE = "docs/coming-from-skyward.md has the whole table"

_CLOUD = (
    "there is no provider for it: use sky.SSH([...]) with machines that you rented there, "
    "another provider (AWS, Kubernetes, Slurm, Ray, Container), or write one (docs/providers.md)"
)
_EVENT = "sky.events has classes of its own: Compute(..., on_event=...) gets each event"
_BUCKET = "open it with fsspec, or show it to nodes: sky.Volume('s3://bucket/prefix', '/data')"
_TYPE = "there is no such type: write the argument itself"

NAMES = {
    **dict.fromkeys(
        [
            "GCP",
            "Hyperstack",
            "JarvisLabs",
            "LambdaCloud",
            "MassedCompute",
            "Novita",
            "RunPod",
            "Scaleway",
            "TensorDock",
            "VastAI",
            "Verda",
            "Vultr",
        ],
        _CLOUD,
    ),
    **dict.fromkeys(
        [
            "ClusterDestroyed",
            "ClusterProvisioned",
            "ClusterReady",
            "ClusterRequested",
            "Error",
            "Event",
            "Fact",
            "InstanceBootstrapped",
            "InstanceDestroyed",
            "InstancePreempted",
            "InstanceProvisioned",
            "InstanceReplaced",
            "InstanceRequested",
            "Log",
            "Metric",
            "Request",
            "ShutdownCompleted",
            "ShutdownRequested",
            "TaskCompleted",
            "TaskStarted",
        ],
        _EVENT,
    ),
    **dict.fromkeys(
        [
            "AllocationStrategy",
            "ClusterId",
            "Consistency",
            "InstanceId",
            "NodeId",
            "NodeSpec",
            "ProviderName",
            "RequestId",
            "SelectionStrategy",
            "SpecKwargs",
            "WorkerExecutor",
        ],
        _TYPE,
    ),
    "App": (
        "no block is needed around pools: leave `with sky.App():` out; what it said of the console "
        "is sky.Compute(options=sky.Options(console=False))"
    ),
    "CallbackWriter": "write `with sky.redirect_output(callback):`, or print(...) to a file object",
    "Client": "there is no server: sky.attach(name) reaches a kept pool",
    "Cluster": "compute.nodes lists the nodes as they are now; a plugin's hooks get the cluster",
    "ComputePool": "it is called sky.Compute",
    "DEFAULT_IMAGE": "write sky.Image(), or leave image= out",
    "DockerImage": "give the image's name: sky.Container('pytorch/pytorch:latest')",
    "HealthChecker": (
        "leave health_checker= out: a node that does not answer is replaced without it; to judge "
        "nodes by a function of yours, call it on each: `healthy() @ compute`"
    ),
    "Instance": "compute.nodes lists sky.NodeView values: state, address, running tasks",
    "InstanceType": "sky.offers(...) lists sky.Offer values, each with its machine and its price",
    "LogConfig": "write Options(log=...) for lines of JSON; console=False silences the progress",
    "NoOffersError": "catch sky.errors.UnavailableError",
    "NodeInstance": "compute.nodes lists sky.NodeView values: state, address, running tasks",
    "OfferRepository": "sky.offers('A100', max_hourly_cost=2) returns a list, the cheapest first",
    "Pool": "it is called sky.Compute",
    "PoolSpec": "give the arguments to sky.Compute, or several sky.Spec to sky.Compute.any",
    "ProviderConfig": "a provider is a value such as sky.SSH([...]), typed by its own class",
    "ProvisioningError": "catch sky.errors.PoolStartError",
    "Session": (
        "no session is needed: write `with sky.Compute(...) as pool:` in place of "
        "session.compute(...); several may be open at once"
    ),
    "Storage": _BUCKET,
    "containers": "give the image's name: sky.Container('pytorch/pytorch:latest')",
    "main": (
        "no decorator is needed: leave @sky.main out, call the function at the script's end, and "
        "run it with `sky run SCRIPT`, or with a `with sky.Compute(...)` block in it"
    ),
    "metrics": "compute.usage(node) returns processors, memory and GPUs as they are now",
    "storage": _BUCKET,
    "time": "times are in seconds: write timeout=10 * 60 for ten minutes",
}
"""Names that are not here, and what to write in their place."""

PLUGINS = {
    "AccelerateConfig": "give a plain dict: sky.plugins.accelerate(config={'fsdp': {...}})",
    "DeepSpeedConfig": "give a plain dict: sky.plugins.accelerate(config={'deepspeed': {...}})",
    "FsdpConfig": "give a plain dict: sky.plugins.accelerate(config={'fsdp': {...}})",
    "LaunchCommand": "no launcher starts the workers; set up each with with_around_process",
    "LaunchContext": "no launcher starts the workers; set up each with with_around_process",
    "Plugin": "it is sky.Plugin",
    "around_app": "write sky.Plugin.create(name).with_around_app(around)",
    "around_client": "write sky.Plugin.create(name).with_around_client(around)",
    "around_process": "write sky.Plugin.create(name).with_around_process(around)",
    "cuml": "install it with Image(pip=['cuml-cu12']) and call cuml.accel.install() in a plugin",
}
"""Names of `sky.plugins` that are not here."""

_TIMES = "there is no such limit: starting goes on while the provider works, and says what it does"
_AUTOSCALING = "the pool grows and shrinks by itself between the bounds of nodes=(min, max)"

ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "Compute": {
        "selection": "write sky.Compute.any([sky.Spec(...), ...], choose='cheapest')",
        "architecture": "the machine decides; choose one with the provider's own arguments",
        "concurrency": "write worker=sky.Worker(concurrency=...)",
        "*": "write sky.Compute.any([sky.Spec(...), ...], choose='cheapest')",
    },
    "Spec": {
        "architecture": "the machine decides; choose one with the provider's own arguments",
        "image": "all specs share one: write sky.Compute.any(specs, image=...)",
        "nodes": "all specs share the number: write sky.Compute.any(specs, nodes=...)",
        "plugins": "all specs share them: write sky.Compute.any(specs, plugins=[...])",
        "ttl": "all specs share it: write sky.Compute.any(specs, ttl=...)",
        "volumes": "all specs share them: write sky.Compute.any(specs, volumes=[...])",
    },
    "Image": {
        "bootstrap_timeout": _TIMES,
        "metrics": "compute.usage(node) returns processors, memory and GPUs without a command",
        "shell_vars": (
            "compute the value here and write env={...}, or set it on the node in a plugin's "
            "with_around_app"
        ),
        "skyward_source": "nodes always get the Skyward that the client runs",
    },
    "Worker": {
        "buffer": "calls are sent ahead without it",
        "reuse_processes": "a worker process runs many calls; sky.Compute makes fresh ones",
    },
    "Options": {
        "autoscale_cooldown": _AUTOSCALING,
        "autoscale_idle_timeout": "it is called idle_timeout",
        "bootstrap_timeout": _TIMES,
        "default_compute_timeout": "it is called default_timeout; the default is none",
        "health_checker": "every node is watched without it",
        "logging": "write log=... for lines of JSON; console=False silences the progress",
        "max_provision_attempts": "retrying is the provider's affair; nothing to set",
        "provision_retry_delay": "retrying is the provider's affair; nothing to set",
        "provision_timeout": _TIMES,
        "reconcile_tick_interval": _AUTOSCALING,
        "retry_on_interruption": "it is called retries; 0 is the default",
        "selection": "write sky.Compute.any([sky.Spec(...), ...], choose='cheapest')",
        "shutdown_timeout": "closing takes at most seconds, and removes everything",
        "ssh_retry_interval": "write it where it belongs: sky.SSH(...)",
        "ssh_timeout": "write it where it belongs: sky.SSH(...)",
        "worker": "write it beside the options: sky.Compute(worker=sky.Worker(...))",
    },
    "Volume": {
        "bucket": "write the bucket as a URL: sky.Volume('s3://bucket/prefix', '/data')",
        "mount": "it is called target: sky.Volume('s3://bucket/prefix', target='/data')",
        "prefix": "write it into the URL: sky.Volume('s3://bucket/prefix', '/data')",
        "storage": "write the place as a URL; credentials are those of this machine or the node",
    },
}
"""Arguments that a class does not take here, and what to write in their place."""

SHARED = dict.fromkeys(
    [
        "acquire_async",
        "add_async",
        "contains_async",
        "decrement_async",
        "discard_async",
        "get_async",
        "increment_async",
        "pop_async",
        "put_async",
        "release_async",
        "reset_async",
        "set_async",
        "update_async",
        "value_async",
        "wait_async",
    ],
    "write `await asyncio.to_thread(...)` with the method without _async",
)
"""Attributes of shared objects, such as `sky.counter(name)`, that these do not have."""

METHODS = {
    "barrier": "write sky.barrier(name, ...)",
    "concurrency": "it is the argument worker=sky.Worker(concurrency=...)",
    "counter": "write sky.counter(name)",
    "dict": "write sky.dict(name)",
    "is_active": "write `bool(compute.nodes)` inside the block; outside, no pool is open",
    "lock": "write sky.lock(name)",
    "queue": "write sky.queue(name)",
    "run_async": "write compute.submit(f(x)), or f(x) > compute",
    "run_parallel": "write compute.run_all([f(1), f(2)]), or (f(1) & f(2)) >> compute",
    "set": "write sky.set(name)",
    "snapshot": "write compute.nodes and compute.stats()",
}
"""Attributes of a pool that a `Compute` does not have."""


def missing(where: str, name: str, ways: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that is not there, with the way to write it if one is known."""
    way = ways.get(name)
    told = f"; {way} ({GUIDE})" if way else ""
    return AttributeError(f"{where} has no attribute {name!r}{told}", name=name)


def explained(kind: Made) -> Made:
    """Have a class say what to write in place of arguments that it does not take.

    >>> @explained
    ... class Options: ...
    """
    ways = ARGUMENTS[kind.__name__]
    made: Any = kind.__init__  # type: ignore[misc]
    taken = inspect.signature(made).parameters
    positional = [each for each in taken.values() if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if len(args) >= len(positional) and "*" in ways:
            listed = ", ".join(map(repr, args))
            raise ConfigurationError(f"{kind.__name__}({listed}): {ways['*']} ({GUIDE})")
        if not kwargs.keys() <= taken.keys():
            for name, value in kwargs.items():
                if name in ways and name not in taken:
                    raise ConfigurationError(
                        f"{kind.__name__}({name}={value!r}): {ways[name]} ({GUIDE})"
                    )
            unknown = next(name for name in kwargs if name not in taken)
            known = [name for name in taken if name != "self"]
            near = difflib.get_close_matches(unknown, known, n=1)
            raise TypeError(
                f"{kind.__name__}() got an unexpected keyword argument {unknown!r}; "
                + (f"did you mean {near[0]!r}? " if near else "")
                + f"it takes {', '.join(known)}"
            )
        made(self, *args, **kwargs)

    kind.__init__ = __init__  # type: ignore[misc]
    return kind
