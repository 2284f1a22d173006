"""Access to a cluster's API server: credentials, requests, watches, and errors in words.

The official client reads the kubeconfig (exec plugins, client certificates, OIDC, proxies) or the
pod's own credentials, and keeps the connections. Requests carry plain JSON: its classes for every
kind of object know only the fields of one version.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from skyward.errors import ConfigurationError, PoolStartError, UnreachableError
from skyward.providers import file_here
from skyward.providers.kubernetes import streams
from skyward.providers.kubernetes.manifests import CONTAINER

IN_CLUSTER = "in-cluster"
"""The name of a pod's own credentials, in place of the path of a kubeconfig."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 3.0
"""How long a connection may take; there are two attempts, and a lost packet is sent after 1 s."""
WATCH_SECONDS = 240
LOG_LINES = 50
_MERGE = "application/merge-patch+json"
_MISSING = (
    "Kubernetes(): the kubernetes package is missing; pip install 'skyward-torch[kubernetes]'"
)
_BUSY = (429, 500, 502, 503, 504)
"""Answers of an API server, or of what stands before it, that the next attempt may not get."""

Object = dict[str, Any]


class ApiError(PoolStartError):
    """The API server refused a request."""

    def __init__(self, status: int, reason: str, message: str, doing: str) -> None:
        super().__init__(f"{doing}: {message}{_advice(status, message)}")
        self.status, self.reason, self.message = status, reason, message


def _advice(status: int, message: str) -> str:
    if status == 401:
        return (
            "; the API server does not accept these credentials: log in again, and try `kubectl "
            "get pods`"
        )
    if status == 403 and "exceeded quota" in message:
        return "; ask for less, or wait until others need less, or have the quota raised"
    if status == 403:
        return "; docs/kubernetes.md has the Role that a pool needs"
    if status == 404 and message.startswith("namespaces "):
        return "; make the namespace, or name another with namespace="
    if status == 422:
        return "; correct pod_template=, or what the message names"
    return ""


@dataclass(frozen=True, slots=True)
class Place:
    """Which cluster and namespace; resolved when the provider is made, and never again."""

    kubeconfig: str
    """The paths of kubeconfig files, or `IN_CLUSTER`."""
    context: str | None
    namespace: str


def resolve(kubeconfig: str | None, context: str | None, namespace: str | None) -> Place:
    """The place that arguments, environment and kubeconfig name, in this order."""
    paths = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    is_named = kubeconfig is not None or context is not None
    if kubeconfig == IN_CLUSTER or (not is_named and is_in_cluster() and not _read(paths)):
        own = _NAMESPACE.read_text().strip() if _NAMESPACE.exists() else "default"
        return Place(IN_CLUSTER, None, namespace or own)
    documents = _read(paths)
    contexts = {
        str(each["name"]): each.get("context") or {}
        for document in documents
        for each in document.get("contexts") or ()
    }
    current = next((d["current-context"] for d in documents if d.get("current-context")), None)
    chosen = context or current
    if chosen not in contexts:
        raise ConfigurationError(_no_context(paths, context, chosen, sorted(contexts)))
    absolute = os.pathsep.join(
        str(Path(each).expanduser().resolve()) for each in paths.split(os.pathsep) if each
    )
    return Place(absolute, chosen, namespace or contexts[chosen].get("namespace") or "default")


def place_here(kubeconfig: str, context: str | None, home: str) -> dict[str, str | None]:
    """The kubeconfig and the context of another machine, as this machine has them.

    A kubeconfig that is not here, or does not have the context, is left to `resolve`. In a pod
    without a kubeconfig of its own, the pod's credentials count.
    """
    if kubeconfig == IN_CLUSTER:
        return {"kubeconfig": IN_CLUSTER if is_in_cluster() else None, "context": None}
    there = [file_here(each, home) for each in kubeconfig.split(os.pathsep)]
    for paths in (os.pathsep.join(filter(None, there)) or None, None):
        with contextlib.suppress(ConfigurationError):
            resolve(paths, context, None)
            return {"kubeconfig": paths, "context": context}
    if is_in_cluster():
        return {"kubeconfig": IN_CLUSTER, "context": None}
    return {"kubeconfig": None, "context": context}


