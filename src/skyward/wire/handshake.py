"""The handshake: opens connections to a listener; both ends prove who they are and what they run.

On one host, the socket is a Unix socket in a private directory, and the kernel names the peer's
user. Over a network, both ends use TLS 1.3 with certificates of the pool's own short-lived
authority. A client makes a link's connections again after each loss.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import os
import re
import secrets
import socket
import ssl
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec

from skyward import kernel
from skyward.errors import AuthenticationError, ProtocolError, SkywardError, VersionMismatchError
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.frames import PROTOCOL, Frame, FrameDecoder
from skyward.wire.link.connections import Connections, LinkLost
from skyward.wire.link.link import Link
from skyward.wire.link.pair import Pair
from skyward.wire.messages import Hello, Welcome
from skyward.wire.native import (
    CALLS,
    Context,
    NativeLink,
    NativeSocket,
    Terms,
    carries_calls,
    core,
)

SESSION_UNKNOWN = "unknown session"
"""The listener refuses a connection with these words if it does not know the connection's link."""
GREETING_SECONDS = 30.0
"""How long a first connection may take: a busy machine answers late, one without the process
refuses at once."""
AGAIN_SECONDS = 5.0
"""How long one of several attempts may take: the next one's packets are not those that got lost."""
REFUSED_SECONDS = 2.0
"""If a host refuses connections for so long, the process that listened there has ended."""
PAUSES = (0.02, 1.0)
"""The first and the longest pause between two attempts to connect."""
CONNECTIONS = 4
"""How many connections a large write is spread over: the main one and its stripes."""
LIFETIME = datetime.timedelta(days=30)
KEPT_LIFETIME = datetime.timedelta(days=365)
"""How long the certificates of a kept pool are good for."""

Dial = Callable[[str, float], socket.socket]
"""Opens a connection to an endpoint; raises if that takes more than the given seconds."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Credentials:
    """One end's certificate and key with the pool's authority, all PEM."""

    authority: str
    certificate: str
    key: str = field(repr=False)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """A TLS 1.3 context that accepts only peers of the same pool."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority)
        if server:
            # Nobody would read the tickets on a connection that the client only sends on.
            context.num_tickets = 0
        with _readable(self.certificate + self.key) as chain:
            context.load_cert_chain(chain)
        return context

    def native_context(self, *, server: bool) -> TlsContext:
        """The same for the native core; the one of Python where the core has no OpenSSL."""
        if core().openssl is None:
            return self.context(server=server)
        return Context(self.authority, self.certificate, self.key, server=server)


@dataclass(frozen=True, slots=True)
class SavedAuthority:
    """The certificate and the key of a pool's authority, both PEM."""

    certificate: str
    key: str = field(repr=False)


TlsContext = ssl.SSLContext | Context
_shared: weakref.WeakKeyDictionary[Credentials, dict[bool, TlsContext]] = (
    weakref.WeakKeyDictionary()
)


def client_context(credentials: Credentials, *, native: bool = False) -> TlsContext:
    """The context for connections to any process of a pool, made once.

    A client has several connections to each node, and a context takes 100 KB and a millisecond.
    """
    made = _shared.setdefault(credentials, {})
    if native not in made:
        kind = credentials.native_context if native else credentials.context
        made[native] = kind(server=False)
    return made[native]


