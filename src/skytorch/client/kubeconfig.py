"""Which Kubernetes cluster computes run on: if none is configured, they run on this machine."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from skytorch.client import client_config as configuration
from skyward.errors import ConfigurationError
from skyward.providers.kubernetes import access

_lock = threading.Lock()
_said = False


def place(client_config: object, namespace: str | None) -> access.Place | None:
    """The cluster and the namespace that computes are in; None for no cluster."""
    named = chosen(client_config)
    if named is None:
        return None
    try:
        return access.resolve(named, None, namespace)
    except ConfigurationError as problem:
        raise ConfigurationError(
            f"{problem}; KUBECONFIG=/dev/null runs computes on this machine"
        ) from problem


def chosen(client_config: object) -> str | None:
    """The kubeconfig of the cluster, or the name of a pod's own credentials; None for no cluster.

    What `init` was given comes first, then what `kubectl` would use, then the credentials of the
    pod that this process runs in.
    """
    if client_config is not None:
        return configuration.path_of(client_config)
    if found() is not None:
        return os.environ.get("KUBECONFIG") or str(_usual())
    if not os.environ.get("KUBECONFIG") and access.is_in_cluster():
        return access.IN_CLUSTER
    return None


def found() -> str | None:
    """The kubeconfig that applies, if there is one; an empty one, as /dev/null is, names nothing.

    >>> found() or "this machine"
    'this machine'
    """
    listed = os.environ.get("KUBECONFIG", "")
    if not listed:
        return str(_usual()) if _is_filled(_usual()) else None
    for name in filter(None, listed.split(os.pathsep)):
        path = Path(name).expanduser()
        if not path.exists():
            raise ConfigurationError(
                f"KUBECONFIG={listed!r}: there is no file {name!r}; correct it, or unset "
                "KUBECONFIG to run on this machine"
            )
        if _is_filled(path):
            return name
    return None


def _usual() -> Path:
    return Path.home() / ".kube" / "config"


def _is_filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def say_here() -> None:
    """Say once that computes run on this machine."""
    global _said
    with _lock:
        if _said:
            return
        _said = True
    print(
        "skytorch: no kubeconfig, so computes are processes on this machine; image, command, args, "
        "labels and annotations have no effect here",
        file=sys.stderr,
        flush=True,
    )
