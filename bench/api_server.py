"""A pretended API server: Jobs whose pods soon run, on no machine; it counts the requests."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import queue
import tempfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
NAMESPACE = "default"
PENDING_SECONDS = 0.3
"""How long a pod is pending: long enough that the client watches by then."""
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: pretended
contexts: [{{name: pretended, context: {{cluster: pretended, user: nobody}}}}]
clusters: [{{name: pretended, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: nobody, user: {{}}}}]
"""


class Cluster:
    """The objects of a cluster, and its controllers: a Job gets its pods in the request itself."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {"jobs": {}, "pods": {}, "events": {}}
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._watchers: list[queue.SimpleQueue[tuple[str, Object] | None]] = []

    def list(self, kind: str, selector: str) -> Object:
        with self._lock:
            items = [each for each in self.objects[kind].values() if _matches(each, selector)]
            return {"metadata": {"resourceVersion": self._version()}, "items": copy.deepcopy(items)}

    def create(self, kind: str, given: Object) -> Object:
        with self._lock:
            about = given["metadata"]
            number = next(self._numbers)
            about.setdefault("name", f"{about.get('generateName')}{number}")
            about |= {"uid": str(number), "creationTimestamp": f"{number:09}"}
            self.objects[kind][about["name"]] = given
            if kind == "jobs":
                self._fill(given)
            else:
                given["status"] = {"phase": "Pending"}
                self._tell("ADDED", given)
                threading.Timer(PENDING_SECONDS, self._run, [about["name"]]).start()
            return given

    def patch(self, kind: str, name: str, change: Object) -> Object:
        with self._lock:
            found: Object = _merged(self.objects[kind][name], change)
            self.objects[kind][name] = found
            if kind == "jobs":
                self._fill(found)
            else:
                self._tell("MODIFIED", found)
            return found

    def delete(self, kind: str, name: str) -> None:
        with self._lock:
            gone = self.objects[kind].pop(name, None)
            if kind == "jobs":
                self.delete_all("pods", f"skyward.dev/job={name}")
            elif gone is not None:
                self._tell("DELETED", gone)

    def delete_all(self, kind: str, selector: str) -> None:
        with self._lock:
            for each in self.list(kind, selector)["items"]:
                self.delete(kind, each["metadata"]["name"])

    def watch(self) -> queue.SimpleQueue[tuple[str, Object] | None]:
        """What happens to pods; None is the end.

        It begins with the pods that there are, so that a watch after a list misses nothing.
        """
        with self._lock:
            self._watchers.append(queue.SimpleQueue())
            for pod in self.objects["pods"].values():
                self._watchers[-1].put(("MODIFIED", copy.deepcopy(pod)))
            return self._watchers[-1]

    def end_watches(self) -> None:
        with self._lock:
            for each in self._watchers:
                each.put(None)

    def _fill(self, job: Object) -> None:
        """Make the pods that a Job lacks."""
        name = job["metadata"]["name"]
        has = len(self.list("pods", f"skyward.dev/job={name}")["items"])
        for _ in range(job["spec"]["parallelism"] - has):
            template = copy.deepcopy(job["spec"]["template"])
            template["metadata"]["generateName"] = f"{name}-"
            self.create("pods", template)

    def _run(self, name: str) -> None:
        """Have a pod run, and tell of it as a real cluster does: scheduled, then started."""
        scheduled = {"conditions": [{"type": "PodScheduled", "status": "True"}]}
        started = {
            "phase": "Running",
            "podIP": "192.0.2.1",
            "containerStatuses": [{"name": "node", "state": {"running": {}}}],
        }
        with self._lock:
            if name in self.objects["pods"]:
                self.patch("pods", name, {"status": scheduled})
                self.patch("pods", name, {"status": started})

    def _tell(self, kind: str, pod: Object) -> None:
        for each in self._watchers:
            each.put((kind, copy.deepcopy(pod)))

    def _version(self) -> str:
        return str(next(self._numbers))


class ApiServer:
    """The server, on a thread of its own; use it as a context manager."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        """How many requests there were, by method and kind of object."""
        self.cluster = Cluster()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._folder = tempfile.TemporaryDirectory(prefix="skyward-bench-")
        self.kubeconfig = str(Path(self._folder.name) / "kubeconfig")
        Path(self.kubeconfig).write_text(KUBECONFIG.format(port=self._server.server_port))

    def __enter__(self) -> ApiServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.end_watches()
        self._server.shutdown()
        self._server.server_close()
        self._folder.cleanup()


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            kind, name = (*parts.path.partition(f"/{NAMESPACE}/")[2].split("/"), "")[:2]
            selector = query.get("labelSelector", "")
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            cluster = server.cluster
            server.requests["WATCH" if "watch" in query else f"{self.command} {kind}"] += 1
            match self.command:
                case "GET" if "watch" in query:
                    self.stream()
                case "POST" if "dryRun" in query:
                    self.say(201, body)
                case "POST":
                    self.say(201, cluster.create(kind, body))
                case _ if name and name not in cluster.objects[kind]:
                    self.say(404, {"reason": "NotFound", "message": f"there is no {kind} {name}"})
                case "GET" if name:
                    self.say(200, cluster.objects[kind][name])
                case "GET":
                    self.say(200, cluster.list(kind, selector))
                case "PATCH":
                    self.say(200, cluster.patch(kind, name, body))
                case "DELETE" if name:
                    cluster.delete(kind, name)
                    self.say(200, {})
                case "DELETE":
                    cluster.delete_all(kind, selector)
                    self.say(200, {})

        do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

        def say(self, status: int, answer: Object) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def stream(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = True
            told = server.cluster.watch()
            with contextlib.suppress(OSError):
                while (event := told.get()) is not None:
                    data = json.dumps({"type": event[0], "object": event[1]}).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def log_message(self, format: str, *given: Any) -> None:
            pass

    return Handler


def _matches(item: Object, selector: str) -> bool:
    labels = item["metadata"].get("labels") or {}
    wanted = [each.partition("=") for each in selector.split(",") if each]
    return all(labels.get(key) == value for key, _, value in wanted)


def _merged(base: Any, change: Any) -> Any:
    """RFC 7396."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    result = {**base, **{key: _merged(base.get(key), value) for key, value in change.items()}}
    return {key: value for key, value in result.items() if value is not None}
