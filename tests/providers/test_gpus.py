"""What a wish for GPUs becomes: requests to Docker and Podman, and errors that name it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.accelerators import Accelerator
from skyward.providers import Order, Wish
from skyward.providers.bootstrap import Prepared, check_accelerators
from skyward.spec import Image

from .docker_service import DOCKER, Service, podman, serving
from .ssh_hosts import Sshd


def create(folder: Path, accelerator: Accelerator | None, node: int = 0) -> None:
    """Start a container at the service in a folder."""
    provider = sky.Container("python:3", host=f"unix://{folder}/docker.sock")
    wish = Wish(accelerator, None, None, Image(), ())
    asyncio.run(provider.create(Order("p", node, wish)))


def requests(service: Service) -> list[dict[str, Any]]:
    (created,) = service.created
    return created["HostConfig"].get("DeviceRequests") or []


def test_docker_is_asked_for_the_gpus_of_a_node(tmp_path: Path) -> None:
    """Each node's own, for they run on one machine; by number, which excludes a count."""
    with serving(tmp_path, DOCKER) as service:
        create(tmp_path, sky.accelerators.H100(count=2), node=1)
    (request,) = requests(service)
    assert request["DeviceIDs"] == ["2", "3"]
    assert request["Capabilities"] == [["gpu"]]
    assert not request["Count"]


def test_podman_is_asked_for_devices_by_their_cdi_names(tmp_path: Path) -> None:
    with serving(tmp_path, podman("5.4.0")) as service:
        create(tmp_path, sky.accelerators.A100(count=2), node=0)
    (request,) = requests(service)
    assert request["Driver"] == "cdi"
    assert request["DeviceIDs"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]


def test_without_a_wish_nothing_is_asked_for(tmp_path: Path) -> None:
    with serving(tmp_path, podman("4.3.1")) as service:
        create(tmp_path, None)
    assert requests(service) == []


def test_gpu_code_can_be_tried_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    with serving(tmp_path, podman("4.3.1")) as service:
        create(tmp_path, sky.accelerators.H100())
    assert requests(service) == []


@pytest.mark.parametrize("version", ["3.4.4", "4.3.1", "5.3.2"])
def test_a_podman_that_would_ignore_the_wish_is_refused(tmp_path: Path, version: str) -> None:
    with serving(tmp_path, podman(version)) as service:
        with pytest.raises(sky.ConfigurationError) as caught:
            create(tmp_path, sky.accelerators.H100())
    assert "accelerator=H100-80GB: Podman " + version in str(caught.value)
    assert "Podman 5.4 or newer" in str(caught.value)
    assert service.created == []


@pytest.mark.parametrize(
    ("version", "said", "step"),
    [
        (
            DOCKER,
            'could not select device driver "" with capabilities: [[gpu]]',
            "nvidia-ctk runtime configure",
        ),
        (
            DOCKER,
            "nvidia-container-cli: device error: 3: unknown device: unknown",
            "nvidia-smi -L",
        ),
        (
            podman("5.5.0"),
            "setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=3",
            "nvidia-ctk cdi generate",
        ),
    ],
)
def test_a_machine_without_the_gpus_says_which_and_what_to_do(
    tmp_path: Path, version: dict[str, Any], said: str, step: str
) -> None:
    with serving(tmp_path, version, said) as service:
        with pytest.raises(sky.PoolStartError) as caught:
            create(tmp_path, sky.accelerators.H100(), node=3)
    message = str(caught.value)
    assert message.startswith("accelerator=H100-80GB: node 3 needs GPU 3 of the machine")
    assert said in message
    assert step in message
    assert any(path.endswith("/sky-p-3") or "c1" in path for path in service.removed)


def test_a_refusal_for_another_reason_is_not_about_gpus(tmp_path: Path) -> None:
    with serving(tmp_path, DOCKER, "no space left on device"):
        with pytest.raises(sky.PoolStartError, match="the container did not start: no space"):
            create(tmp_path, sky.accelerators.H100())


def test_what_no_container_can_have_is_refused_at_once() -> None:
    with pytest.raises(sky.ConfigurationError, match=r"accelerator=MI300X-192GB: .*NVIDIA GPUs"):
        sky.Compute(sky.Container(), accelerator=sky.accelerators.MI300X())


@pytest.mark.parametrize(("count", "has"), [(0, "no GPU"), (1, "1 x NVIDIA L4")])
def test_a_machine_with_fewer_than_asked_for_is_no_node(
    count: int, has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYWARD_DEVICE", raising=False)
    prepared = Prepared("python", "/tmp/x", count, "NVIDIA L4", "gpu1", True)
    with pytest.raises(sky.PoolStartError, match=rf"accelerator=L4-24GB:2: node 0, .* has {has}"):
        check_accelerators(prepared, 0, sky.accelerators.L4(count=2))
    check_accelerators(prepared, 0, None)
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    check_accelerators(prepared, 0, sky.accelerators.L4(count=2))


def test_a_host_without_gpus_is_no_node(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("this one may have them")
    monkeypatch.delenv("SKYWARD_DEVICE", raising=False)
    accelerator, quiet = sky.accelerators.H100(), sky.Options(console=False)
    with pytest.raises(sky.PoolStartError, match=r"accelerator=H100-80GB: node 0, .* has no GPU"):
        with sky.Compute(sshd.provider(), accelerator=accelerator, options=quiet):
            pass


@pytest.mark.usefixtures("engine")
def test_a_real_podman_is_known_by_its_version(tmp_path: Path) -> None:
    import subprocess

    said = subprocess.run(
        ["podman", "version", "-f", "{{.Version}}"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    if tuple(map(int, said.split(".")[:2])) >= (5, 4):
        pytest.skip("this one gives GPUs where it has them")
    provider = sky.Container("localhost/hostbind:1")
    wish = Wish(sky.accelerators.T4(), None, None, Image(), ())
    with pytest.raises(sky.ConfigurationError, match=f"accelerator=T4-16GB: Podman {said} gives"):
        asyncio.run(provider.create(Order("p", 0, wish)))
