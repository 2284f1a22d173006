"""A service that speaks as much of Docker's API as starting a container takes, and remembers it."""

from __future__ import annotations

import contextlib
import json
import re
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

DOCKER = {"ApiVersion": "1.41", "Version": "24.0.7", "Components": [{"Name": "Engine"}]}


def podman(version: str) -> dict[str, Any]:
    """How Podman introduces itself."""
    component = {"Name": "Podman Engine", "Version": version}
    return {"ApiVersion": "1.41", "Version": version, "Components": [component]}


class Service:
    """It says of every image that it has it, and refuses to start containers if told so."""

    def __init__(self, version: dict[str, Any], refusal: str) -> None:
        self.version = version
        self.refusal = refusal
        self.created: list[dict[str, Any]] = []
        self.removed: list[str] = []
        self.stopped: list[str] = []
        self.former: dict[str, Any] = {}
        """What the description of a container says besides."""
        self.may_start = threading.Event()
        """Set, unless a start is to take long."""
        self.may_start.set()
        self.starting = threading.Event()
        """Whether a start was asked for."""

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """The status and the document for a request."""
        path = re.sub(r"^/v[\d.]+", "", path.partition("?")[0])
        named = {"Id": "c1", "Name": "/sky-p-0", "Config": {"Labels": {}}, "Image": "sha256:1"}
        networks = {"n": {"IPAddress": "10.0.0.2"}}
        match method, path:
            case "GET", "/_ping":
                return 200, "OK"
            case "GET", "/version":
                return 200, self.version
            case "GET", "/networks":
                return 200, []
            case "POST", "/networks/create":
                return 201, {"Id": "n1"}
            case "POST", "/volumes/create":
                return 201, {"Name": body["Name"]}
            case "POST", "/containers/create":
                self.created.append(body)
                return 201, {"Id": "c1", "Warnings": []}
            case "POST", "/containers/c1/stop":
                self.stopped.append(path)
                return 204, None
            case "POST", "/containers/c1/start":
                self.starting.set()
                self.may_start.wait(60)
                return (500, {"message": self.refusal}) if self.refusal else (204, None)
            case "DELETE", _:
                self.removed.append(path)
                return 204, None
        if path.startswith("/images/"):
            return 200, {"Id": "sha256:" + "1" * 64, "RepoTags": ["python:3"]}
        return 200, {
            **named,
            "NetworkSettings": {"Networks": networks},
            "State": {"Status": "running"},
            **self.former,
        }


@contextlib.contextmanager
def serving(folder: Path, version: dict[str, Any], refusal: str = "") -> Iterator[Service]:
    """At `docker.sock` in the folder."""
    service = Service(version, refusal)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or "null")
            status, document = service.answer(self.command, self.path, body)
            data = b"" if document is None else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = handle_one  # noqa: N815

        def address_string(self) -> str:
            return "client"

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(folder / "docker.sock"), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
