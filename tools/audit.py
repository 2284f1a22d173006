"""Known vulnerabilities of pinned packages, by pip-audit, wherever its service can be reached.

python tools/audit.py requirements-release.txt -- pip-audit

Fails if a package has one. Where the service does not answer, or does not know the packages, it
says so: then nothing was looked up, and nothing was found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SECONDS = 180.0
ANSWER_SECONDS = 15


def main(arguments: list[str]) -> str:
    """What was found, as the last line of a run that passes; exits with what must be mended."""
    lock, _, *command = arguments
    options = ["--disable-pip", "--require-hashes", "--progress-spinner=off", "--format=json"]
    command += [*options, f"--timeout={ANSWER_SECONDS}", "--requirement", lock]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"nothing was looked up: no answer within {SECONDS:.0f} s"
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError):
        last = (done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode}"])[-1]
        return f"nothing was looked up: {last}"
    flaws = [
        f"{each['name']} {each['version']}: {flaw['id']}, mended in "
        f"{', '.join(flaw['fix_versions']) or 'no version yet'}"
        for each in packages
        for flaw in each.get("vulns", ())
    ]
    if flaws:
        sys.exit("\n".join([*flaws, "take newer versions in constraints-dev.txt, then: make lock"]))
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    known = len(packages) - len(unknown)
    if not known:
        return f"nothing was looked up: of these {len(unknown)} packages the service says nothing"
    if not unknown:
        return f"{known} packages, without known vulnerabilities"
    return (
        f"{known} packages, without known vulnerabilities; nothing is said of: {', '.join(unknown)}"
    )


if __name__ == "__main__":
    print(f"audit: {main(sys.argv[1:])}")
