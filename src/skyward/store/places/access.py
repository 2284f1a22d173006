"""Access to a model server: the token, where it comes from, and which addresses are private."""

from __future__ import annotations

import ipaddress
import os
import re

from skyward.checks import argument
from skyward.errors import ConfigurationError

TOKEN = "SKYWARD_STORE_TOKEN"
"""The environment variable that holds the token, so that no command line shows it."""
AUTHORITY = "SKYWARD_STORE_CA"
"""The environment variable that names a file of certificates to trust besides the system's."""
MARK = "Skyward-Store"
"""The header by which a client recognises the answers of a model server."""
PROTOCOL = "1"

_TOKEN = re.compile(r"[!-~]+")


def chosen_token(token: str | None) -> str | None:
    """The given token, or the environment's; raises if it does not fit in a header."""
    return _checked(token if token is not None else os.environ.get(TOKEN) or None)


def guarding_token(token: str | None) -> str | None:
    """The same for a server: an empty variable is an error, and does not open the store to all."""
    return _checked(token if token is not None else os.environ.get(TOKEN))


def store_at(url: object, *, token: bool = False) -> str:
    """A store in messages: `ModelStore('models')` in Python, `--store models` on the command line.

    >>> store_at("models", token=True)
    "ModelStore('models', token=...)"
    """
    python = f"ModelStore({url!r}, token=...)" if token else f"ModelStore({url!r})"
    return argument("store", url, python=python)


def _checked(found: str | None) -> str | None:
    if found is not None and (not isinstance(found, str) or not _TOKEN.fullmatch(found)):
        raise ConfigurationError(
            f"{argument('token')}: not a token, which is one or more letters, digits and signs of "
            f"ASCII without spaces; correct it, or {TOKEN} if you passed none"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
