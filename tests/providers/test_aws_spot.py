"""Spot capacity on AWS: an instance is taken back while its node works."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import skyward as sky

from ..conftest import only_in_all

if TYPE_CHECKING:
    from .aws_gateway import Gateway


@sky.function
def hostname() -> str:
    return sky.instance_info().hostname


@sky.function(retries=1)
def wait_for_another(first: str) -> str:
    """Return the host's name, unless it is the first host: there the call does not end."""
    here = sky.instance_info().hostname
    while here == first:
        time.sleep(0.1)
    return here


@pytest.mark.slow
@only_in_all
def test_an_interruption_moves_work_to_a_new_instance(ec2: Gateway, tmp_path: Path) -> None:
    """Slow: the notice is looked for every five seconds, and a second instance boots."""
    image = sky.Image(env={"AWS_EC2_METADATA_SERVICE_ENDPOINT": ec2.metadata.url})
    provider = sky.AWS(python=sys.executable)
    with sky.Compute(provider, allocation="spot", image=image) as compute:
        first = hostname() >> compute
        assert all(call.spot for call in ec2.made("RunInstances"))
        future = wait_for_another(first) > compute
        while not compute.nodes[0].running:
            time.sleep(0.01)
        ec2.interrupt(20.0, first)
        second = future.result(timeout=240)

        assert second != first
        assert hostname() >> compute == second
        assert compute.stats().retried == 1
        cost = compute.stats().cost
        assert cost is not None
        assert cost > 0
    bought = ec2.made("RunInstances")
    assert [call.spot for call in bought] == [True, True]
    assert ec2.leftovers() == []
