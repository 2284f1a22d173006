"""Run as the proxy command of an SSH connection: a session of AWS Systems Manager to an instance.

AWS's own session-manager-plugin carries the bytes; it must be installed where the client runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

from skyward.providers.aws.account import Account

PLUGIN = "session-manager-plugin"
RESPONSE = "AWS_SSM_START_SESSION_RESPONSE"
TOKEN_IN_ENVIRONMENT = (1, 2, 497)
"""The first version of the plugin that reads the session from an environment variable."""


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
    told = json.dumps({name: answer[name] for name in ("SessionId", "StreamUrl", "TokenValue")})
    mine = dict(os.environ)
    if _version() >= TOKEN_IN_ENVIRONMENT:
        # The token must not be seen in the list of processes.
        mine[RESPONSE], told = told, RESPONSE
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_SSM")
        or os.environ.get("AWS_ENDPOINT_URL")
        or f"https://ssm.{region}.{_domain(region)}"
    )
    arguments = [told, region, "StartSession", profile, json.dumps(asked), endpoint]
    os.execvpe(PLUGIN, [PLUGIN, *arguments], mine)


def _version() -> tuple[int, ...]:
    """The version of AWS's plugin; nothing if it does not say."""
    said = subprocess.run([PLUGIN, "--version"], capture_output=True, text=True, check=False)
    return tuple(int(part) for part in said.stdout.strip().split(".") if part.isdigit())


def _domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


if __name__ == "__main__":
    main()
