"""Run as the proxy command of an SSH connection: a session of AWS Systems Manager to an instance.

AWS's own session-manager-plugin carries the bytes; it must be installed where the client runs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

from skyward.providers.aws.account import Account

PLUGIN = "session-manager-plugin"


def command(instance: str, region: str, profile: str | None) -> tuple[str, ...]:
    """The command that connects its standard input and output to the SSH port of an instance."""
    return (sys.executable, "-P", "-m", __name__, instance, region, profile or "")


def is_installed() -> bool:
    """Whether AWS's plugin is there."""
    return shutil.which(PLUGIN) is not None


def main() -> None:
    """Start a session, and become the plugin that carries it."""
    instance, region, profile = sys.argv[1:4]
    account = Account(region, profile or None)
    asked: dict[str, Any] = {
        "Target": instance,
        "DocumentName": "AWS-StartSSHSession",
        "Parameters": {"portNumber": ["22"]},
    }
    answer = account.call("ssm", "start_session", **asked)
    told = {name: answer[name] for name in ("SessionId", "StreamUrl", "TokenValue")}
    endpoint = account.endpoint or f"https://ssm.{region}.amazonaws.com"
    arguments = [json.dumps(told), region, "StartSession", profile, json.dumps(asked), endpoint]
    os.execvp(PLUGIN, [PLUGIN, *arguments])


if __name__ == "__main__":
    main()
