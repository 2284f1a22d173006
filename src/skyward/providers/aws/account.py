"""An AWS account: requests with the user's credentials, and what it means if AWS refuses them."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from skyward.errors import ConfigurationError, SkywardError, UnavailableError, UnreachableError
from skyward.wire.handshake import my_versions

CONNECTIONS = 32
ATTEMPTS = 5
END_PAUSE_SECONDS = 2.0
_NAMED = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""The variables with which a user chooses credentials."""
THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException"})
"""AWS did not look at the request, because there were too many."""
EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
)
DENIED = frozenset(
    {
        "UnauthorizedOperation",
        "AccessDenied",
        "AccessDeniedException",
        "Client.UnauthorizedOperation",
    }
)
QUOTA = frozenset(
    {
        *("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"),
        *("ReservedInstancesLimitExceeded", "SpotInstanceCountExceeded"),
    }
)
CAPACITY = frozenset(
    {
        *("InsufficientInstanceCapacity", "InsufficientCapacity", "InsufficientHostCapacity"),
        *("InsufficientReservedInstanceCapacity", "ReservationCapacityExceeded"),
        *(
            "Unsupported",
            "UnsupportedOperation",
            "UnfulfillableCapacity",
        ),
        "InsufficientFreeAddressesInSubnet",
    }
)
"""Another zone or another type may work."""
UNCERTAIN = frozenset(
    {
        *("InternalError", "InternalFailure", "InternalServerError", "Unavailable"),
        *("ServiceUnavailable", "500", "502", "503", "504"),
    }
)
"""Whether the request was fulfilled is not known."""
NOT_YET = frozenset(
    {
        *("InvalidGroup.NotFound", "InvalidGroupId.NotFound", "InvalidKeyPair.NotFound"),
        *("InvalidPlacementGroup.Unknown", "InvalidPermission.NotFound"),
    }
)
"""What was just made: AWS tells its parts of it one by one."""
_IN_USE = frozenset({"DependencyViolation", "InvalidGroup.InUse", "InvalidPlacementGroup.InUse"})
_AGAIN: Mapping[str, tuple[frozenset[str], Sequence[float]]] = {
    "RunInstances": (UNCERTAIN | NOT_YET | THROTTLED, (1.0, 2.0, 4.0)),
    "AuthorizeSecurityGroupIngress": (NOT_YET, (0.5, 1.0, 2.0, 4.0)),
    "AuthorizeSecurityGroupEgress": (NOT_YET, (0.5, 1.0, 2.0, 4.0)),
    "DeleteSecurityGroup": (_IN_USE, (2.0,) * 60),
    "DeletePlacementGroup": (_IN_USE, (2.0,) * 60),
}
"""What the SDK repeats besides what it would: after which errors, and with which pauses."""
PRICE = frozenset({"SpotMaxPriceTooLow", "BidPriceTooLow"})
NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError"})
_LOGIN_NEEDED = frozenset(
    {
        *("UnauthorizedSSOTokenError", "SSOTokenLoadError", "SSOError", "TokenRetrievalError"),
        *(
            "CredentialRetrievalError",
            "PendingAuthorizationExpiredError",
            "RefreshWithMFAUnsupportedError",
        ),
        *("LoginRefreshRequired", "LoginTokenLoadError", "LoginInsufficientPermissions"),
    }
)
RENEWABLE = EXPIRED | NO_CREDENTIALS | _LOGIN_NEEDED
"""Errors after which the user may have got new credentials."""
_WRONG_KEY = frozenset(
    {"AuthFailure", "InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException"}
)
_PREFIXES = {"service-quotas": "servicequotas"}
"""How IAM calls a service, where it does not use the name that the SDK uses."""
_DENIED_ACTION = re.compile(r"perform(?:ing)?:? ([\w-]+:\w+)")


