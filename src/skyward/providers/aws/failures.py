"""Failures: what an error of AWS means for the user, and what to do about it."""

from __future__ import annotations

import re
from typing import Any

from skyward.errors import SkywardError, UnavailableError, UnreachableError

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
_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
_DENIED_ACTION = re.compile(r"perform(?:ing)?:? ([\w-]+:\w+)")

_QUOTAS = (
    (re.compile(r"p[5-9]"), "P", "L-417A185B", "P5", "L-C4BD4855"),
    (re.compile(r"p\d"), "P", "L-417A185B", "P4, P3 and P2", "L-7212CCBC"),
    (re.compile(r"(?:gr?|vt)\d"), "G and VT", "L-DB2E81BA", "G and VT", "L-3819A6DF"),
    (re.compile(r"trn\d"), "Trn", "L-2C3B7624", "Trn", "L-6B0D517C"),
    (re.compile(r"inf\d"), "Inf", "L-1945791B", "Inf", "L-B5D1601B"),
    (re.compile(r"dl\d"), "DL", "L-6E869C2A", "DL", "L-85EED4F7"),
    (re.compile(r"hpc\d"), "HPC", "L-F7808C92", "HPC", "L-F7808C92"),
    (re.compile(r"x\d"), "X", "L-7295265B", "X", "L-E3A00192"),
    (re.compile(r"f\d"), "F", "L-74FC7D96", "F", "L-88CF9481"),
    (re.compile(r"u\d?-"), "High Memory", "L-43DA4232", "High Memory", "L-43DA4232"),
    (re.compile(""), _STANDARD, "L-1216C47A", _STANDARD, "L-34B43A08"),
)
"""Which types share a quota: its name and code on demand, and for spot."""


class RequestError(UnavailableError):
    """AWS refused a request."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.passing = code in CAPACITY | PRICE | UNCERTAIN | NOT_YET

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.code)


def explained(
    problem: Exception, *, service: str, action: str, profile: str | None
) -> SkywardError:
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
    response = getattr(problem, "response", None)
    if not isinstance(response, dict):
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


def quota_of(instance_type: str, *, spot: bool) -> tuple[str, str]:
    """The name and the code of the quota that limits a type."""
    words, code, spot_words, spot_code = next(
        quota for types, *quota in _QUOTAS if types.match(instance_type)
    )
    if spot:
        return f"All {spot_words} Spot Instance Requests", spot_code
    return f"Running On-Demand {words} instances", code


def passed_over(problem: RequestError, where: str) -> str:
    """Why an offer was passed over, in a few words."""
    if problem.code in PRICE:
        return f"{where}: its spot price is above max_hourly_cost"
    if problem.code in ("Unsupported", "UnsupportedOperation"):
        return f"{where}: not sold there"
    if problem.code == "InsufficientFreeAddressesInSubnet":
        return f"{where}: its subnet has too few free addresses"
    return f"{where}: no capacity"
