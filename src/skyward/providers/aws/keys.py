"""The keys of a pool on AWS: one to log in with, and one that its instances prove themselves with.

They lie in the user's state folder until the pool is removed, so that `sky down` can log in after
the client was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyward.errors import ConfigurationError, PoolError, PoolStartError
from skyward.providers.aws import tags
from skyward.providers.state import state_folder

_FILES = ("key", "host_key", "known_hosts")
"""The files of a pool's keys. The last is written last: with it, the others are complete."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The files of a pool's keys."""

    folder: Path
    own: str | None = None
    """A private key of the user's, which is used instead of a new one."""

    @property
    def private(self) -> str:
        """The path of the private key to log in with."""
        return self.own or str(self.folder / "key")

    @property
    def known_hosts(self) -> Path:
        """The file with the keys that the instances may have."""
        return self.folder / "known_hosts"

    @property
    def host_key(self) -> tuple[str, str]:
        """The key of the instances: its private half, and its public half."""
        public = self.known_hosts.read_text("ascii").splitlines()[0].partition(" ")[2]
        return (self.folder / "host_key").read_text("ascii"), public

    def public(self) -> str:
        """The public half of the key to log in with, in OpenSSH's form."""
        from cryptography.hazmat.primitives import serialization

        try:
            data = Path(self.private).expanduser().read_bytes()
            key = serialization.load_ssh_private_key(data, None)
        except OSError as problem:
            raise ConfigurationError(
                f"AWS(key={self.own!r}): {problem.strerror}; name a private key's file, or leave "
                "key out: then each pool has its own"
            ) from problem
        except (ValueError, TypeError) as problem:
            beside = Path(f"{self.private}.pub").expanduser()
            if beside.exists():
                # One with a passphrase, which the ssh agent has.
                return " ".join(beside.read_text("ascii").split()[:2])
            raise ConfigurationError(
                f"AWS(key={self.own!r}): not a private key that can be read: {problem}; put its "
                "public half beside it, or leave key out: then each pool has its own"
            ) from problem
        return (
            key.public_key()
            .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
            .decode("ascii")
        )

    def trust(self, addresses: Sequence[str], keys: Sequence[str]) -> None:
        """Let the addresses of an instance have other keys, which the API has told."""
        with self.known_hosts.open("a", encoding="ascii") as file:
            file.writelines(f"{','.join(addresses)} {key}\n" for key in keys)


def keys_of(pool: str, own: str | None) -> Keys:
    """The keys of a pool; they need not exist.

    Raises `ValueError` for what is no pool: the name may come from a tag that others have written.
    """
    if not tags.is_pool(pool):
        raise ValueError(f"no pool can be called {pool!r}")
    return Keys(state_folder() / "aws" / pool, own)


def make_keys(pool: str, own: str | None) -> Keys:
    """The keys of a pool, made if they do not exist."""
    keys = keys_of(pool, own)
    try:
        keys.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not keys.known_hosts.exists():
            if own is None:
                _write(keys.folder / "key", _new_key()[0])
            private, public = _new_key()
            _write(keys.folder / "host_key", private)
            # Last: with it, the others are complete.
            _write(keys.known_hosts, f"* {public}\n")
    except OSError as problem:
        raise PoolStartError(
            f"the pool's keys cannot be kept in {keys.folder}: {problem.strerror}; make that "
            "folder writable, or set SKYWARD_STATE to another"
        ) from problem
    keys.public()
    return keys


def exported(keys: Keys) -> dict[str, str]:
    """The texts of a pool's keys, by the names of their files; raises `PoolError` without them.

    A key of the user's own is not among them.
    """
    names = _FILES if keys.own is None else _FILES[1:]
    try:
        return {name: (keys.folder / name).read_text("ascii") for name in names}
    except OSError as problem:
        raise PoolError(
            f"the keys of this pool are not in {keys.folder}: {problem.strerror}; export its "
            "record on the machine that made it"
        ) from problem


def imported(keys: Keys, texts: Mapping[str, str]) -> None:
    """Write down the keys of a pool that another machine has made."""
    keys.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in _FILES:
        if name in texts:
            _write(keys.folder / name, texts[name])


def forget_keys(pool: str) -> None:
    """Remove the keys of a pool."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(keys_of(pool, None).folder)


def _new_key() -> tuple[str, str]:
    """A private key and its public half, both in OpenSSH's form."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private.decode("ascii"), public.decode("ascii")


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
