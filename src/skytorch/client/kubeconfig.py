"""Whether a Kubernetes cluster is configured: if not, computes run on this machine."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from skyward.errors import ConfigurationError

_lock = threading.Lock()
_said = False


def found() -> str | None:
    """The kubeconfig that applies, if there is one; an empty one, as /dev/null is, names nothing.

    >>> found() or "this machine"
    'this machine'
    """
    listed = os.environ.get("KUBECONFIG", "")
    if not listed:
        usual = Path.home() / ".kube" / "config"
        return str(usual) if usual.is_file() else None
    for name in filter(None, listed.split(os.pathsep)):
        path = Path(name).expanduser()
        if not path.exists():
            raise ConfigurationError(
                f"KUBECONFIG={listed!r}: there is no file {name!r}; correct it, or unset "
                "KUBECONFIG to run on this machine"
            )
        if path.is_file() and path.stat().st_size:
            return name
    return None


def require_none(client_config: object) -> None:
    """Refuse a compute that was meant for a cluster; otherwise say once that it runs here."""
    global _said
    if client_config is not None:
        raise ConfigurationError(
            "init(client_config=...) asks for a Kubernetes cluster, and the Kubernetes provider is "
            "not part of this version; to run on this machine, call init() without client_config"
        )
    config = found()
    if config is not None:
        here = (
            "unset KUBECONFIG"
            if os.environ.get("KUBECONFIG")
            else "set KUBECONFIG=/dev/null, which hides it"
        )
        raise ConfigurationError(
            f"the kubeconfig {config!r} asks for a Kubernetes cluster, and the Kubernetes provider "
            f"is not part of this version; to run on this machine, {here}"
        )
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