@contextlib.contextmanager
def _readable(secret: str) -> Iterator[str]:
    """A path to a file that holds the secret: the ssl module loads keys from files only.

    On Linux the file is in memory alone: no copy stays behind, even if this process is killed.
    """
    if kernel.HAS_MEMORY_FILES:
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
    """A pool's certificate authority: only the client has its key, in memory.

    The key of a kept pool is also in the pool's record, for the next client.
    """

    def __init__(
        self,
        pool: str,
        saved: SavedAuthority | None = None,
        lifetime: datetime.timedelta = LIFETIME,
    ) -> None:
        """`saved` is the authority that another client has made for the pool."""
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
        self._lifetime = lifetime
        self._name = self._name_of(f"skyward pool {pool}")
        if saved is not None:
            self._key: Any = serialization.load_pem_private_key(saved.key.encode(), None)
            self._certificate = x509.load_pem_x509_certificate(saved.certificate.encode())
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
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

    def save(self) -> SavedAuthority:
        """The certificate and the key, for the pool's record."""
        encoding = self._serialization.Encoding.PEM
        return SavedAuthority(
            certificate=self._certificate.public_bytes(encoding).decode(),
            key=self._pem(self._key),
        )

    def _pem(self, key: Any) -> str:
        private: bytes = key.private_bytes(
            self._serialization.Encoding.PEM,
            self._serialization.PrivateFormat.PKCS8,
            self._serialization.NoEncryption(),
        )
        return private.decode()

    def issue(self, name: str) -> Credentials:
        """Credentials for one end of channels; the certificate holds its name."""
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
        return Credentials(
            authority=self._certificate.public_bytes(encoding).decode(),
            certificate=certificate.public_bytes(encoding).decode(),
            key=self._pem(key),
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
            # The clocks of machines differ, but hardly by more than an hour.
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + self._lifetime)
        )


CLIENT = "client"
"""The name in the client's certificate."""
PEER = "peer"
"""The role in the `Hello` of an executor that connects to an executor of another node.

If the process of a device connects to that of another device, the number of their link follows. If
that is of another pool, it is also the name in the certificate, which is good for such links alone.
"""


def certified_name(end: Any) -> str | None:
    """The name in the certificate of the other end; None for a plain socket."""
    if isinstance(end, NativeSocket):
        return end.peer()
    if not isinstance(end, ssl.SSLSocket):
        return None
    certificate: Any = end.getpeercert() or {}
    return next((each["commonName"] for each in map(dict, certificate.get("subject", ()))), "")


def node_name(pool: str, node: int) -> str:
    """The name in a node's certificate."""
    return f"node-{node}.{pool}.skyward"


def check_peer(end: socket.socket) -> None:
    """Raise unless the peer on a Unix socket is a process of this user or of root."""
    if not kernel.HAS_PEER_CREDENTIALS:
        return
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    if uid not in (os.getuid(), 0):
        raise AuthenticationError(
            f"the peer is user {uid}, this end is user {os.getuid()}; run both as the same user"
        )


class SessionUnknownError(AuthenticationError):
    """The listening process does not know the link: it is not the process the link was with."""


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The host and the port of "tcp:HOST:PORT"; brackets around an IPv6 address are optional."""
    host, _, port = endpoint.partition(":")[2].rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def direct(endpoint: str, seconds: float | None) -> socket.socket:
    """Connect to an endpoint straight over the network, without a provider's transport."""
    end = socket.create_connection(host_and_port(endpoint), seconds)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def dial_here(endpoint: str) -> socket.socket:
    """Connect to a socket of this machine."""
    family, _, place = endpoint.partition(":")
    if family != "unix":
        return direct(endpoint, None)
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(place)
    except OSError:
        end.close()
        raise
    return end


def connect(
    endpoint: str,
    hello: Hello,
    credentials: Credentials | None,
    name: str,
    seconds: float = GREETING_SECONDS,
    dial: Dial = direct,
) -> tuple[Channel, Welcome]:
    """Open a channel to a listener and shake hands; when a connection ends, the channel ends."""
    if credentials is None:
        end, decoder, welcome = connect_one(endpoint, hello, None, name, seconds, dial)
        return Channel(end, decoder=decoder), welcome
    context = context_for(endpoint, credentials)
    hello = msgspec.structs.replace(hello, session=secrets.token_hex(8))
    sender, receiver, welcome = connect_pair(endpoint, hello, context, name, seconds, dial)
    return Channel(sender, receiver), welcome


