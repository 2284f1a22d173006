"""Identity: who may speak on a channel, proven before anything else is read.

On one host that is a Unix socket in a private directory plus the peer's user id; over a network it
is TLS 1.3 with certificates of the pool's own short-lived authority, on both ends.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import ssl
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from skyward.errors import AuthenticationError, ProtocolError, VersionMismatchError
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.frames import PROTOCOL, Frame, FrameDecoder
from skyward.wire.messages import Hello, Welcome

SESSION_UNKNOWN = "unknown session"
"""The refusal of a connection that is to go on with a link this process does not have."""
GREETING_SECONDS = 5.0
LIFETIME = datetime.timedelta(days=30)


class SessionUnknownError(AuthenticationError):
    """The process that was reached is not the one that a link was with."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """One end's certificate and key with the pool's authority, all PEM."""

    authority: str
    certificate: str
    key: str

    def context(self, *, server: bool) -> ssl.SSLContext:
        """A TLS 1.3 context that accepts only peers of the same pool."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority)
        if server:
            # A send-only connection would never read the tickets.
            context.num_tickets = 0
        with _readable(self.certificate + self.key) as chain:
            context.load_cert_chain(chain)
        return context


@contextlib.contextmanager
def _readable(secret: str) -> Iterator[str]:
    """A path to read a secret from: the ssl module loads keys from files only.

    Where the system has files in memory alone, nothing is left of it however this process ends.
    """
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("skyward-key", os.MFD_CLOEXEC), "w") as file:
            file.write(secret)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.TemporaryDirectory(prefix="sky-") as folder:
        path = Path(folder, "chain.pem")
        path.touch(mode=0o600)
        path.write_text(secret)
        yield str(path)


class Authority:
    """A pool's certificate authority; it lives in the client's memory and signs each end once."""

    def __init__(self, pool: str) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        self._x509: Any = x509
        self._hashes: Any = hashes
        self._serialization: Any = serialization
        self._ec: Any = ec
        self._usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        self._common_name = NameOID.COMMON_NAME
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = self._name_of(f"skyward pool {pool}")
        self._certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
            )
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    key_cert_sign=True,
                    crl_sign=True,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, name: str) -> Credentials:
        """Credentials for one end, whose certificate names it."""
        x509 = self._x509
        key = self._ec.generate_private_key(self._ec.SECP256R1())
        certificate = (
            self._builder(self._name_of(name), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(self._usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, self._hashes.SHA256())
        )
        encoding = self._serialization.Encoding.PEM
        private = key.private_bytes(
            encoding,
            self._serialization.PrivateFormat.PKCS8,
            self._serialization.NoEncryption(),
        )
        return Credentials(
            authority=self._certificate.public_bytes(encoding).decode(),
            certificate=certificate.public_bytes(encoding).decode(),
            key=private.decode(),
        )

    def _name_of(self, text: str) -> Any:
        return self._x509.Name([self._x509.NameAttribute(self._common_name, text)])

    def _builder(self, subject: Any, public_key: Any) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        return (
            self._x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(self._x509.random_serial_number())
            # Clocks of machines differ; an hour is more than any sane one is off.
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + LIFETIME)
        )


CLIENT = "client"
"""The name in the client's certificate."""
PEER = "peer"
"""The one role that nodes have for each other."""


def certified_name(end: ssl.SSLSocket) -> str:
    """The name in the certificate of the other end."""
    certificate: Any = end.getpeercert() or {}
    return next((each["commonName"] for each in map(dict, certificate.get("subject", ()))), "")


def node_name(pool: str, node: int) -> str:
    """The name in a node's certificate."""
    return f"node-{node}.{pool}.skyward"


