"""Machines with nothing but `sh`: everything else, Python included, is brought there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.providers.container import ContainerMachine

from . import bare

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture(scope="module")
def image(engine: None) -> Iterator[str]:
    bare.import_image()
    yield bare.IMAGE
    bare.remove_image()


@sky.function
def interpreter() -> tuple[str, str]:
    return sys.version, sys.base_prefix


@pytest.mark.slow
def test_uv_python_and_packages_are_brought_to_a_machine_that_has_none(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow: uv is fetched, Python packed, and all of it installed in a container.

    Nothing but the service's own stream leads into it, for which Python is needed there too.
    """
    monkeypatch.setattr(ContainerMachine, "direct", None)
    variables = bare.mirror(tmp_path)
    provider = sky.Container(image, mounts=[sky.Volume(str(tmp_path), read_only=True)])
    wanted = sky.Image(pip=["iniconfig"], env=variables)
    options = sky.Options(console=True)
    with sky.Compute(provider, image=wanted, options=options) as compute:
        version, prefix = interpreter() >> compute
    assert version == sys.version
    assert "/skyward/python/cpython-" in prefix
    told = capsys.readouterr().err
    phases = ["sending uv", "installing Python", "installing packages", "trying the environment"]
    places = [told.index(phase) for phase in phases]
    assert places == sorted(places)