class Account:
    """One region of an account; any thread may make requests.

    The SDK repeats what fails for the moment.
    """

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
        fine: Collection[str] = (),
        **arguments: Any,
    ) -> Any:
        """Make a request, such as `call("ec2", "describe_subnets")`, and return its answer.

        `fine` are codes of errors that say that it is so already: then the answer is empty.
        """
        try:
            return self._use(
                *(service, operation, region, attempts),
                lambda client: getattr(client, operation)(**arguments),
            )
        except RequestError as problem:
            if problem.code not in fine:
                raise
            return {}

    def pages(
        self,
        service: str,
        operation: str,
        what: str,
        *,
        region: str = "",
        attempts: int = ATTEMPTS,
        **arguments: Any,
    ) -> list[Any]:
        """What all pages of an answer have, such as "Reservations[].Instances[]" (JMESPath)."""
        return self._use(  # type: ignore[no-any-return]
            *(service, operation, region, attempts),
            lambda client: list(client.get_paginator(operation).paginate(**arguments).search(what)),
        )

    def wait_for_end(self, instances: Sequence[str], seconds: float) -> None:
        """Wait until instances have ended; raises if they have not."""
        waiting = {"Delay": END_PAUSE_SECONDS, "MaxAttempts": int(seconds / END_PAUSE_SECONDS)}
        self._use(
            *("ec2", "describe_instances", "", ATTEMPTS),
            lambda client: client.get_waiter("instance_terminated").wait(
                InstanceIds=list(instances), WaiterConfig=waiting
            ),
        )

    def _use(
        self,
        service: str,
        operation: str,
        region: str,
        attempts: int,
        ask: Callable[[Any], Any],
    ) -> Any:
        """What is asked of a client of the SDK.

        If there are no credentials, or they have expired, reads them anew and asks once more: the
        user may have logged in meanwhile.
        """
        session = self._opened()
        import botocore.exceptions
        import botocore.parsers

        action = operation.title().replace("_", "")
        for renewed in (False, True):
            try:
                client = self._client(session, service, region or self.region, attempts)
                action = client.meta.method_to_api_mapping[operation]
                return ask(client)
            except (
                botocore.exceptions.BotoCoreError,
                botocore.exceptions.ClientError,
                botocore.parsers.ResponseParserError,
            ) as problem:
                failure = explained(problem, service, action, self.profile)
                if renewed or getattr(failure, "code", "") not in RENEWABLE:
                    raise failure from problem
            with self._lock:
                self._session = None
                self._clients.clear()
            session = self._opened()
        raise AssertionError

    def _client(self, session: Any, service: str, region: str, attempts: int) -> Any:
        from botocore.config import Config

        key = service, region, attempts
        with self._lock:
            client = self._clients.get(key)
            if client is None:
                client = session.client(
                    service,
                    region_name=region,
                    config=Config(
                        # Not adaptive: that mode is made for many requests a second, and after
                        # one that was too many, a launch of ten requests took 17 s longer.
                        retries={"mode": "standard", "total_max_attempts": attempts},
                        connect_timeout=10,
                        read_timeout=60,
                        max_pool_connections=CONNECTIONS,
                        user_agent_extra=f"skyward/{my_versions()['skyward']}",
                    ),
                )
                for each in _AGAIN if service == "ec2" else ():
                    client.meta.events.register(f"needs-retry.ec2.{each}", _again)
                self._clients[key] = client
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
                    there = ", ".join(profiles()) or "none"
                    raise ConfigurationError(
                        f"AWS: {problem}; there are: {there}; `aws configure sso` makes one"
                    ) from None
            return self._session


def _again(
    *,
    operation: Any,
    attempts: int,
    response: tuple[Any, Mapping[str, Any]] | None,
    caught_exception: Exception | None,
    **_: Any,
) -> float | None:
    """How long the SDK is to wait before it repeats a request of `_AGAIN`; None if it is not to."""
    codes, pauses = _AGAIN[operation.name]
    code = response[1].get("Error", {}).get("Code") if response is not None else ""
    # Without an answer, the request may have arrived; the token of a launch makes that harmless.
    lost = caught_exception is not None and operation.name == "RunInstances"
    return pauses[attempts - 1] if attempts <= len(pauses) and (lost or code in codes) else None


