"""The examples on AWS, run as a user would run them, in a simulated account."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..conftest import only_in_all

if TYPE_CHECKING:
    from .aws_gateway import Gateway

EXAMPLES = Path(__file__).parents[2] / "examples"


@only_in_all
@pytest.mark.slow
def test_a_model_is_trained_on_four_instances(ec2: Gateway) -> None:
    """Slow: four machines import PyTorch on two processors."""
    shown = output_of("aws_ddp.py")

    assert re.search(r"4 x p4de.24xlarge \(A100-80GB:8, .*\) in us-east-1, on demand, \$", shown)
    assert re.search(r"\[node 0\] Epoch 9: loss=\d\.\d{4}", shown)
    assert "[node 1]" not in shown, "only the head prints"
    assert [int(rank) for rank in re.findall(r"^Rank (\d): loss=", shown, re.M)] == [0, 1, 2, 3]
    assert re.search(r"4 of 4 calls succeeded .*cost \$.*: 4 x p4de.24xlarge on demand", shown)
    assert ec2.leftovers() == []


@only_in_all
@pytest.mark.slow
def test_shards_are_trained_on_four_instances(ec2: Gateway) -> None:
    """Slow: likewise."""
    shown = output_of("aws_training.py")

    assert re.search(r"\[node 3\] Node 3 of 4", shown)
    assert "the shards sum up to 499500" in shown
    assert re.search(r"Held-out accuracy: 9\d\.\d%, the same weights on all four nodes", shown)
    assert ec2.leftovers() == []


def output_of(name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"SKYWARD_AWS_PYTHON": sys.executable, "SKYWARD_DEVICE": "cpu"},
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    return shown
