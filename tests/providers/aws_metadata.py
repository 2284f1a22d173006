"""The metadata service of EC2 (IMDSv2), for the testbed's instances."""

from __future__ import annotations

import datetime
import json
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BRIDGE = "10.211.0.1"
"""This machine, as the testbed's containers reach it."""
_FREEBIND = 15
"""Linux's IP_FREEBIND, which `socket` does not name: the first container makes the bridge."""


class Metadata:
    """Answers on the bridge of the containers and on the loopback, until closed."""

    def __init__(self, instance_of: Callable[[str], Mapping[str, Any] | None]) -> None:
        """`instance_of` gives the instance that has an address, as EC2 describes it."""
        self._instance_of = instance_of
        self._notices: dict[str | None, dict[str, str]] = {}
        self.tokens: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        """Addresses, and the paths that they asked for."""
        here = _Server("127.0.0.1", 0, self)
        self.port = here.server_port
        self._servers = [here, _Server(BRIDGE, self.port, self)]
        self._threads = [
            threading.Thread(target=server.serve_forever, name="metadata", daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        """Where an instance finds the service."""
        return f"http://{BRIDGE}:{self.port}"

    @property
    def local_url(self) -> str:
        """Where this machine finds the service."""
        return f"http://127.0.0.1:{self.port}"

    def announce(self, seconds: float, instance: str | None = None) -> None:
        """Say that an instance, or every one, is taken back so many seconds from now."""
        when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        time = when.strftime("%Y-%m-%dT%H:%M:%SZ")
        self._notices[instance] = {"action": "terminate", "time": time}

    def reset(self) -> None:
        """Take back all notices."""
        self._notices.clear()
        self.asked.clear()

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()

    def answer(self, path: str, address: str) -> str | None:
        """What there is at a path, for who asks from an address; None for nothing."""
        self.asked.append((address, path))
        instance = self._instance_of(address) or {}
        name = instance.get("InstanceId", "")
        if path == "/latest/meta-data/spot/instance-action":
            notice = self._notices.get(name) or self._notices.get(None)
            return json.dumps(notice) if notice else None
        found = {
            "/latest/meta-data/instance-id": name,
            "/latest/meta-data/instance-type": instance.get("InstanceType"),
            "/latest/meta-data/local-ipv4": instance.get("PrivateIpAddress"),
            "/latest/meta-data/placement/availability-zone": instance.get("Placement", {}).get(
                "AvailabilityZone"
            ),
        }
        return found.get(path) or None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, port: int, metadata: Metadata) -> None:
        self.metadata = metadata
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_IP, _FREEBIND, 1)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        if self.path != "/latest/api/token":
            self._reply(404, "")
        elif "X-aws-ec2-metadata-token-ttl-seconds" not in self.headers:
            self._reply(400, "")
        else:
            token = uuid.uuid4().hex
            self.server.metadata.tokens.add(token)
            self._reply(200, token)

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") not in self.server.metadata.tokens:
            self._reply(401, "")
            return
        found = self.server.metadata.answer(self.path, str(self.client_address[0]))
        self._reply(404 if found is None else 200, found or "")

    def _reply(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
