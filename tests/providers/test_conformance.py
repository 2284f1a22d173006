"""Every provider of ours passes the suite that we ship."""

from __future__ import annotations

import sys

import pytest

import skyward as sky
from skyward.providers import Wish
from skyward.testing import ProviderSuite, plain_wish

from . import podman
from .ssh_hosts import Sshd


class TestLocal(ProviderSuite):
    """This machine."""

    @pytest.fixture
    def provider(self) -> sky.Local:
        """With nothing to set up."""
        return sky.Local()

    @pytest.fixture
    def wish(self) -> Wish:
        """What any machine has."""
        return plain_wish()


class TestSSH(ProviderSuite):
    """Two hosts that run sshd."""

    python = sys.executable

    @pytest.fixture
    def provider(self, sshd: Sshd) -> sky.SSH:
        """The testbed's."""
        return sshd.provider()

    @pytest.fixture
    def wish(self) -> Wish:
        """What any machine has."""
        return plain_wish()


class TestContainer(ProviderSuite):
    """Containers in Podman."""

    @pytest.fixture
    def provider(self, engine: None) -> sky.Container:
        """The testbed's."""
        return podman.provider()

    @pytest.fixture
    def wish(self) -> Wish:
        """What any machine has."""
        return plain_wish()