def _no_context(paths: str, asked: str | None, chosen: str | None, there: list[str]) -> str:
    if asked is not None and not there:
        return f"Kubernetes(context={asked!r}): {paths} does not exist, or names no cluster"
    if asked is not None:
        names = ", ".join(there) or "none"
        return f"Kubernetes(context={asked!r}): {paths} has no such context; it has {names}"
    if there:
        return (
            f"Kubernetes(): {paths} has no current context; name one of {', '.join(there)} with "
            "context=, or choose it with `kubectl config use-context`"
        )
    return (
        f"Kubernetes(): there is no cluster to talk to: {paths} does not exist or names none, and "
        "this is no pod; set KUBECONFIG, or log in with your cloud's command line"
    )


def _on_behalf(place: Place) -> list[tuple[str, str]]:
    """The headers for a user of the kubeconfig that acts for another, which the client ignores."""
    if place.kubeconfig == IN_CLUSTER:
        return []
    documents = _read(place.kubeconfig)
    named = {
        (kind, each["name"]): each.get(kind[:-1]) or {}
        for kind in ("contexts", "users")
        for document in documents
        for each in document.get(kind) or ()
    }
    user = named.get(("users", named.get(("contexts", place.context), {}).get("user")), {})
    headers = [("Impersonate-User", user["as"])] if user.get("as") else []
    headers += [("Impersonate-Group", group) for group in user.get("as-groups") or ()]
    return headers


