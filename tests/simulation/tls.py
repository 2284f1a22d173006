"""TLS of the simulated world: the ends say who they are, and the bytes stay as they are."""

from __future__ import annotations

import json
import ssl
import struct
import types
from typing import Any


def module(socket: Any) -> types.ModuleType:
    """The module `ssl`, over sockets of a simulated process."""

    class SSLSocket(socket.socket):  # type: ignore[misc,name-defined]
        def __init__(self, context: SSLContext, end: Any, server: bool, name: str | None) -> None:
            seconds = end.gettimeout()
            super().__init__(fileno=end.detach())
            self.settimeout(seconds)
            self._context, self._server, self._name = context, server, name
            self._theirs: dict[str, str] | None = None

        def do_handshake(self, block: bool = False) -> None:
            mine = json.dumps({"authority": self._context.authority, "name": self._context.name})
            self.sendall(struct.pack(">I", len(mine)) + mine.encode())
            size = struct.unpack(">I", self._exactly(4))[0]
            if size > 10_000:
                raise ssl.SSLError(1, "wrong version number")
            theirs = json.loads(self._exactly(size))
            if theirs["authority"] != self._context.trusted:
                raise ssl.SSLCertVerificationError(1, "certificate verify failed")
            if self._name is not None and theirs["name"] != self._name:
                raise ssl.SSLCertVerificationError(1, "Hostname mismatch")
            self._theirs = theirs

        def _exactly(self, size: int) -> bytes:
            found = b""
            while len(found) < size:
                part = self.recv(size - len(found))
                if not part:
                    raise ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
                found += part
            return found

        def getpeercert(self, binary_form: bool = False) -> Any:
            assert self._theirs is not None
            return {"subject": ((("commonName", self._theirs["name"]),),)}

        def pending(self) -> int:
            return 0

        def version(self) -> str:
            return "TLSv1.3"

        def cipher(self) -> tuple[str, str, int]:
            return ("TLS_AES_256_GCM_SHA384", "TLSv1.3", 256)

        def read(self, size: int = 1024, buffer: Any = None) -> Any:
            return self.recv(size) if buffer is None else self.recv_into(buffer, size)

        def write(self, data: Any) -> int:
            return int(self.send(data))

        def unwrap(self) -> Any:
            return self

    class SSLContext:
        def __init__(self, protocol: Any = None) -> None:
            self.trusted = self.authority = self.name = ""
            self.minimum_version: Any = None
            self.verify_mode: Any = None
            self.check_hostname = True
            self.num_tickets = 2

        def load_verify_locations(self, cadata: str) -> None:
            self.trusted = json.loads(cadata)["authority"]

        def load_cert_chain(self, path: str) -> None:
            with open(path) as file:
                certificate = json.loads(file.read().splitlines()[0])
            self.authority, self.name = certificate["authority"], certificate["name"]

        def wrap_socket(
            self,
            end: Any,
            server_side: bool = False,
            do_handshake_on_connect: bool = True,
            suppress_ragged_eofs: bool = True,
            server_hostname: str | None = None,
        ) -> SSLSocket:
            made = SSLSocket(self, end, server_side, server_hostname)
            if do_handshake_on_connect:
                try:
                    made.do_handshake()
                except BaseException:
                    made.close()
                    raise
            return made

    made = types.ModuleType("ssl")
    made.__dict__.update(ssl.__dict__)
    made.__dict__.update(SSLSocket=SSLSocket, SSLContext=SSLContext)
    return made


def authority(handshake: Any, kernel: Any) -> type:
    """A pool's authority whose certificates are plain text."""

    class Authority:
        def __init__(self, pool: str, saved: Any = None, lifetime: Any = None) -> None:
            self._name = f"{pool}-{kernel.random.getrandbits(32):08x}"
            if saved is not None:
                self._name = json.loads(saved.certificate)["authority"]

        def save(self) -> Any:
            return handshake.SavedAuthority(json.dumps({"authority": self._name}), "key")

        def issue(self, name: str) -> Any:
            return handshake.Credentials(
                authority=json.dumps({"authority": self._name}),
                certificate=json.dumps({"authority": self._name, "name": name}) + "\n",
                key="key",
            )

    return Authority
