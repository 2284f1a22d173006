"""Skyward: PyTorch on someone else's hardware, without changing how you write PyTorch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyward import accelerators as accelerators
    from skyward import errors as errors
    from skyward import events as events
    from skyward import plugins as plugins
    from skyward.classes import cls as cls
    from skyward.compute import Compute as Compute
    from skyward.compute import attach as attach
    from skyward.compute.arguments import Spec as Spec
    from skyward.compute.offers import offers as offers
    from skyward.compute.post_mortem import post_mortem as post_mortem
    from skyward.context import InstanceInfo as InstanceInfo
    from skyward.context import Output as Output
    from skyward.context import instance_info as instance_info
    from skyward.context import is_head as is_head
    from skyward.context import redirect_output as redirect_output
    from skyward.context import silent as silent
    from skyward.context import stderr as stderr
    from skyward.context import stdout as stdout
    from skyward.device.core import device_stats as device_stats
    from skyward.device.loader import loader as loader
    from skyward.device.profile import profile as profile
    from skyward.device.replay import replay as replay
    from skyward.errors import BroadcastError as BroadcastError
    from skyward.errors import NodeLostError as NodeLostError
    from skyward.errors import RemoteError as RemoteError
    from skyward.errors import SkywardError as SkywardError
    from skyward.errors import TaskTimeoutError as TaskTimeoutError
    from skyward.errors import WorkerDiedError as WorkerDiedError
    from skyward.functions import Function as Function
    from skyward.functions import Future as Future
    from skyward.functions import Group as Group
    from skyward.functions import Group as PendingFunctionGroup  # noqa: F401
    from skyward.functions import Pending as Pending
    from skyward.functions import Pending as PendingFunction  # noqa: F401
    from skyward.functions import function as function
    from skyward.functions import gather as gather
    from skyward.functions import log as log
    from skyward.functions import remote as remote
    from skyward.nodes.node import NodeView as NodeView
    from skyward.objects.handles import Handle as Handle
    from skyward.objects.handles import put as put
    from skyward.plugins.plugin import Plugin as Plugin
    from skyward.providers import Offer as Offer
    from skyward.providers.aws import AWS as AWS
    from skyward.providers.container import Container as Container
    from skyward.providers.kubernetes import Kubernetes as Kubernetes
    from skyward.providers.local import Local as Local
    from skyward.providers.ray import Ray as Ray
    from skyward.providers.slurm import Slurm as Slurm
    from skyward.providers.ssh import SSH as SSH
    from skyward.shards import shard as shard
    from skyward.spec import Image as Image
    from skyward.spec import Nodes as Nodes
    from skyward.spec import Options as Options
    from skyward.spec import PipIndex as PipIndex
    from skyward.spec import Project as Project
    from skyward.spec import Volume as Volume
    from skyward.spec import Worker as Worker
    from skyward.state import barrier as barrier
    from skyward.state import counter as counter
    from skyward.state import dict as dict
    from skyward.state import event as event
    from skyward.state import lock as lock
    from skyward.state import queue as queue
    from skyward.state import set as set
    from skyward.store.checkpoints import checkpoint as checkpoint
    from skyward.store.checkpoints import restore as restore
    from skyward.store.models import ModelStore as ModelStore
    from skyward.store.models import ModelVersion as ModelVersion

__version__ = "0.1.0"

_HOMES = {
    "classes": ("cls",),
    "compute": ("Compute", "attach"),
    "compute.arguments": ("Spec",),
    "compute.post_mortem": ("post_mortem",),
    "compute.offers": ("offers",),
    "context": (
        "InstanceInfo",
        "Output",
        "instance_info",
        "is_head",
        "redirect_output",
        "silent",
        "stderr",
        "stdout",
    ),
    "device.core": ("device_stats",),
    "device.loader": ("loader",),
    "device.profile": ("profile",),
    "device.replay": ("replay",),
    "errors": (
        "BroadcastError",
        "NodeLostError",
        "RemoteError",
        "SkywardError",
        "TaskTimeoutError",
        "WorkerDiedError",
    ),
    "functions": (
        "Function",
        "Future",
        "Group",
        "Pending",
        "function",
        "gather",
        "log",
        "remote",
    ),
    "providers": ("Offer",),
    "nodes.node": ("NodeView",),
    "objects.handles": ("Handle", "put"),
    "plugins.plugin": ("Plugin",),
    "providers.aws": ("AWS",),
    "providers.container": ("Container",),
    "providers.local": ("Local",),
    "providers.kubernetes": ("Kubernetes",),
    "providers.slurm": ("Slurm",),
    "providers.ray": ("Ray",),
    "providers.ssh": ("SSH",),
    "shards": ("shard",),
    "state": ("barrier", "counter", "dict", "event", "lock", "queue", "set"),
    "spec": ("Image", "Nodes", "Options", "PipIndex", "Project", "Volume", "Worker"),
    "store.checkpoints": ("checkpoint", "restore"),
    "store.models": ("ModelStore", "ModelVersion"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_MODULES = ("accelerators", "errors", "events", "plugins")

__all__ = sorted([*_HOME_OF, *_MODULES])

_ALIASES = {"PendingFunction": "Pending", "PendingFunctionGroup": "Group"}
"""Names of the other Skyward for things that are here under a name of their own."""

_MOVED = {
    "DeviceStats": "device.core",
    "Gather": "functions",
    "InstanceGroup": "groups",
    "Outcome": "errors",
    "Peer": "context",
    "RemoteClass": "classes",
    "Results": "calls.flow",
    "Stacks": "nodes.stacks",
    "Stats": "compute",
    "Synced": "files.transfer",
}
"""Names that were here, and the modules that have them; all errors but the common ones, too."""

_EXTENSION = {"load_ipython_extension", "unload_ipython_extension"}
"""What IPython looks for at `%load_ext skyward`; not for users."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"skyward.{name}")
    if name == "sky":
        # `from skyward import sky` gives a target for calls, and so does the module.
        return sys.modules[__name__]
    name = _ALIASES.get(name, name)
    home = "notebook.magics" if name in _EXTENSION else _HOME_OF.get(name)
    if home is None:
        return _former(name)
    value = getattr(importlib.import_module(f"skyward.{home}"), name)
    globals()[name] = value
    return value


def _former(name: str) -> Any:
    """What has left this screen, with a warning; or the error that says what to write instead."""
    home = _MOVED.get(name, "errors" if name.endswith("Error") else None)
    value = home and getattr(importlib.import_module(f"skyward.{home}"), name, None)
    if value is not None:
        warnings = importlib.import_module("warnings")
        written = f"sky.errors.{name}" if home == "errors" else f"skyward.{home}.{name}"
        warnings.warn(
            f"sky.{name} is {written} now; the short name goes with the next release",
            DeprecationWarning,
            stacklevel=3,
        )
        return value
    former = importlib.import_module("skyward.former")
    problem: AttributeError = former.missing("module 'skyward'", name, former.NAMES)
    if name in former.NAMES:
        opname = importlib.import_module("opcode").opname
        caller = sys._getframe(2)
        if opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
            # Of an AttributeError, `from skyward import App` would show nothing.
            raise ImportError(str(problem), name=name)
    raise problem


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
