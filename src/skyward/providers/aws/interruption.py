"""Run on an instance: ends, with a line, when AWS says that it takes the instance back.

The line is "SECONDS REASON". Asks the instance's metadata service, which
`AWS_EC2_METADATA_SERVICE_ENDPOINT` may name, as for AWS's own programs.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

PAUSE_SECONDS = 5.0
_SERVICE = "http://169.254.169.254"


def _ask(path: str, *, method: str = "GET", **headers: str) -> str:
    where = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _SERVICE
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{where.rstrip('/')}{path}", headers=named, method=method)
    # A proxy would not reach the service, and would see the token.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=3) as answer:
        return str(answer.read().decode())


def notice() -> tuple[float, str] | None:
    """In how many seconds the instance is taken back, and why; None if it is not."""
    token = _ask("/latest/api/token", method="PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    try:
        told = json.loads(
            _ask("/latest/meta-data/spot/instance-action", X_aws_ec2_metadata_token=token)
        )
    except urllib.error.HTTPError as problem:
        if problem.code == 404:
            return None
        raise
    when = datetime.fromisoformat(str(told["time"]).replace("Z", "+00:00"))
    left = max(0.0, (when - datetime.now(UTC)).total_seconds())
    return left, f"AWS will {told['action']} the spot instance"


def main() -> None:
    """Wait for the notice, and print it."""
    while True:
        try:
            found = notice()
        except (OSError, ValueError, KeyError):
            # The service is busy, or there is none.
            found = None
        if found is not None:
            print(f"{found[0]:.0f} {found[1]}", flush=True)
            return
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
