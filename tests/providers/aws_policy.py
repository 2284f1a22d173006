"""An IAM policy, and whether it allows a call: as much of IAM as a policy for Skyward uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from .aws_messages import Call

ALWAYS_ALLOWED = {"sts:GetCallerIdentity"}
TagsOf = Callable[[Call], Sequence[Mapping[str, str]]]
"""The tags of every resource that a call names."""


def refused_action(policy: Mapping[str, Any], call: Call, tags_of: TagsOf) -> str | None:
    """The first action that a call needs and a policy does not allow; None if it may be made."""
    for action, context in _needs(call):
        if action not in ALWAYS_ALLOWED and not _allows(policy, action, call, context, tags_of):
            return action
    return None


def _needs(call: Call) -> list[tuple[str, dict[str, str]]]:
    """The actions that a call needs, each with what conditions may look at."""
    given = {f"aws:RequestTag/{key}": value for key, value in call.tags().items()}
    given["aws:RequestedRegion"] = call.region
    needs = [(call.name, given)]
    if call.service == "ec2" and call.action != "CreateTags" and call.tags():
        needs.append(("ec2:CreateTags", {**given, "ec2:CreateAction": call.action}))
    if any(key.startswith("IamInstanceProfile") for key in call.parameters):
        needs.append(("iam:PassRole", {**given, "iam:PassedToService": "ec2.amazonaws.com"}))
    return needs


def _allows(
    policy: Mapping[str, Any], action: str, call: Call, context: dict[str, str], tags_of: TagsOf
) -> bool:
    allowed = False
    for statement in _several(policy["Statement"]):
        names = _several(statement.get("Action", []))
        if not any(fnmatchcase(action.lower(), name.lower()) for name in names):
            continue
        if not _applies(statement.get("Condition", {}), call, context, tags_of):
            continue
        if statement["Effect"] == "Deny":
            return False
        allowed = True
    return allowed


def _applies(
    conditions: Mapping[str, Any], call: Call, context: dict[str, str], tags_of: TagsOf
) -> bool:
    for operator, keys in conditions.items():
        for key, wanted in keys.items():
            name, _, tag = key.partition("/")
            if name in ("ec2:ResourceTag", "aws:ResourceTag"):
                values: Sequence[str | None] = [tags.get(tag) for tags in tags_of(call)] or [None]
            else:
                values = [context.get(key)]
            expected = [str(each) for each in _several(wanted)]
            if not all(_holds(operator, value, expected) for value in values):
                return False
    return True


def _holds(operator: str, value: str | None, wanted: Sequence[str]) -> bool:
    if operator == "Null":
        return (value is None) == (wanted[0].lower() == "true")
    if operator == "StringEquals":
        return value is not None and value in wanted
    if operator == "StringNotEquals":
        return value is None or value not in wanted
    if operator == "StringLike":
        return value is not None and any(fnmatchcase(value, each) for each in wanted)
    raise NotImplementedError(f"the tests do not know the condition {operator!r} of a policy")


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
