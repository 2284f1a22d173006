"""Pools as jobs of a real Slurm cluster."""

from __future__ import annotations

import pytest

import skyward as sky
from skyward.providers import Request
from skyward.testing import ProviderSuite, plain_request

from . import slurm_testbed


class TestSlurm(ProviderSuite):
    """What every provider must do."""

    @pytest.fixture
    def provider(self, slurm: str) -> sky.Slurm:
        return slurm_testbed.provider()

    @pytest.fixture
    def machine_request(self) -> Request:
        return plain_request()