def connect_peer(
    endpoints: str, hello: Hello, credentials: Credentials | None, name: str
) -> Channel:
    """Open a channel from a process of a node to one of any node, at the first place that answers.

    `OSError` if none does: it says why.
    """
    problems = []
    for endpoint in endpoints.split():
        if endpoint.startswith("unix:") and not os.path.exists(endpoint.removeprefix("unix:")):
            continue
        if endpoint.startswith("tcp:") and credentials is None:
            problems.append("only a worker has the certificates, not a process that it starts")
            continue
        own = credentials if endpoint.startswith("tcp:") else None
        try:
            return connect(endpoint, hello, own, name)[0]
        except (OSError, EOFError, SkywardError) as problem:
            problems.append(str(problem))
    raise ConnectionError("; ".join(problems))


def connect_once(
    endpoint: str, hello: Hello, credentials: Credentials | None, name: str
) -> Channel:
    """Open a channel of one connection for both directions, for two ends that take turns."""
    context: TlsContext | None = None
    if credentials is not None:
        context = context_for(endpoint, credentials, native=carries_calls())
    end, decoder, _ = connect_one(endpoint, hello, context, name, GREETING_SECONDS, direct)
    return Channel(end, decoder=decoder)


def context_for(
    endpoint: str, credentials: Credentials, *, native: bool = False
) -> TlsContext | None:
    """The TLS context for an endpoint; None for a Unix socket, whose transport is private."""
    return None if endpoint.startswith("unix:") else client_context(credentials, native=native)


def connect_pair(
    endpoint: str,
    hello: Hello,
    context: TlsContext | None,
    name: str,
    seconds: float,
    dial: Dial,
) -> tuple[socket.socket, socket.socket, Welcome]:
    """Open the two connections of one session: one to send on, one to receive on."""
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
    context: TlsContext | None,
    name: str,
    seconds: float,
    dial: Dial,
) -> tuple[socket.socket, FrameDecoder, Welcome]:
    """Open one connection; returns it with its decoder and the listener's `Welcome`."""
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
            kernel.keep_alive(end)
            try:
                end = with_tls(context, end, server_hostname=name)
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
    """Read one frame and no further byte: the bytes after it belong to the next reader."""
    while (frame := decoder.next()) is None:
        data = end.recv(decoder.missing)
        if not data:
            raise EOFError("the other end closed the connection")
        decoder.feed(data)
    return frame


def with_tls(context: TlsContext, end: socket.socket, **options: Any) -> socket.socket:
    """The connection with TLS; leaves nothing open if the peer has reset it by now.

    `wrap_socket` raises then after it has made its new socket, which it does not close.
    """
    try:
        # A connection of the native core has what is used of a socket.
        return cast("socket.socket", context.wrap_socket(end, **options))
    except OSError as problem:
        trace = problem.__traceback__
        while trace is not None:
            made = trace.tb_frame.f_locals.get("self")
            if isinstance(made, ssl.SSLSocket):
                made.close()
            trace = trace.tb_next
        raise


