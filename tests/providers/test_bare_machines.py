"""Machines with nothing but `sh`: everything else, Python included, is brought there."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import skyward as sky
from skyward.providers import container
from skyward.providers.container.machine import ContainerMachine

from ..conftest import only_in_all
from . import bare

LOUD = sky.Options(console=True)
pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture(scope="module")
def image(engine: None) -> Iterator[str]:
    bare.import_image()
    yield bare.IMAGE
    bare.remove_image()


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> tuple[sky.Volume, dict[str, str]]:
    folder = tmp_path_factory.mktemp("mirror")
    return sky.Volume(str(folder), read_only=True), bare.mirror(folder)


@sky.function
def interpreter() -> tuple[str, str]:
    return sys.version, sys.base_prefix


@only_in_all
@pytest.mark.slow
def test_uv_python_and_packages_are_brought_to_a_machine_that_has_none(
    image: str,
    mirror: tuple[sky.Volume, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    eventually: Callable[..., None],
) -> None:
    """Slow: uv is fetched, Python packed, and all of it installed in a container.

    Nothing but the service's own stream leads into it, for which Python is needed there too.
    """
    monkeypatch.setattr(ContainerMachine, "direct", None)
    volume, variables = mirror
    provider = sky.Container(image, mounts=[volume])
    wanted = sky.Image(pip=["iniconfig"], env=variables)
    with sky.Compute(provider, image=wanted, options=LOUD) as compute:
        version, prefix = interpreter() >> compute
    assert version == sys.version
    assert "/skyward/python/cpython-" in prefix
    told = capsys.readouterr().err
    phases = ["sending uv", "installing Python", "installing packages", "trying the environment"]
    places = [told.index(phase) for phase in phases]
    assert places == sorted(places)

    with sky.Compute(provider, image=wanted, options=LOUD) as compute:
        assert interpreter() >> compute == (version, prefix)
    told = capsys.readouterr().err
    assert "starting the agent" in told
    assert "installing" not in told, "another container has built it"
    assert "sending" not in told
    # What was copied through the service ends a moment after its container.
    eventually(lambda: not names_of_threads("skyward-redial"), 60, "the end of the connections")


def names_of_threads(name: str) -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == name]


@only_in_all
@pytest.mark.slow
def test_two_pools_that_start_at_once_build_an_environment_once(
    image: str,
    mirror: tuple[sky.Volume, dict[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slow: each of them has a container, and both of these are called node-0."""
    volume, variables = mirror
    wanted = sky.Image(pip=["iniconfig==2.0.0"], env=variables)

    def started(_: int) -> tuple[str, str]:
        provider = sky.Container(image, mounts=[volume])
        with sky.Compute(provider, image=wanted, options=LOUD) as compute:
            return interpreter() >> compute

    with ThreadPoolExecutor(2) as both:
        one, other = both.map(started, range(2))
    assert one == other
    told = capsys.readouterr().err
    assert told.count(": trying the environment") == 1


@only_in_all
@pytest.mark.slow
def test_a_machine_without_glibc_gets_a_uv_that_runs_there(image: str, tmp_path: Path) -> None:
    """Slow: a static shell is fetched. It is not followed by a Python, which no mirror here has."""
    if not bare.import_image_without_glibc(tmp_path):
        pytest.skip("apt has no static shell to offer here")
    nowhere = {"UV_PYTHON_INSTALL_MIRROR": "file:///nowhere"}
    quiet = sky.Options(console=False)
    with pytest.raises(sky.errors.ImageError) as caught:
        with sky.Compute(
            sky.Container(bare.MUSL_IMAGE), image=sky.Image(env=nowhere), options=quiet
        ):
            pass
    message = str(caught.value)
    assert message.startswith("node 0: installing Python ")
    assert "failed for Image(python=" in message
    assert "musl" in message


@only_in_all
@pytest.mark.slow
def test_a_container_ends_by_itself_some_time_after_its_agent(image: str) -> None:
    """Slow: it looks every five seconds. The first line of a command is all that it looks at."""
    agent = "\nsh -c 'sleep 12; :' skyward.worker.agent &\n"
    main = container._MAIN.replace(f"left={container.BOOTSTRAP_SECONDS}", "left=6")
    main = main.replace(f"left={container.AGENTLESS_SECONDS}", "left=6")
    begun = time.monotonic()
    command = ["podman", "run", "--rm", "--init", image, "sh", "-c", agent + main]
    subprocess.run(command, check=True, timeout=100)
    assert time.monotonic() - begun > 12
