"""Errors of AWS: what it says with each code, and when a gateway answers with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .aws_messages import Call

MESSAGES = {
    "InsufficientInstanceCapacity": (
        500,
        "We currently do not have sufficient {type} capacity in the Availability Zone you "
        "requested ({zone}). Our system will be working on provisioning additional capacity.",
    ),
    "VcpuLimitExceeded": (
        400,
        "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the "
        "instance bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    ),
    "MaxSpotInstanceCountExceeded": (400, "Max spot instance count exceeded"),
    "SpotMaxPriceTooLow": (
        400,
        "Your Spot request price of 0.001 is lower than the minimum required Spot request "
        "fulfillment price of 0.0416.",
    ),
    "UnauthorizedOperation": (
        403,
        "You are not authorized to perform this operation. User: "
        "arn:aws:iam::123456789012:user/tester is not authorized to perform: {action} because no "
        "identity-based policy allows the {action} action.",
    ),
    "AccessDeniedException": (
        400,
        "User: arn:aws:iam::123456789012:user/tester is not authorized to perform: {action} "
        "because no identity-based policy allows the {action} action",
    ),
    "RequestExpired": (400, "Request has expired."),
    "ExpiredToken": (403, "The security token included in the request is expired"),
    "ExpiredTokenException": (400, "The security token included in the request is expired"),
    "AuthFailure": (401, "AWS was not able to validate the provided access credentials"),
    "RequestLimitExceeded": (503, "Request limit exceeded."),
    "Unsupported": (
        400,
        "Your requested instance type ({type}) is not supported in your requested Availability "
        "Zone ({zone}). Please retry your request by not specifying an Availability Zone.",
    ),
}
"""What AWS says with an error's code, and with which status. botocore repeats a call after 500."""


@dataclass
class Fault:
    """An error in place of an answer."""

    action: str
    code: str
    message: str
    status: int
    when: Callable[[Call], bool]
    left: int | None
    """How many times more; None for always."""
    hits: int = 0

    def takes(self, call: Call) -> bool:
        """Whether it answers a call; counts that it does."""
        if self.left == 0 or self.action not in ("*", call.action) or not self.when(call):
            return False
        self.left = None if self.left is None else self.left - 1
        self.hits += 1
        return True
