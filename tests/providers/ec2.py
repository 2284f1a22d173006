"""The testbed's EC2 for tests, with this machine's own programs on its instances."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import platformdirs
import pytest

import skyward as sky

from .ssh_hosts import TESTBED

SOURCE = Path(sky.__file__).parents[1]
PORT = 25001
"""Where the gateway is, if that is free: with the same address, the catalogue's cache serves."""
_STATE = Path(os.environ.get("TESTBED_STATE", "/var/tmp/skyward-testbed"))
_held: list[IO[str]] = []
"""Locks, while this process uses the testbed's EC2: of Podman, and of the EC2 itself."""


def skip_if_absent() -> None:
    """Skip where there can be no EC2."""
    if os.environ.get("SKYWARD_EC2_ENDPOINT"):
        return
    if not (TESTBED / "ec2-up").exists():
        pytest.skip("no testbed here; name its folder with SKYWARD_TESTBED")
    if os.geteuid() != 0:
        pytest.skip("the testbed's EC2 needs root")


def start() -> str:
    """Bring the testbed's EC2 up, and return its URL; skips where it cannot start.

    `SKYWARD_EC2_ENDPOINT` names one that is up already, and stays so.
    """
    if given := os.environ.get("SKYWARD_EC2_ENDPOINT"):
        return given
    # Tests of containers have Podman for themselves, and take it down with all that runs in it.
    _hold("skyward-podman.lock")
    with _locked():
        users = _hold("skyward-ec2-in-use.lock")
        missing = [path for path in _paths() if not _is_bound(path)]
        if _is_up() and missing:
            if not (_is_unused(users) and _started_by_tests().exists()):
                pytest.skip(f"the testbed's EC2 is up without {missing[0]}: use ec2-down first")
            _down()
            fcntl.flock(users, fcntl.LOCK_SH)
        if not _is_up():
            _started_by_tests().touch()
        done = subprocess.run(
            [str(TESTBED / "ec2-up")],
            capture_output=True,
            text=True,
            timeout=400,
            env=os.environ | {"TESTBED_EC2_BIND": " ".join(_paths())},
        )
    if done.returncode != 0:
        pytest.skip(f"EC2 does not start here: {done.stderr.strip()[-300:]}")
    return dict(re.findall(r"export (\w+)='(.*)'", done.stdout))["AWS_ENDPOINT_URL"]


def stop() -> None:
    """Take the testbed's EC2 down, if tests started it and no other process uses it."""
    with _locked():
        if len(_held) == 2 and _is_unused(_held[1]) and _started_by_tests().exists():
            _down()
            # Podman stays up as long as others who share it are there.
            if _is_unused(_held[0]):
                subprocess.run([str(TESTBED / "podman-down")], capture_output=True, timeout=120)
        while _held:
            _held.pop().close()


def _down() -> None:
    subprocess.run([str(TESTBED / "ec2-down")], capture_output=True, timeout=120)
    _started_by_tests().unlink(missing_ok=True)


def _hold(name: str) -> IO[str]:
    _held.append(_file(name).open("w"))
    fcntl.flock(_held[-1], fcntl.LOCK_SH)
    return _held[-1]


def _is_unused(lock: IO[str]) -> bool:
    """Whether nobody else holds a lock that this process holds; if so, nobody can get it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # An attempt that fails may have given up the lock that there was.
        fcntl.flock(lock, fcntl.LOCK_SH)
        return False
    return True


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    with _file("skyward-ec2-starting.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _started_by_tests() -> Path:
    return _file("skyward-ec2-started-by-tests")


def _file(name: str) -> Path:
    return Path(tempfile.gettempdir(), name)


def _command_line() -> list[str]:
    """The command line of the server that is up, if there is one."""
    with contextlib.suppress(OSError, IndexError):
        pid = (_STATE / "ec2" / "pids" / "moto").read_text().split()[0]
        words = Path("/proc", pid, "cmdline").read_text().split("\0")
        return words if any(word.endswith("ec2_server.py") for word in words) else []
    return []


def _is_up() -> bool:
    return bool(_command_line())


def _is_bound(path: str) -> bool:
    bound = [word.split(":")[0] for word in _command_line() if word.count(":") == 2]
    return any(Path(path).is_relative_to(each) for each in bound)


def _paths() -> list[str]:
    """What instances need for this very environment, beyond what each of them has."""
    listed = subprocess.run(
        [str(TESTBED / "hostbind-mounts"), "list", sys.prefix, str(SOURCE)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    python = subprocess.run(
        ["python3", "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True
    ).stdout.strip()
    cache = os.environ.get("SKYWARD_CACHE") or platformdirs.user_cache_dir("skyward")
    device = Path(cache, "device")
    # The compiled device, for instances whose user has the same home.
    found = [*listed, *([str(device)] if device.is_dir() else [])]
    return [path for path in found if path not in (python, "/usr")]


def variables(gateway: Any, folder: Path) -> dict[str, str]:
    """What leads the SDK, and the programs of a test, to a gateway and nowhere else."""
    for name in ("config", "credentials"):
        (folder / name).touch()
    return {
        "AWS_ENDPOINT_URL": gateway.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(folder / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials"),
    }


OTHERS = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_EC2")
"""Variables of the user that a test must not see."""
