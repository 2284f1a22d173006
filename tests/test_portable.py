"""Without Linux's extras, as on macOS: no memfd, epoll, pidfd, peer credentials, futex or prctl.

The tests of the client run again with SKYWARD_PORTABLE=1, in processes whose Python lacks these.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import only_in_all

ROOT = Path(__file__).parents[1]
FEW = (
    "tests/wire/test_large.py",
    "tests/wire/test_listening.py",
)
"""Of the device, none: torch and a compiled core in another process take 10 s of a processor."""
MANY = (
    "tests/device/test_aliasing.py",
    "tests/wire",
    "tests/test_functions.py",
    "tests/test_streaming.py",
    "tests/test_compute.py",
    "tests/test_context.py",
    "tests/test_output.py",
    "tests/device/test_arguments.py",
    "tests/device/test_lifetime.py",
    "tests/device/test_link.py",
    "tests/device/test_references.py",
    "tests/device/test_streams.py",
    "tests/device/test_threads.py",
    "tests/device/test_training.py",
)


def without_extras(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "SKYWARD_PORTABLE": "1",
        "PYTHONPATH": str(Path(__file__).parent / "portable"),
    }
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_switch_turns_off_what_only_linux_has() -> None:
    names = "PORTABLE, IS_LINUX, HAS_MEMORY_FILES, HAS_PEER_CREDENTIALS, CLOSE_ON_EXEC"
    done = without_extras("-c", f"from skyward.kernel import *; print({names})")
    assert done.stdout.split() == ["True", "False", "False", "False", "0"], done.stderr
    done = without_extras("-c", "import os; os.memfd_create")
    assert "AttributeError" in done.stderr, "the extras are really gone"


def _pass(files: tuple[str, ...]) -> None:
    done = without_extras("-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_the_client_works_without_linux() -> None:
    """Runs some other tests again, in a process of its own."""
    _pass(FEW)


@only_in_all
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_the_client_works_without_linux() -> None:
    """Runs the tests of calls, links and devices again."""
    _pass(MANY)