def is_in_cluster() -> bool:
    """Whether this process runs in a pod that has credentials of its own."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and _NAMESPACE.exists()


def _read(paths: str) -> list[Object]:
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(_MISSING) from None
    found = []
    for each in paths.split(os.pathsep):
        path = Path(each).expanduser()
        if each and path.is_file():
            try:
                document = yaml.safe_load(path.read_text())
            except (OSError, yaml.YAMLError) as problem:
                raise ConfigurationError(f"the kubeconfig {path}: {problem}") from problem
            if isinstance(document, dict):
                found.append(document)
    return found


class Access:
    """One API server; any thread may use it."""

    def __init__(self, place: Place) -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise ConfigurationError(_MISSING) from None
        self.place = place
        self._configuration: Any = client.Configuration()
        try:
            if place.kubeconfig == IN_CLUSTER:
                config.load_incluster_config(client_configuration=self._configuration)
            else:
                config.load_kube_config(
                    place.kubeconfig,
                    place.context,
                    client_configuration=self._configuration,
                    persist_config=False,
                )
        except Exception as problem:
            raise ConfigurationError(
                f"Kubernetes(context={place.context!r}): no credentials: {problem}; try `kubectl "
                f"--context {place.context} get pods`"
            ) from problem
        self._on_behalf = _on_behalf(place)
        self._client: Any = client.ApiClient(self._configuration)
        self._pools: Any = self._client.rest_client.pool_manager
        self._lock = threading.Lock()
        self._forwarder = streams.Forwarder()
        self._watching: Any = None
        self._stopped = False
        self._ahead = 0.0
        """By how many seconds the API server's clock is ahead of this one's."""
        self.requests = 0
        """How many requests were made, for tests and the benchmark."""

    @property
    def server(self) -> str:
        """The address of the API server."""
        return str(self._configuration.host).rstrip("/")

    @property
    def token(self) -> str:
        """The bearer token, refreshed if it has expired; empty if certificates are used."""
        with self._lock:
            found = self._configuration.auth_settings().get("BearerToken") or {}
        return str(found.get("value") or "").partition(" ")[2]

    def identity(self) -> list[tuple[str, str]]:
        """The headers that say who asks, and on whose behalf."""
        token = self.token
        return ([("Authorization", f"Bearer {token}")] if token else []) + self._on_behalf

    def stop_watching(self) -> None:
        """End the watch that runs, if there is one; there will be no more."""
        self._stopped = True
        if self._watching is not None:
            # The connection may have ended by itself.
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                self._watching.shutdown()

    def seconds_since(self, timestamp: str) -> float:
        """How long ago that was, by the API server's clock."""
        then = datetime.datetime.fromisoformat(timestamp).timestamp()
        return time.time() + self._ahead - then

    def close(self) -> None:
        """Close the connections."""
        self._forwarder.close()
        self._pools.clear()

    # Requests.

    def path(
        self, kind: str, name: str = "", *more: str, query: Iterable[tuple[str, str]] = ()
    ) -> str:
        """The path of an object, or of all objects of a kind, in the namespace."""
        prefix = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        parts = [prefix, "namespaces", self.place.namespace, kind, name, *more]
        path = "/".join(quote(each, safe="/") for each in parts if each)
        pairs = list(query)
        return f"{path}?{urlencode(pairs)}" if pairs else path

    def get(self, kind: str, name: str = "", **query: str) -> Object:
        """An object, or a list of all of a kind."""
        path = self.path(kind, name, query=query.items())
        return self._request("GET", path, f"reading {kind[:-1]} {name}".rstrip())

    def create(self, kind: str, manifest: Object, **query: str) -> Object:
        """Make an object."""
        doing = f"making {kind[:-1]} {manifest['metadata'].get('name', '')}".rstrip()
        return self._request("POST", self.path(kind, query=query.items()), doing, manifest)

    def patch(self, kind: str, name: str, change: Object) -> Object:
        """Change an object."""
        doing = f"changing {kind[:-1]} {name}"
        return self._request("PATCH", self.path(kind, name), doing, change, _MERGE)

    def delete(self, kind: str, name: str, **options: Any) -> None:
        """Remove an object, if it exists, and all that it owns."""
        given = {"propagationPolicy": "Background", **options}
        with contextlib.suppress(NotFoundError):
            self._request("DELETE", self.path(kind, name), f"removing {kind[:-1]} {name}", given)

    def delete_all(self, kind: str, **query: str) -> None:
        """Remove the objects of a kind that a query selects."""
        path = self.path(kind, query=query.items())
        self._request("DELETE", path, f"removing {kind}", {"gracePeriodSeconds": 2})

    def logs(self, pod: str) -> str:
        """The last lines of what a pod's container wrote; empty if there are none."""
        path = self.path("pods", pod, "log", query=[("tailLines", str(LOG_LINES))])
        try:
            with self._answer("GET", path, None, None, REQUEST_SECONDS) as answer:
                return answer.read().decode(errors="replace") if answer.status == 200 else ""
        except UnreachableError:
            return ""

    def watch(self, kind: str, version: str, **query: str) -> Iterator[tuple[str, Object]]:
        """What happens to objects of a kind from a version on, until the API server has enough."""
        query |= {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        path = self.path(kind, query=query.items())
        with self._answer("GET", path, None, None, WATCH_SECONDS + REQUEST_SECONDS) as answer:
            _refuse(answer, f"watching {kind}")
            self._watching = answer
            if self._stopped:
                return
            unread = b""
            for data in answer.stream(1 << 16):
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]

    def _look_at_the_clock(self, answer: Any) -> None:
        if told := answer.headers.get("Date"):
            with contextlib.suppress(ValueError):
                self._ahead = parsedate_to_datetime(told).timestamp() - time.time()

    def _request(
        self,
        method: str,
        path: str,
        doing: str,
        body: Object | None = None,
        kind: str | None = None,
    ) -> Object:
        with self._answer(method, path, body, kind, REQUEST_SECONDS) as answer:
            _refuse(answer, doing)
            found: Object = json.loads(answer.read() or b"{}")
            return found

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: Object | None, kind: str | None, seconds: float
    ) -> Iterator[Any]:
        import urllib3

        headers = urllib3.HTTPHeaderDict({"Accept": "application/json", "User-Agent": "skyward"})
        for name, value in self.identity():
            headers.add(name, value)
        if body is not None:
            headers["Content-Type"] = kind or "application/json"
        self.requests += 1
        try:
            answer = self._pools.request(
                method,
                self.server + path,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                preload_content=False,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds),
                retries=urllib3.Retry(
                    connect=1,
                    read=0,
                    redirect=2,
                    other=0,
                    status=3,
                    status_forcelist=_BUSY,
                    allowed_methods=None,
                    backoff_factor=0.2,
                    raise_on_status=False,
                ),
            )
            self._look_at_the_clock(answer)
            try:
                yield answer
            finally:
                # A watch that is left early has bytes in its connection.
                answer.close()
                answer.release_conn()
        except urllib3.exceptions.HTTPError as problem:
            raise UnreachableError(
                f"the API server {self.server} does not answer: {_root(problem)}; is it up, and "
                "are you in its network?"
            ) from problem

    # Streams.

    def execute(
        self, pod: str, command: Sequence[str], refused: Callable[[str], None]
    ) -> socket.socket:
        """A blocking socket that is the input and output of a program in the pod.

        The input stays open; `refused` gets the words with which the pod starts no program.
        """
        return streams.Executing(self._exec(pod, command), refused).start("skyward-exec")

    def relay(self, pod: str, command: Sequence[str], text: bytes) -> socket.socket:
        """A blocking socket that leads, through a framed relay in the pod, to a socket there."""
        websocket = self._exec(pod, command)
        websocket.queue(streams.STDIN, text)
        return streams.Relaying(websocket).start("skyward-relay")

    def _exec(self, pod: str, command: Sequence[str]) -> streams.WebSocket:
        query = [("container", CONTAINER), ("stdin", "1"), ("stdout", "1"), ("stderr", "1")]
        query += [("command", each) for each in command]
        path = self.path("pods", pod, "exec", query=query)
        with _unreachable(f"pod {pod}"):
            return streams.open_websocket(self.stream_server(), self.identity(), path)

    def forward(self, pod: str, port: int) -> socket.socket:
        """A blocking socket to a port of the pod's loopback; both directions end together."""
        path = self.path("pods", pod, "portforward")
        with _unreachable(f"pod {pod}, port {port}"):
            return self._forwarder.connect(self.stream_server(), self.identity(), path, port)

    def stream_server(self) -> streams.Server:
        """What streams have to know of the API server."""
        from requests.utils import should_bypass_proxies

        about = self._configuration
        is_bypassed = about.no_proxy and should_bypass_proxies(self.server, no_proxy=about.no_proxy)
        authority = getattr(about, "ca_cert_data", None)
        return streams.Server(
            url=self.server,
            proxy="" if is_bypassed else str(about.proxy or ""),
            name=str(about.tls_server_name or ""),
            is_verified=bool(about.verify_ssl),
            authority_file=about.ssl_ca_cert,
            authority=(
                ssl.DER_cert_to_PEM_cert(authority) if isinstance(authority, bytes) else authority
            ),
            certificate_file=about.cert_file,
            key_file=about.key_file,
        )


@contextlib.contextmanager
def _unreachable(what: str) -> Iterator[None]:
    """Say what is out of reach, where a stream cannot be opened."""
    try:
        yield
    except streams.HandshakeError as problem:
        raise UnreachableError(f"{what}: {problem.words}") from problem
    except OSError as problem:
        raise UnreachableError(f"{problem}") from problem


def _refuse(answer: Any, doing: str) -> None:
    """Raise what an answer says, if it is a refusal."""
    if answer.status < 300:
        return
    text = answer.read().decode(errors="replace")
    try:
        status: Mapping[str, Any] = json.loads(text)
    except ValueError:
        status = {"message": text.strip() or answer.reason}
    kind = {404: NotFoundError, 409: ConflictError, 410: ExpiredError}.get(answer.status, ApiError)
    raise kind(
        answer.status, str(status.get("reason", "")), str(status.get("message", text)), doing
    )


class NotFoundError(ApiError):
    """There is no such object."""


class ConflictError(ApiError):
    """Such an object exists, or has changed meanwhile."""


class ExpiredError(ApiError):
    """A watch began too long ago."""


def _root(problem: BaseException) -> str:
    reason = getattr(problem, "reason", None)
    return str(reason or problem)
