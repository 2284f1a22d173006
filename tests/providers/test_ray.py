"""Pools on a real Ray cluster: a head and two nodes, through its jobs API and from inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.providers import Request
from skyward.testing import ProviderSuite, plain_request

from .ray_cluster import RayCluster, skip_if_absent

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def started() -> Iterator[RayCluster]:
    """A cluster for the tests of this file."""
    skip_if_absent()
    made = RayCluster()
    try:
        made.wait()
        yield made
    finally:
        made.stop()


@pytest.fixture
def ray(started: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The cluster, with a user who may use it."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_HEADERS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in started.variables.items():
        monkeypatch.setenv(name, value)
    return started


@pytest.fixture
def emptied(ray: RayCluster) -> Iterator[RayCluster]:
    """The cluster, in which nothing may be left."""
    yield ray
    ray.until_empty()


class TestRay(ProviderSuite):
    """What every provider must do."""

    @pytest.fixture
    def provider(self, ray: RayCluster) -> sky.Ray:
        """Through the jobs API."""
        return ray.provider()

    @pytest.fixture
    def machine_request(self) -> Request:
        """What any machine has."""
        return plain_request()
