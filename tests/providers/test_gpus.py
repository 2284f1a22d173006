"""What a request for GPUs becomes for Docker and Podman, and errors that name it."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import bootstrap
from skyward.accelerators import Accelerator, Card
from skyward.bootstrap import Environment, check_accelerators
from skyward.providers import Order, Request, local
from skyward.spec import Image
from skyward.worker.supervision import nth_card

from .docker_service import DOCKER, Service, podman, serving
from .ssh_hosts import Sshd

SCRIPTS = Path(bootstrap.__file__).parent / "sh"


def create(folder: Path, accelerator: Accelerator | None, node: int = 0) -> None:
    """Start a container at the service in a folder."""
    provider = sky.Container("python:3", host=f"unix://{folder}/docker.sock")
    request = Request(accelerator, None, None, Image(), ())
    asyncio.run(provider.create(Order("p", node, request)))


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


def test_without_an_accelerator_nothing_is_asked_for(tmp_path: Path) -> None:
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
def test_a_podman_that_would_ignore_the_request_is_refused(tmp_path: Path, version: str) -> None:
    with serving(tmp_path, podman(version)) as service:
        with pytest.raises(sky.errors.ConfigurationError) as caught:
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
        with pytest.raises(sky.errors.PoolStartError) as caught:
            create(tmp_path, sky.accelerators.H100(), node=3)
    message = str(caught.value)
    assert message.startswith("accelerator=H100-80GB: node 3 needs GPU 3 of the machine")
    assert said in message
    assert step in message
    assert any(path.endswith("/sky-p-3") or "c1" in path for path in service.removed)


def test_a_refusal_for_another_reason_is_not_about_gpus(tmp_path: Path) -> None:
    with serving(tmp_path, DOCKER, "no space left on device"):
        with pytest.raises(
            sky.errors.PoolStartError, match="the container did not start: no space"
        ):
            create(tmp_path, sky.accelerators.H100())


def test_what_no_container_can_have_is_refused_at_once() -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"accelerator=MI300X-192GB: .*NVIDIA GPUs"
    ):
        sky.Compute(sky.Container(), accelerator=sky.accelerators.MI300X())


L4, L40S, T4 = Card("NVIDIA L4", 23034), Card("NVIDIA L40S", 46068), Card("Tesla T4")


def machine_with(*cards: Card) -> Environment:
    return Environment("python", "/tmp/x", cards, "gpu1", True)


@pytest.mark.parametrize(
    ("has_cards", "has"),
    [
        ((), "no GPU"),
        ((L4,), r"1 x NVIDIA L4 \(23034 MiB\)"),
        ((L40S, L40S), "2 x NVIDIA L40S"),
        ((L4, T4), r"1 x NVIDIA L4 \(23034 MiB\), 1 x Tesla T4;"),
    ],
)
def test_a_machine_with_fewer_than_asked_for_is_no_node(
    has_cards: tuple[Card, ...], has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYWARD_DEVICE", raising=False)
    environment, wanted = machine_with(*has_cards), sky.accelerators.L4(count=2)
    with pytest.raises(
        sky.errors.PoolStartError, match=rf"accelerator=L4-24GB:2: node 0, .* has {has}"
    ):
        check_accelerators(environment, 0, wanted)
    check_accelerators(environment, 0, None)
    check_accelerators(environment, 0, sky.accelerators.MI300X())
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    check_accelerators(environment, 0, wanted)


def test_a_mixed_machine_serves_with_the_cards_that_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYWARD_DEVICE", raising=False)
    mixed = machine_with(T4, L4, L4)
    check_accelerators(mixed, 0, sky.accelerators.L4(count=2))
    check_accelerators(mixed, 0, sky.accelerators.T4())
    with pytest.raises(sky.errors.PoolStartError, match="has 1 x Tesla T4, 2 x NVIDIA L4"):
        check_accelerators(mixed, 0, sky.accelerators.L4(count=3))


class Driver:
    """What NVIDIA's driver shows in /proc and /dev, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "dev").mkdir()

    def add(self, number: int, model: str, *, device: bool = True) -> None:
        gpu = self._folder / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 41\nDevice Minor: \t {number}\n"
        )
        if device:
            (self._folder / "dev" / f"nvidia{number}").touch()

    def program(self, text: str) -> None:
        """What `nvidia-smi` does."""
        program = self._folder / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def told(self, **variables: str) -> list[str]:
        """What the script tells of the cards."""
        text = (SCRIPTS / "cards.sh").read_text()
        text = text.replace("/proc/driver/nvidia/gpus", f"{self._folder}/gpus")
        text = text.replace("/dev/nvidia", f"{self._folder}/dev/nvidia")
        words = 'tell() { echo "$*"; }\nhave() { command -v "$1" >/dev/null 2>&1; }\nset -u\n'
        environment = {"PATH": f"{self._folder}/bin:/usr/bin:/bin", **variables}
        done = subprocess.run(
            ["sh", "-s"], input=words + text, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def test_a_machine_without_a_driver_tells_of_no_card(driver: Driver) -> None:
    assert driver.told() == []


def test_every_card_of_a_machine_is_told(driver: Driver) -> None:
    driver.add(0, "Tesla V100-SXM2-16GB")
    driver.add(1, "NVIDIA A100-SXM4-40GB")
    driver.program("exit 1")
    assert driver.told() == ["card ?, Tesla V100-SXM2-16GB", "card ?, NVIDIA A100-SXM4-40GB"]


def test_the_memory_is_measured_where_a_name_does_not_say_it(driver: Driver) -> None:
    driver.add(0, "NVIDIA H200")
    driver.add(1, "NVIDIA A100-SXM4-40GB")
    query = "--query-gpu=memory.total,name --format=csv,noheader,nounits"
    driver.program(
        f'[ "$*" = "{query}" ] && printf "143771, NVIDIA H200\\n40960, NVIDIA A100-SXM4-40GB\\n"'
    )
    assert driver.told() == ["card 143771, NVIDIA H200", "card 40960, NVIDIA A100-SXM4-40GB"]


def test_a_driver_that_measures_nothing_still_tells_the_models(driver: Driver) -> None:
    driver.add(0, "NVIDIA H200")
    driver.program("echo Failed to initialize NVML; exit 9")
    assert driver.told() == ["card ?, NVIDIA H200"]


def test_a_container_tells_of_the_cards_whose_devices_it_has(driver: Driver) -> None:
    driver.add(0, "Tesla V100-SXM2-16GB", device=False)
    driver.add(1, "NVIDIA A100-SXM4-40GB")
    driver.program("exit 1")
    assert driver.told() == ["card ?, NVIDIA A100-SXM4-40GB"]


def test_a_node_tells_of_as_many_cards_as_its_scheduler_gave_it(driver: Driver) -> None:
    driver.add(0, "NVIDIA A100-SXM4-40GB")
    driver.add(1, "NVIDIA A100-SXM4-40GB")
    driver.add(2, "NVIDIA A100-SXM4-40GB")
    driver.program("exit 1")
    assert len(driver.told(CUDA_VISIBLE_DEVICES="1,2")) == 2
    assert len(driver.told(CUDA_VISIBLE_DEVICES="GPU-5a5b")) == 1
    # As CUDA reads it, and as Ray sets it for who asked for none.
    assert driver.told(CUDA_VISIBLE_DEVICES="") == []
    assert len(driver.told()) == 3


def test_a_worker_gets_one_of_the_cards_that_the_scheduler_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5a5b")
    assert [nth_card("0"), nth_card("1")] == ["4", "GPU-5a5b"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert nth_card("1") == "1"


def test_this_machine_is_asked_for_its_own_cards(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYWARD_DEVICE", raising=False)
    monkeypatch.setattr(local, "_GPUS", tmp_path / "gpus")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    driver.add(0, "NVIDIA GeForce RTX 4090")
    driver.add(1, "NVIDIA A100-SXM4-40GB")
    driver.program('printf "24564, NVIDIA GeForce RTX 4090\\n40960, NVIDIA A100-SXM4-40GB\\n"')
    sky.Compute(accelerator=sky.accelerators.RTX_4090())
    sky.Compute(accelerator=sky.accelerators.A100(memory="40GB"))
    for wanted in (
        sky.accelerators.A10(),
        sky.accelerators.A100(),
        sky.accelerators.RTX_4090(count=2),
        sky.accelerators.Custom("RTX 4090", "48GB"),
    ):
        has = r"has 1 x NVIDIA GeForce RTX 4090 \(24564 MiB\), 1 x NVIDIA A100-SXM4-40GB; choose"
        with pytest.raises(sky.errors.ConfigurationError, match=rf"accelerator={wanted}: .*{has}"):
            sky.Compute(accelerator=wanted)


def test_a_host_without_gpus_is_no_node(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("this one may have them")
    monkeypatch.delenv("SKYWARD_DEVICE", raising=False)
    accelerator, quiet = sky.accelerators.H100(), sky.Options(console=False)
    with pytest.raises(
        sky.errors.PoolStartError, match=r"accelerator=H100-80GB: node 0, .* has no GPU"
    ):
        with sky.Compute(sshd.provider(), accelerator=accelerator, options=quiet):
            pass


@pytest.mark.usefixtures("engine")
def test_a_real_podman_is_known_by_its_version(tmp_path: Path) -> None:
    said = subprocess.run(
        ["podman", "version", "-f", "{{.Version}}"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    if tuple(map(int, said.split(".")[:2])) >= (5, 4):
        pytest.skip("this one gives GPUs where it has them")
    provider = sky.Container("localhost/hostbind:1")
    request = Request(sky.accelerators.T4(), None, None, Image(), ())
    with pytest.raises(
        sky.errors.ConfigurationError, match=f"accelerator=T4-16GB: Podman {said} gives"
    ):
        asyncio.run(provider.create(Order("p", 0, request)))
