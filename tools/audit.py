"""Known vulnerabilities of pinned packages, by pip-audit, wherever its service can be reached.

python tools/audit.py requirements-release.txt -- pip-audit

Fails if a package has one, and if pip-audit fails. Where the service cannot be reached, or does not
know the packages, it says so: then nothing was looked up, and nothing was found.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

SECONDS = 180.0
ANSWER_SECONDS = 15
OUT_OF_REACH = re.compile(
    "could not connect|connection (refused|reset|aborted)|(network|host) is unreachable|"
    "no route to host|name resolution|name or service not known|nodename nor servname|"
    r"timed out|proxyerror|tunnel|\b50[234]\b.*(server error|gateway|unavailable)",
    re.IGNORECASE,
)
"""What pip-audit, or uv that installs it, says where there is no network or no service."""


def main(arguments: list[str]) -> str:
    """What was found, as the last line of a run that passes; exits with what must be mended."""
    lock, _, *command = arguments
    options = ["--disable-pip", "--require-hashes", "--progress-spinner=off", "--format=json"]
    command += [*options, f"--timeout={ANSWER_SECONDS}", "--requirement", lock]
    try:
        code, said, errors = _run(command)
    except subprocess.TimeoutExpired:
        return f"nothing was looked up: no answer within {SECONDS:.0f} s"
    try:
        packages: list[dict[str, Any]] = json.loads(said)["dependencies"]
    except (json.JSONDecodeError, KeyError):
        packages = []
    flaws = [
        f"{each['name']} {each['version']}: {flaw['id']}, mended in "
        f"{', '.join(flaw['fix_versions']) or 'no version yet'}"
        for each in packages
        for flaw in each.get("vulns", ())
    ]
    if flaws:
        sys.exit("\n".join([*flaws, "take newer versions in constraints-dev.txt, then: make lock"]))
    if code or not packages:
        if OUT_OF_REACH.search(errors):
            return f"nothing was looked up: {errors.strip().splitlines()[-1]}"
        sys.exit(f"{errors}pip-audit ended with {code}, and looked nothing up")
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    known = len(packages) - len(unknown)
    if not known:
        return f"nothing was looked up: of these {len(unknown)} packages the service says nothing"
    if not unknown:
        return f"{known} packages, without known vulnerabilities"
    return (
        f"{known} packages, without known vulnerabilities; nothing is said of: {', '.join(unknown)}"
    )


def _run(command: list[str]) -> tuple[int, str, str]:
    """Run a program to its end; what it has started ends with it if it takes too long."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            said, errors = program.communicate(timeout=SECONDS)
        except BaseException:
            # Also a Ctrl-C, which does not reach another session.
            os.killpg(program.pid, signal.SIGKILL)
            raise
    return program.returncode, said, errors


if __name__ == "__main__":
    print(f"audit: {main(sys.argv[1:])}")
