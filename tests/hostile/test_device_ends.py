"""The device's cores, whose other end has passed the handshake and lies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


def seen(end: str) -> dict[str, str]:
    script = Path(__file__).with_name("device_ends.py")
    ran = subprocess.run([sys.executable, script, end], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_an_answer_of_a_worker_is_a_tensor_or_refused() -> None:
    cannot = "an answer of the worker cannot be read: "
    expected = {
        "good": r"torch.Size\(\[2, 1\]\)",
        "a dtype that is not": cannot + "an unknown dtype",
        "a negative size": cannot + "a negative size or stride",
        "more than its memory": cannot + "a tensor larger than its memory",
        "more than any memory": cannot + "a tensor larger than any memory",
        "lists in lists": cannot + "a list in a list",
        "a kind that is not": cannot + "an output of unknown kind",
        "less than it says": "sky:7 is gone",
    }
    found = seen("client")
    assert found.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.search(pattern, found[name]), (name, found[name])


def test_records_that_cannot_be_end_the_session_and_not_the_worker() -> None:
    assert seen("worker") == {
        "an operation after an answer that failed": "a template whose outputs are not known",
        "a dtype that is not": "an unknown dtype",
        "a copy to memory that is not shared": "shared memory from another host",
    }
