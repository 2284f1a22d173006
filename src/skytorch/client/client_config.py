"""The cluster that `init(client_config=...)` names, as the path of a kubeconfig.

A configuration in memory is written to a private file of the user's state directory, named by its
contents: `sky ps` and `sky down` use it when this process is gone.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyward.errors import ConfigurationError
from skyward.nodes.records import Journal

_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


def path_of(given: object) -> str:
    """The path of a kubeconfig for a path, a kubeconfig as a mapping, or a `Configuration`."""
    if isinstance(given, str | os.PathLike):
        if len(str(given)) > 4096 or "\n" in str(given):
            raise ConfigurationError(
                "init(client_config=...): this is not the path of a kubeconfig but perhaps what is "
                "in one; give its path"
            )
        path = Path(given).expanduser()
        if not path.is_file():
            raise ConfigurationError(
                f"init(client_config={str(given)!r}): there is no such file; give the path of a "
                "kubeconfig"
            )
        return str(path)
    if isinstance(given, Mapping):
        return _written(_absolute(given))
    if hasattr(given, "host") and hasattr(given, "auth_settings"):
        return _written(_kubeconfig(given))
    raise ConfigurationError(
        f"init(client_config={type(given).__name__}): give a kubernetes.client.Configuration, the "
        "path of a kubeconfig, or a kubeconfig as a mapping; to run on this machine, leave it out"
    )


def _kubeconfig(configuration: Any) -> dict[str, Any]:
    """A kubeconfig with what a `kubernetes.client.Configuration` has.

    Files are read now: those that the official client makes of a kubeconfig end with the process.
    """
    cluster = {
        "server": configuration.host,
        "certificate-authority-data": _contents(configuration.ssl_ca_cert),
        "insecure-skip-tls-verify": not configuration.verify_ssl,
        "tls-server-name": configuration.tls_server_name,
        "proxy-url": configuration.proxy,
    }
    bearer = configuration.auth_settings().get("BearerToken", {}).get("value") or ""
    user = {
        "token": bearer.partition(" ")[2] or bearer,
        "client-certificate-data": _contents(configuration.cert_file),
        "client-key-data": _contents(configuration.key_file),
    }
    name = "client-config"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": _without_empty(cluster)}],
        "users": [{"name": name, "user": _without_empty(user)}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
    }


def _contents(file: str | None) -> str:
    return base64.b64encode(Path(file).read_bytes()).decode() if file else ""


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _absolute(value: Any) -> Any:
    """A kubeconfig whose files are found from any folder."""
    if isinstance(value, Mapping):
        return {
            key: str(Path(item).expanduser().absolute()) if key in _FILES else _absolute(item)
            for key, item in value.items()
        }
    return [_absolute(item) for item in value] if isinstance(value, list) else value


def _written(kubeconfig: Mapping[str, Any]) -> str:
    # JSON is YAML as well.
    text = json.dumps(dict(kubeconfig), default=str, sort_keys=True)
    folder = Journal().path.parent
    path = folder / f"kubeconfig-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Made with mode 0600, and whole when it gets its name.
        descriptor, part = tempfile.mkstemp(dir=folder)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(part, path)
        atexit.register(_discard, path)
    return str(path)


def _discard(path: Path) -> None:
    """Remove the file at the end of this process, unless a pool is left that it leads to."""
    pools = Journal().pools()
    if not any(pool.arguments.get("kubeconfig") == str(path) for pool in pools):
        path.unlink(missing_ok=True)