def is_used(profile: str | None) -> bool:
    """Whether the user has named a profile or a key, or has profiles on this machine."""
    if profile is not None or any(os.environ.get(each) for each in _NAMED):
        return True
    return bool(profiles())


def profiles() -> list[str]:
    """The names of the user's profiles on this machine."""
    if importlib.util.find_spec("boto3") is None:
        return []
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


# What AWS says.


class RequestError(UnavailableError):
    """AWS refused a request."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.passing = code in CAPACITY | PRICE | UNCERTAIN | NOT_YET

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.code)


def explained(problem: Exception, service: str, action: str, profile: str | None) -> SkywardError:
    """An exception of the SDK as an error of ours; `action` is the API's name of the call."""
    kind = type(problem).__name__
    named = f" --profile {profile}" if profile else ""
    login = f"`aws sso login{named}`"
    if kind in NO_CREDENTIALS:
        return RequestError(
            f"no AWS credentials were found for {_who(profile)}: run `aws configure{named}` or "
            f"{login}, set AWS_PROFILE, or run this where an instance role gives them",
            kind,
        )
    if kind in _LOGIN_NEEDED:
        return RequestError(
            f"the AWS login of {_who(profile)} has expired: run {login} and try again; a running "
            "pool goes on with the new login by itself, and `sky ps` works without one",
            kind,
        )
    if kind in ("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError") or kind in (
        *("ConnectionClosedError", "ProxyConnectionError", "SSLError", "HTTPClientError"),
    ):
        return UnreachableError(
            f"AWS does not answer: {problem}; see that this machine reaches it, and that the "
            "region's name is right"
        )
    if kind == "ResponseParserError":
        return RequestError(f"AWS answered {service} {action} with what is no answer", kind)
    response = getattr(problem, "response", None) or getattr(problem, "last_response", None)
    if not isinstance(response, dict) or "Error" not in response:
        return RequestError(f"AWS, {service} {action}: {problem}", kind)
    error = response.get("Error", {})
    code, said = str(error.get("Code", "")), str(error.get("Message", ""))
    if code.isdigit():
        # No answer of AWS's, but a page of something in between.
        return RequestError(f"AWS, {service} {action}: its answer was the status {code}", code)
    return RequestError(_words(code, said, service, action, profile, login), code)


def _words(code: str, said: str, service: str, action: str, profile: str | None, login: str) -> str:
    if code in EXPIRED:
        return (
            f"the AWS credentials of {_who(profile)} have expired: run {login}, or get new ones as "
            "you got these, and try again; a running pool goes on with the new ones by itself, and "
            "`sky ps` works without them"
        )
    if code in _WRONG_KEY:
        return (
            f"AWS does not accept the credentials of {_who(profile)} ({code}): see "
            "`aws sts get-caller-identity`, and the clock of this machine"
        )
    if code in DENIED:
        found = _DENIED_ACTION.search(said)
        name = found[1] if found else f"{_PREFIXES.get(service, service)}:{action}"
        return (
            f"{_who(profile)} may not do {name}: ask for that permission; docs/aws.md has the "
            f"whole policy. AWS said: {said}"
        )
    if code == "OptInRequired":
        return f"the account has not signed up for this: {said}; do that in the AWS console first"
    if code in ("InvalidAMIID.NotFound", "InvalidAMIID.Malformed", "InvalidAMIID.Unavailable"):
        return f"{said}; AMIs have other ids in other regions: name one of this region with ami="
    if code in ("InvalidSubnetID.NotFound", "InvalidSubnetId.NotFound"):
        return f"{said}; name a subnet of this region with subnet=, or leave it out"
    if code == "InvalidCapacityReservationId.NotFound":
        return f"{said}; name one of this region with reservation=, or leave it out"
    if code in ("NoSuchEntity", "InvalidIamInstanceProfileArn.Malformed"):
        return f"{said}; name a profile of this account with instance_profile=, or leave it out"
    return f"AWS, {service} {action}: {said or 'no reason given'} ({code})"


def _who(profile: str | None) -> str:
    return f"the profile {profile!r}" if profile else "the default profile"
