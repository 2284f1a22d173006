"""Identity: both ends of a channel prove who they are before they read anything else.

On one host, the socket is a Unix socket in a private directory, and the kernel names the peer's
user. Over a network, both ends use TLS 1.3 with certificates of the pool's own short-lived
authority.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import struct
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyward import kernel
from skyward.errors import AuthenticationError

LIFETIME = datetime.timedelta(days=30)
KEPT_LIFETIME = datetime.timedelta(days=365)
"""How long the certificates of a kept pool are good for."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
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
            # Nobody would read the tickets on a connection that the client only sends on.
            context.num_tickets = 0
        with _readable(self.certificate + self.key) as chain:
            context.load_cert_chain(chain)
        return context


@dataclass(frozen=True, slots=True)
class SavedAuthority:
    """The certificate and the key of a pool's authority, both PEM."""

    certificate: str
    key: str = field(repr=False)


_shared: weakref.WeakKeyDictionary[Credentials, ssl.SSLContext] = weakref.WeakKeyDictionary()


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """The context for connections to any process of a pool, made once.

    A client has several connections to each node, and a context takes 100 KB and a millisecond.
    """
    context = _shared.get(credentials)
    if context is None:
        context = _shared[credentials] = credentials.context(server=False)
    return context


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

If the process of a device connects to that of another device, the number of their link follows."""


def certified_name(end: ssl.SSLSocket) -> str:
    """The name in the certificate of the other end."""
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
