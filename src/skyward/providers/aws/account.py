"""An AWS account: requests with the user's credentials, which are read again when they expire."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import time
from typing import Any

from skyward.errors import ConfigurationError, UnavailableError, UnreachableError
from skyward.providers.aws import failures
from skyward.wire.versions import my_versions

CONNECTIONS = 32
ATTEMPTS = 4
_THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException"})
_NAMED = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""The variables with which a user chooses credentials."""


class Account:
    """One region of an account; any thread may make requests."""

    def __init__(self, region: str | None = None, profile: str | None = None) -> None:
        self.profile = profile
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[tuple[str, str, int], Any] = {}
        # The SDK is slow to load, and does not read AWS_REGION, which the command line does.
        told = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        mine = told if profile is None else None
        self.region: str = region or mine or self._opened().region_name or ""
        if not self.region:
            raise ConfigurationError(
                "AWS(): no region; write AWS(region='us-east-1'), or set AWS_REGION or the "
                "profile's region with `aws configure`"
            )

    @functools.cached_property
    def id(self) -> str:
        """The number of the account; empty if it cannot be asked for."""
        try:
            # Needs no permission.
            return str(self.call("sts", "get_caller_identity", attempts=2)["Account"])
        except (UnavailableError, UnreachableError):
            return ""

    @property
    def endpoint(self) -> str:
        """Where requests go if not to AWS itself; empty otherwise."""
        return os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL") or ""

    def call(
        self,
        service: str,
        operation: str,
        *,
        region: str = "",
        attempts: int = ATTEMPTS,
        **arguments: Any,
    ) -> Any:
        """Make a request, such as `call("ec2", "describe_subnets")`, and return its answer.

        If there are no credentials, or they have expired, reads them anew and tries once more: the
        user may have logged in meanwhile. With one attempt, only a request that AWS did not look
        at, because there were too many, is repeated.
        """
        renewed = False
        pauses = iter((0.5, 1.0, 2.0, 4.0, 8.0))
        while True:
            try:
                return self._try(service, operation, region or self.region, attempts, arguments)
            except failures.RequestError as problem:
                pause = next(pauses, None) if problem.code in _THROTTLED else None
                if pause is not None:
                    time.sleep(pause)
                elif problem.code in failures.RENEWABLE and not renewed:
                    renewed = True
                    with self._lock:
                        self._session = None
                        self._clients.clear()
                else:
                    raise

    def pages(
        self, service: str, operation: str, key: str, *, region: str = "", **arguments: Any
    ) -> list[Any]:
        """What all pages of an answer have below a key."""
        found: list[Any] = []
        while True:
            page = self.call(service, operation, region=region, **arguments)
            found += page.get(key, [])
            if not page.get("NextToken"):
                return found
            arguments["NextToken"] = page["NextToken"]

    def _try(
        self, service: str, operation: str, region: str, attempts: int, arguments: dict[str, Any]
    ) -> Any:
        session = self._opened()
        import botocore.exceptions
        import botocore.parsers

        action = operation.title().replace("_", "")
        try:
            client = self._client(session, service, region, attempts)
            action = client.meta.method_to_api_mapping[operation]
            return getattr(client, operation)(**arguments)
        except (
            botocore.exceptions.BotoCoreError,
            botocore.exceptions.ClientError,
            botocore.parsers.ResponseParserError,
        ) as problem:
            raise failures.explained(
                problem, service=service, action=action, profile=self.profile
            ) from problem

    def _client(self, session: Any, service: str, region: str, attempts: int) -> Any:
        from botocore.config import Config

        key = service, region, attempts
        with self._lock:
            client = self._clients.get(key)
            if client is None:
                client = self._clients[key] = session.client(
                    service,
                    region_name=region,
                    config=Config(
                        retries={"mode": "standard", "total_max_attempts": attempts},
                        connect_timeout=10,
                        read_timeout=60,
                        max_pool_connections=CONNECTIONS,
                        user_agent_extra=f"skyward/{my_versions()['skyward']}",
                    ),
                )
            return client

    def _opened(self) -> Any:
        """The SDK's session, with credentials that it has read."""
        if importlib.util.find_spec("boto3") is None:
            raise ConfigurationError(
                "AWS needs the package boto3; install it with: pip install 'skyward-torch[aws]'"
            )
        import boto3
        import botocore.exceptions

        with self._lock:
            if self._session is None:
                try:
                    self._session = boto3.Session(profile_name=self.profile)
                except botocore.exceptions.ProfileNotFound as problem:
                    there = ", ".join(_profiles()) or "none"
                    raise ConfigurationError(
                        f"AWS: {problem}; there are: {there}; `aws configure sso` makes one"
                    ) from None
            return self._session


def is_used(profile: str | None) -> bool:
    """Whether the user has named a profile or a key, or has profiles on this machine."""
    if profile is not None or any(os.environ.get(each) for each in _NAMED):
        return True
    return importlib.util.find_spec("boto3") is not None and bool(_profiles())


def _profiles() -> list[str]:
    import botocore.session

    # Not of a `boto3.Session`, which AWS_PROFILE may keep from being made.
    found: list[str] = botocore.session.Session().available_profiles
    return found


def shared_account(region: str | None, profile: str | None) -> Account:
    """The account that all pools of this process share, while its environment is the same.

    AWS reads credentials, profiles and endpoints from environment variables.
    """
    mine = tuple(sorted(each for each in os.environ.items() if each[0].startswith("AWS_")))
    return _shared_account(region, profile, mine)


@functools.lru_cache(maxsize=8)
def _shared_account(
    region: str | None, profile: str | None, _: tuple[tuple[str, str], ...]
) -> Account:
    return Account(region, profile)
