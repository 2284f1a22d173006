"""Every provider of ours passes the suite that we ship."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.providers import Allocation, Order, Provider, Request
from skyward.testing import ProviderSuite, Shop, plain_request

from ..conftest import only_in_all
from . import podman
from .ssh_hosts import Sshd


class TestLocal(ProviderSuite):
    """This machine."""

    @pytest.fixture
    def provider(self) -> sky.Local:
        """With nothing to set up."""
        return sky.Local()

    @pytest.fixture
    def machine_request(self) -> Request:
        """What any machine has."""
        return plain_request()


def test_the_suite_closes_what_it_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Allocation[Any]] = []
    closed: list[Allocation[Any]] = []

    class Noted(sky.Local):
        def allocate(self, pool: str) -> Allocation[Any]:
            opened.append(super().allocate(pool))
            return opened[-1]

    async def close(allocation: Allocation[Any]) -> None:
        closed.append(allocation)

    class Suite(ProviderSuite):
        pass

    monkeypatch.setattr(Allocation, "close", close)
    suite, given = Suite(), (Noted(), plain_request())
    suite.test_a_command_returns_its_exit_status(*given)
    suite.test_destroying_is_final_and_may_be_repeated(*given)
    suite.test_machines_of_a_pool_are_made_and_destroyed_side_by_side(*given)
    suite.test_a_create_that_is_cancelled_leaves_nothing_unknown(*given)
    suite.teardown_class()
    assert len(opened) == len(closed)
    assert set(opened) == set(closed)


class TestShop(ProviderSuite):
    """The one that programs are tested with."""

    @pytest.fixture
    def provider(self, shop: Shop) -> Shop:
        """With one offer."""
        self.shop = shop
        return shop

    @contextlib.contextmanager
    def out_of_reach(self) -> Iterator[bool]:
        """Neither the shop nor its machines answer."""
        self.shop.stock.out_of_reach = True
        try:
            yield True
        finally:
            self.shop.stock.out_of_reach = False

    @pytest.fixture
    def machine_request(self) -> Request:
        """What any machine has."""
        return plain_request()


class TestSSH(ProviderSuite):
    """Two hosts that run sshd."""

    python = sys.executable

    @pytest.fixture
    def provider(self, sshd: Sshd) -> sky.SSH:
        """The testbed's."""
        self.sshd = sshd
        return sshd.provider()

    @contextlib.contextmanager
    def out_of_reach(self) -> Iterator[bool]:
        """Its sshd has ended."""
        self.sshd.lose(1)
        try:
            yield True
        finally:
            self.sshd.up()

    @pytest.fixture
    def machine_request(self) -> Request:
        """What any machine has."""
        return plain_request()


@only_in_all
@pytest.mark.usefixtures("without_ssh")
class TestSSHWithoutItsProgram(TestSSH):
    """The same hosts, where there is no `ssh`."""


class TestContainer(ProviderSuite):
    """Containers in Podman."""

    @pytest.fixture
    def provider(self, engine: None) -> sky.Container:
        """The testbed's."""
        return podman.provider()

    @contextlib.contextmanager
    def out_of_reach(self) -> Iterator[bool]:
        """Nobody answers where the service was."""
        socket = Path(os.environ["DOCKER_HOST"].removeprefix("unix://"))
        away = socket.rename(socket.with_suffix(".away"))
        try:
            yield True
        finally:
            away.rename(socket)

    @pytest.fixture
    def machine_request(self) -> Request:
        """What any machine has."""
        return plain_request()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package with it, as its author would have it."""
    page = Path(__file__).parents[2] / "docs" / "providers.md"
    (code,) = re.findall(r"```python\n(import asyncio\n.*?)```", page.read_text(), re.DOTALL)
    folder = tmp_path_factory.mktemp("package")
    (folder / "folders.py").write_text(code)
    info = folder / "folders-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: folders\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[skyward.providers]\nfolders = folders:Folders\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


class TestTheOneInTheDocumentation(ProviderSuite):
    """Written there to be copied."""

    python = sys.executable

    @pytest.fixture
    def provider(self, installed: Path) -> Provider:
        """With its machines below the temporary folder."""
        made: Provider = importlib.import_module("folders").Folders()
        return made

    @pytest.fixture
    def machine_request(self) -> Request:
        """What any machine has."""
        return plain_request()

    def test_a_machine_that_cannot_be_made_says_so(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """And is not half made."""

        async def scenario() -> None:
            provider = importlib.import_module("folders").Folders("/nowhere/at/all")
            with pytest.raises(sky.errors.PoolStartError, match=r"node 0: .*No such file"):
                await provider.create(Order("t-nowhere", 0, machine_request))

        asyncio.run(scenario())