def _connect_unix(end: socket.socket, address: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            end.connect(address)
            return
        except BlockingIOError:
            # The listener's backlog is full, and `connect` on a Unix socket does not wait for room.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def refused(problem: BaseException, since: float | None) -> float | None:
    """When the refusals began: `since`, or now; None if this problem is no refusal.

    The time counts from the first refusal, since the attempt before it may have taken seconds.
    """
    if not isinstance(problem, ConnectionRefusedError):
        return None
    return time.monotonic() if since is None else since


def refused_too_long(since: float | None) -> bool:
    """Whether the refusals have lasted so long that the listening process must have ended."""
    return since is not None and time.monotonic() - since > REFUSED_SECONDS


class Dialer:
    """Connects one link, and reconnects it after each loss."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        credentials: Credentials,
        name: str,
        dial: Dial = direct,
        *,
        gone: str = "",
        patience: float = math.inf,
        terms: Terms | None = None,
    ) -> None:
        """If `gone` is given, refused connections end the link, with `gone` as the reason.

        The link also ends if no new connection can be made within `patience` seconds. The native
        core carries its bytes where it can, and always if there are `terms` for it.
        """
        if terms is None and carries_calls():
            terms = CALLS
        self._endpoint, self._name, self._dial = endpoint, name, dial
        self._hello = msgspec.structs.replace(hello, session=secrets.token_hex(16))
        self._terms = terms
        self._context = context_for(endpoint, credentials, native=terms is not None)
        self._gone, self._patience = gone, patience
        self._pid = 0

    def open(self, seconds: float = AGAIN_SECONDS) -> tuple[Channel, Welcome]:
        """Make the first connection; after a failure, the caller may try again."""
        pair, welcome = self._connect(0, seconds)
        self._pid = welcome.pid
        link: Link | NativeLink
        if self._terms is not None:
            link = NativeLink(pair, self._terms, self._again, add_stripes=self._add_stripes)
        else:
            link = Link(pair, self._again, add_stripes=self._add_stripes)
        return Channel.over(link), welcome

    def _again(self, connections: Connections | NativeLink) -> Iterator[Pair | float]:
        """Make the next connection of a link, unless it ends.

        After each attempt that fails, yields how many seconds to wait; at last, yields the pair.
        """
        refused_since: float | None = None
        received, started = connections.received, time.monotonic()
        pause, longest = PAUSES
        while not connections.ended:
            try:
                pair, welcome = self._connect(received, AGAIN_SECONDS)
            except SessionUnknownError as problem:
                raise LinkLost("the process there does not know this connection") from problem
            except (OSError, EOFError, SkywardError) as problem:
                refused_since = refused(problem, refused_since)
                if self._gone and refused_too_long(refused_since):
                    raise LinkLost(self._gone) from problem
                if connections.ending and refused_since is not None:
                    raise LinkLost("its process was told to end") from problem
                if time.monotonic() - started > self._patience:
                    raise LinkLost(
                        f"its connection was lost, and a new one could not be made within "
                        f"{self._patience:g} s ({problem})"
                    ) from problem
            else:
                if welcome.pid == self._pid:
                    yield pair
                    return
                pair.close()
                raise LinkLost("another process has taken its place")
            yield pause
            pause = min(2 * pause, longest)
        raise LinkLost("it was closed")

    def _connect(self, received: int, seconds: float) -> tuple[Pair, Welcome]:
        self._hello.attempt += 1
        self._hello.received = received
        sender, receiver, welcome = connect_pair(
            self._endpoint, self._hello, self._context, self._name, seconds, self._dial
        )
        return Pair(sender, receiver, welcome.received, self._hello.attempt), welcome

    def _add_stripes(self, connections: Connections | NativeLink, attempt: int) -> None:
        """Connect stripes for the pair of that attempt, as many as can be made."""
        hello = msgspec.structs.replace(self._hello, attempt=attempt)
        with contextlib.suppress(OSError, EOFError, SkywardError):
            for number in range(1, CONNECTIONS):
                for direction in ("send", "receive"):
                    if not connections.takes_stripes(attempt):
                        return
                    hello.stripe, hello.direction = number, direction
                    end, _, _ = connect_one(
                        self._endpoint,
                        hello,
                        self._context,
                        self._name,
                        AGAIN_SECONDS,
                        self._dial,
                    )
                    to_send = direction == "send"
                    connections.add_stripe(attempt, number, end, to_send=to_send)


@functools.cache
def my_versions() -> dict[str, str]:
    """The versions that this end runs; the handshake sends them to the other end."""
    versions = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "protocol": str(PROTOCOL),
        # Of the code that runs here: an installer may know it by another name, or not at all.
        "skyward": sys.modules["skyward"].__version__,
    }
    for package in ("cloudpickle", "numpy", "torch"):
        if version := _version(package):
            versions[package] = version
    return versions


def _version(package: str) -> str:
    """The version of a package; empty if it is not installed.

    Taken from the name of the folder that installers make. `importlib.metadata` reads the files in
    it, for which an agent would spend a tenth of its start.
    """
    named = re.compile(rf"{package}-(\d.*)\.dist-info")
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if found := named.fullmatch(name):
                    return found[1]
    if find_spec(package) is None:
        return ""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def check_compatible(client: dict[str, str], worker: dict[str, str], where: str) -> list[str]:
    """Raise if client and worker cannot work together; otherwise return warnings for the user."""
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