def my_versions() -> dict[str, str]:
    """What this end runs, compared at the handshake."""
    versions = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "protocol": str(PROTOCOL),
    }
    for package in ("skyward", "cloudpickle", "numpy", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def check_compatible(client: dict[str, str], worker: dict[str, str], where: str) -> list[str]:
    """Raise if the two cannot work together; otherwise return warnings worth showing."""
    if client.get("protocol") != worker.get("protocol"):
        raise VersionMismatchError(
            f"{where} speaks protocol {worker.get('protocol')} (skyward "
            f"{worker.get('skyward', '?')}), this end {client.get('protocol')} (skyward "
            f"{client.get('skyward', '?')}); install the same skyward on both"
        )
    mine, theirs = client.get("python", "?"), worker.get("python", "?")
    minor, their_minor = (".".join(version.split(".")[:2]) for version in (mine, theirs))
    if minor != their_minor:
        raise VersionMismatchError(
            f"{where} runs Python {theirs}, this end Python {mine}: functions cannot travel "
            f"between minor versions; ask for sky.Image(python={minor!r}) or run this script with "
            f"Python {their_minor}"
        )
    if client.get("cloudpickle", "").split(".")[:1] != worker.get("cloudpickle", "").split(".")[:1]:
        raise VersionMismatchError(
            f"{where} has cloudpickle {worker.get('cloudpickle')}, this end "
            f"{client.get('cloudpickle')}; install the same major version on both"
        )
    warnings = []
    for package in ("numpy", "torch"):
        mine, theirs = client.get(package, ""), worker.get(package, "")
        if mine and theirs and mine.split(".")[0] != theirs.split(".")[0]:
            warnings.append(
                f"{where} has {package} {theirs}, this end {mine}: objects other than plain "
                "arrays and tensors may not survive the trip"
            )
    return warnings


Dial = Callable[[str, float], socket.socket]
"""Opens a connection to an endpoint within so many seconds."""


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Of "tcp:HOST:PORT", whose host may be an IPv6 address, in brackets or not."""
    host, _, port = endpoint.partition(":")[2].rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def direct(endpoint: str, seconds: float) -> socket.socket:
    """A connection to an endpoint that the network itself leads to."""
    end = socket.create_connection(host_and_port(endpoint), seconds)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def connect(
    endpoint: str,
    hello: Hello,
    credentials: Credentials | None,
    name: str,
    seconds: float = GREETING_SECONDS,
    dial: Dial = direct,
) -> tuple[Channel, Welcome]:
    """Open a channel to a listener and shake hands; it ends with its connections."""
    if credentials is None:
        end, decoder, welcome = connect_one(endpoint, hello, None, name, seconds, dial)
        return Channel(end, decoder=decoder), welcome
    context = context_for(endpoint, credentials)
    hello = msgspec.structs.replace(hello, session=secrets.token_hex(8))
    sender, receiver, welcome = connect_pair(endpoint, hello, context, name, seconds, dial)
    return Channel(sender, receiver), welcome


def connect_once(
    endpoint: str, hello: Hello, credentials: Credentials | None, name: str
) -> Channel:
    """One connection for both directions, for two ends that take turns."""
    context = context_for(endpoint, credentials) if credentials is not None else None
    end, decoder, _ = connect_one(endpoint, hello, context, name, GREETING_SECONDS, direct)
    return Channel(end, decoder=decoder)


def context_for(endpoint: str, credentials: Credentials) -> ssl.SSLContext | None:
    """TLS for the network; none for a Unix socket, since the way to one is private already."""
    return None if endpoint.startswith("unix:") else credentials.context(server=False)


def connect_pair(
    endpoint: str,
    hello: Hello,
    context: ssl.SSLContext | None,
    name: str,
    seconds: float,
    dial: Dial,
) -> tuple[socket.socket, socket.socket, Welcome]:
    """The two connections of one session, to send and to receive on."""
    ends: list[socket.socket] = []
    try:
        for direction in ("send", "receive"):
            half = msgspec.structs.replace(hello, direction=direction)
            end, decoder, welcome = connect_one(endpoint, half, context, name, seconds, dial)
            ends.append(end)
            if decoder.buffered:
                raise ProtocolError(f"{endpoint} sent more than a Welcome")
    except BaseException:
        for end in ends:
            end.close()
        raise
    sender, receiver = ends
    return sender, receiver, welcome


def connect_one(
    endpoint: str,
    hello: Hello,
    context: ssl.SSLContext | None,
    name: str,
    seconds: float,
    dial: Dial,
) -> tuple[socket.socket, FrameDecoder, Welcome]:
    """One connection, and what was said on it."""
    family, _, address = endpoint.partition(":")
    is_here = family == "unix" and dial is direct
    if is_here:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        end = dial(endpoint, seconds)
    try:
        end.settimeout(seconds)
        if is_here:
            _connect_unix(end, address, seconds)
            check_peer(end)
        elif family == "tcp":
            if context is None:
                raise AuthenticationError(f"no credentials for {endpoint}")
            keep_alive(end)
            try:
                end = context.wrap_socket(end, server_hostname=name)
            except ssl.SSLError as problem:
                raise AuthenticationError(f"{endpoint} is not {name}: {problem}") from problem
        decoder = FrameDecoder()
        Channel(end).send(hello)
        frame = _read_exactly_one(end, decoder)
        welcome = messages.decode_as(Welcome, frame.kind, frame.meta)
        if welcome.refusal == SESSION_UNKNOWN:
            raise SessionUnknownError(f"{endpoint} refused to go on: {welcome.refusal}")
        if welcome.refusal:
            raise AuthenticationError(f"{endpoint} refused the connection: {welcome.refusal}")
        end.settimeout(None)
    except BaseException:
        end.close()
        raise
    return end, decoder, welcome


def _read_exactly_one(end: socket.socket, decoder: FrameDecoder) -> Frame:
    """Read one frame and not a byte more: the next reader needs what follows."""
    while (frame := decoder.next()) is None:
        data = end.recv(decoder.missing)
        if not data:
            raise EOFError("the other end closed the connection")
        decoder.feed(data)
    return frame


def keep_alive(end: socket.socket) -> None:
    """Have the kernel keep an idle connection known to whatever lies on its way.

    Not with a limit on unacknowledged bytes (TCP_USER_TIMEOUT): that also ends a connection whose
    other end is alive but has been busy, and has not read, for so long.
    """
    if end.family not in (socket.AF_INET, socket.AF_INET6):
        return
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _connect_unix(end: socket.socket, address: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            end.connect(address)
            return
        except BlockingIOError:
            # A full backlog; a Unix socket with a timeout does not wait for room in it.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def check_peer(end: socket.socket) -> None:
    """On one host, the peer must be this user (or root)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    if uid not in (os.getuid(), 0):
        raise AuthenticationError(f"the peer is user {uid}, this end is user {os.getuid()}")
