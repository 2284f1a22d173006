"""Instances that take time to boot, though the testbed's are up at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlencode
from xml.etree import ElementTree

from .aws_messages import Call

XMLNS = "http://ec2.amazonaws.com/doc/2016-11-15"
ElementTree.register_namespace("", XMLNS)


def rewritten(call: Call, changed: Mapping[str, str]) -> bytes:
    """The body of a call with some parameters changed."""
    version = {"Action": call.action, "Version": "2016-11-15"}
    return urlencode({**version, **call.parameters, **changed}).encode()


def widened(call: Call) -> bytes:
    """A request for instances, in whatever state that one which boots may have in moto."""
    changed = {}
    for key, name in call.parameters.items():
        if name == "instance-state-name" and (number := re.fullmatch(r"Filter\.(\d+)\.Name", key)):
            values = rf"Filter\.{number[1]}\.Value"
            after = len(call.listed(values)) + 1
            for index, state in enumerate(("pending", "running"), after):
                changed[f"Filter.{number[1]}.Value.{index}"] = state
    return rewritten(call, changed)


def without(body: bytes, hidden: set[str]) -> bytes:
    """A list of instances in which some are missing."""
    tree = ElementTree.fromstring(body)
    tag = f"{{{XMLNS}}}"
    for items in tree.iter(f"{tag}instancesSet"):
        for item in list(items):
            if item.findtext(f"{tag}instanceId") in hidden:
                items.remove(item)
    return ElementTree.tostring(tree)


def as_booting(body: bytes, booting: set[str], shown: list[str] | None) -> bytes:
    """A list of instances in which some are still pending, and have no public address yet."""
    tree = ElementTree.fromstring(body)
    tag = f"{{{XMLNS}}}"
    for items in tree.iter(f"{tag}instancesSet"):
        for item in list(items):
            state = item.find(f"{tag}instanceState/{tag}name")
            code = item.find(f"{tag}instanceState/{tag}code")
            assert state is not None
            assert code is not None
            if item.findtext(f"{tag}instanceId") in booting and state.text == "running":
                state.text, code.text = "pending", "0"
                for name in ("ipAddress", "dnsName"):
                    if (child := item.find(tag + name)) is not None:
                        item.remove(child)
            if shown is not None and state.text not in shown:
                items.remove(item)
    return ElementTree.tostring(tree)
