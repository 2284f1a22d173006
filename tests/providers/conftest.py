"""SSH hosts on this machine, for these tests alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from skyward import providers
from skyward.nodes.records import Journal
from skyward.providers import Order
from skyward.providers.hosts import openssh
from skyward.testing import Shop

from ..conftest import other_case
from . import ec2 as testbed_ec2
from . import kube, podman, slurm_testbed, ssh_hosts
from .ssh_hosts import Sshd

if TYPE_CHECKING:
    from .aws_gateway import Gateway


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A shop that the command line finds by its name."""
    monkeypatch.setitem(providers.BUILT_IN, "shop", "skyward.testing:Shop")
    return Shop(root=str(tmp_path), owner="me@here")


@pytest.fixture
def only_shop(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """The only provider but this machine, and it can be made without arguments."""
    kinds = {name: providers.BUILT_IN[name] for name in ("local", "shop")}
    monkeypatch.setattr(providers, "BUILT_IN", kinds)
    defaults = (shop.root, shop.region, providers.owner())
    monkeypatch.setattr(Shop.__init__, "__defaults__", defaults)
    return Shop()


@pytest.fixture(scope="session")
def sshd() -> Iterator[Sshd]:
    """Two SSH hosts on this machine."""
    with ssh_hosts.running() as hosts:
        yield hosts


@pytest.fixture
def without_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have asyncssh carry the connections, as where `ssh` cannot."""
    pytest.importorskip("asyncssh", reason="skyward-torch[ssh] is not installed")
    monkeypatch.setattr(openssh, "OLDEST", (999, 0))


@pytest.fixture(params=["ssh", pytest.param("asyncssh", marks=other_case)])
def carrier(request: pytest.FixtureRequest) -> str:
    """Connections that the program `ssh` carries, and those that asyncssh carries."""
    if request.param == "asyncssh":
        request.getfixturevalue("without_ssh")
    return str(request.param)


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The kubeconfig of a cluster with two nodes."""
    kube.skip_if_absent()
    try:
        yield kube.start()
    finally:
        kube.stop()


@pytest.fixture
def namespace(cluster: str) -> Iterator[kube.Namespace]:
    """A namespace for one test, in which nothing may be left."""
    made = kube.Namespace(cluster)
    try:
        yield made
        made.until_empty()
    finally:
        made.remove()


@pytest.fixture(scope="session")
def slurm() -> Iterator[str]:
    """The configuration of a Slurm cluster with two nodes, at `SLURM_CONF`."""
    slurm_testbed.skip_if_absent()
    before = os.environ.get("SLURM_CONF")
    try:
        os.environ["SLURM_CONF"] = slurm_testbed.start()
        yield os.environ["SLURM_CONF"]
    finally:
        if before is None:
            os.environ.pop("SLURM_CONF", None)
        slurm_testbed.stop()


WAITING_SECONDS = 900
"""What a test of machines may take, with the wait for another file's tests or for apt."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        waits = {"engine", "cluster", "ec2", "slurm"} & set(fixtures)
        if waits and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WAITING_SECONDS))


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    """A Podman of the testbed's, at `DOCKER_HOST`, for one file at a time."""
    with podman.running():
        yield


@pytest.fixture(scope="module")
def aws_gateway() -> Iterator[Gateway]:
    """An account of AWS whose instances are the testbed's.

    Of one file, since the next may want Podman for itself; a file cannot use `engine` as well.
    """
    testbed_ec2.skip_if_absent()
    # boto3 takes a third of a second to import, which other tests need not wait for.
    from .aws_gateway import Gateway

    try:
        upstream = testbed_ec2.start()
        try:
            gateway = Gateway(upstream, testbed_ec2.PORT)
        except OSError:
            gateway = Gateway(upstream)
        try:
            yield gateway
        finally:
            gateway.close()
    finally:
        testbed_ec2.stop()


@pytest.fixture
def ec2(aws_gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gateway]:
    """An account in which nothing is, and variables that lead to it."""
    folder = tmp_path / "aws"
    folder.mkdir()
    for name in testbed_ec2.OTHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in testbed_ec2.variables(aws_gateway, folder).items():
        monkeypatch.setenv(name, value)
    aws_gateway.reset()
    yield aws_gateway
    aws_gateway.reset()


@pytest.fixture(scope="session")
def aws_records() -> Iterator[Gateway]:
    """An account of AWS whose instances are records, and no machines."""
    from moto.server import ThreadedMotoServer

    from .aws_gateway import Gateway

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    try:
        host, port = server.get_host_and_port()
        gateway = Gateway(f"http://{host}:{port}")
        try:
            yield gateway
        finally:
            gateway.close()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def aws_variables(aws_records: Gateway, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same for all tests: with them, clients of the SDK and the catalogue are kept."""
    folder = tmp_path_factory.mktemp("aws")
    cache = {"SKYWARD_CACHE": str(tmp_path_factory.mktemp("cache"))}
    return testbed_ec2.variables(aws_records, folder) | cache


@pytest.fixture
def aws(
    aws_records: Gateway, aws_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Gateway]:
    """An account in which nothing is and nothing may be left, where all instances have booted."""
    from skyward.providers.aws.machine import AWSMachine

    from .aws_orders import left

    async def make(self: AWSMachine, order: Order, seconds: float = 0) -> None:
        order.tell("waiting for the machine to boot")

    monkeypatch.setattr(AWSMachine, "make", make)
    for name in testbed_ec2.OTHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in aws_variables.items():
        monkeypatch.setenv(name, value)
    aws_records.reset()
    yield aws_records
    assert left(aws_records) == []


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """A journal for one test, also for the processes that it starts."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return Journal()
