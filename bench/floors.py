"""Plain Python sockets moving the same bytes to another process: what a transfer must beat.

As a program it is the other process: it takes exchanges on one connection until that closes.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

# What follows on the wire: bytes to receive, bytes to send back, and whether the receiver of
# either reuses one buffer it has touched before, or allocates a new one as any transfer does
# whose result is a new object.
REQUEST = struct.Struct("<QQ?")
CHECKSUM = struct.Struct("<d")
FLOATS_PER_PAGE = 1024


class Buffers:
    """Where received bytes land."""

    def __init__(self) -> None:
        self._touched: dict[int, np.ndarray[Any, Any]] = {}

    def get(self, size: int, *, reused: bool) -> np.ndarray[Any, Any]:
        if not reused:
            return np.empty(size // 4, np.float32)
        if size not in self._touched:
            self._touched[size] = np.zeros(size // 4, np.float32)
            self._touched[size][:] = 1
        return self._touched[size]


def touch(floats: Any) -> float:
    """Read one value of every page: a transfer that only maps its pages has to deliver them."""
    return float(floats[::FLOATS_PER_PAGE].sum())


def change(floats: Any) -> None:
    """Make every page differ from what it was, cheaply, so that nothing has been seen before."""
    floats[::FLOATS_PER_PAGE] += 1


def receive(connection: socket.socket, buffer: Any) -> None:
    view = memoryview(buffer).cast("B")
    received = 0
    while received < len(view):
        count = connection.recv_into(view[received:])
        if count == 0:
            raise ConnectionError("the floor's other end closed the connection")
        received += count


class Link:
    """A socket to another process, used the plain way: `sendall` and `recv_into`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffers = Buffers()

    def exchange(
        self, outgoing: Sequence[Any], incoming: int = 0, *, reused: bool
    ) -> tuple[float, float]:
        """Send arrays, take `incoming` bytes back; what each end read when touching its own."""
        views = [memoryview(array).cast("B") for array in outgoing]
        self._socket.sendall(REQUEST.pack(sum(map(len, views)), incoming, reused))
        for view in views:
            self._socket.sendall(view)
        reply = bytearray(CHECKSUM.size)
        receive(self._socket, reply)
        landed = self._buffers.get(incoming, reused=reused)
        receive(self._socket, landed)
        return CHECKSUM.unpack(reply)[0], touch(landed)

    def round_trip(self) -> None:
        """One small message there, and one back."""
        self._socket.sendall(REQUEST.pack(0, 0, True))
        receive(self._socket, bytearray(CHECKSUM.size))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawLink(Link):
    """The same to a process of its own on this machine."""

    def __init__(self, *, tls: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="skyward-bench-")
        folder = Path(self._folder.name)
        if tls:
            make_certificate(folder)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "tls" if tls else "unix", folder, "127.0.0.1"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        self.cipher = ""
        if tls:
            secured = connect_tls("127.0.0.1", int(address), folder)
            self.cipher = (secured.cipher() or ("",))[0]
            super().__init__(secured)
        else:
            end = socket.socket(socket.AF_UNIX)
            end.connect(address)
            super().__init__(end)

    def close(self) -> None:
        super().close()
        self._process.wait(timeout=20)
        self._folder.cleanup()


def connect_tls(host: str, port: int, folder: Path) -> ssl.SSLSocket:
    """A TLS connection to a process that has the certificate in the folder, wherever it runs."""
    context = ssl.create_default_context(cafile=folder / "certificate.pem")
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    plain = socket.create_connection((host, port))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


def make_certificate(folder: Path) -> None:
    """A self-signed certificate for this host, and its key, as PEM files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyward bench")])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(here, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def listen(kind: str, folder: Path, host: str) -> socket.socket:
    """The connection of the one client that comes; where it is awaited is printed."""
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "socket"))
        listener.listen(1)
        print(folder / "socket", flush=True)
        return listener.accept()[0]
    listener = socket.create_server((host, 0))
    print(listener.getsockname()[1], flush=True)
    plain = listener.accept()[0]
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "tcp":
        return plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return context.wrap_socket(plain, server_side=True)


def serve(connection: socket.socket) -> None:
    buffers = Buffers()
    results: dict[int, np.ndarray[Any, Any]] = {}
    header = bytearray(REQUEST.size)
    while True:
        try:
            receive(connection, header)
        except (ConnectionError, ssl.SSLError):
            return
        incoming, outgoing, reused = REQUEST.unpack(header)
        landed = buffers.get(incoming, reused=reused)
        receive(connection, landed)
        connection.sendall(CHECKSUM.pack(touch(landed)))
        if outgoing:
            result = results.setdefault(outgoing, np.ones(outgoing // 4, np.float32))
            change(result)
            connection.sendall(memoryview(result).cast("B"))


if __name__ == "__main__":
    with listen(sys.argv[1], Path(sys.argv[2]), sys.argv[3]) as connection:
        serve(connection)
