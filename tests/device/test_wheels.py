"""A wheel with compiled cores: the device opens on a machine that has no compiler."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from skyward.bootstrap import wheel as bootstrap_wheel
from skyward.device import build, toolchain, torch_build
from skyward.wire import native

from ..conftest import has_compiler, only_in_all

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")

ROOT = Path(__file__).parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])
TRAIN = """
import pathlib, sys
import torch, skyward as sky
from skyward.device import build

assert pathlib.Path(sky.__file__).is_relative_to(sys.argv[1]), sky.__file__
for transport in ("unix", "tcp"):
    provider = sky.Local(transport=transport)
    with sky.Compute(provider, options=sky.Options(console=False)) as compute:
        x = torch.ones(3, 3, device=compute.device("cpu"), requires_grad=True)
        (x @ x).sum().backward()
        print(x.grad.sum().item())
print(*(build.library(part).name for part in ("client", build.LINK)))
"""


def wheels(*words: str, cwd: Path) -> list[Path]:
    """What tools/wheels.py makes."""
    command = [sys.executable, str(ROOT / "tools" / "wheels.py"), "--out", str(cwd / "dist")]
    done = subprocess.run(
        [*command, "--work", str(cwd / "work"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted((cwd / "dist").glob("*.whl"))


def test_wheels_have_cores_for_every_torch_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    offered = runpy.run_path(str(ROOT / "tools" / "wheels.py"))["TORCH"]
    assert {f"{major}.{minor}" for major, minor in torch_build.TRIED} <= set(offered)


def run_without_compiler(wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Install the wheel beside everything else that is installed, and train on a device."""
    home = folder / "home"
    install = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--target", str(home)]
    subprocess.run([*install, str(wheel)], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(home),
        "CXX": "/bin/false",
        "SKYWARD_CACHE": str(folder / "cache"),
    }
    return subprocess.run(
        [sys.executable, "-c", TRAIN, str(home)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@only_in_all
@pytest.mark.slow
def test_a_wheel_with_cores_needs_no_compiler(tmp_path: Path) -> None:
    """Builds a wheel of the cores that are compiled here, and installs it: 10 s."""
    (made,) = wheels("--here", cwd=tmp_path)
    assert made.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    done = run_without_compiler(made, tmp_path)
    assert done.returncode == 0, done.stderr
    cores = [
        build.shipped_name(part, MINOR, 1, "linux", platform.machine())
        for part in ("client", build.LINK)
    ]
    assert done.stdout.split() == ["54.0", "54.0", *cores]
    assert "compiling" not in done.stderr
    assert not list(tmp_path.glob("cache/**/*.so"))

    with zipfile.ZipFile(made) as archive:
        assert archive.testzip() is None
        (tags,) = (n for n in archive.namelist() if n.endswith(".dist-info/WHEEL"))
        text = archive.read(tags).decode()
    assert f"Tag: py3-none-linux_{platform.machine()}" in text
    assert "Root-Is-Purelib: false" in text


def pure_wheel(path: Path, when: int, backwards: bool) -> Path:
    """A wheel of two files, made at that time."""
    info = "skyward_torch-0.1.0.dist-info"
    members = ["skyward/__init__.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name in reversed(members) if backwards else members:
            text = "Root-Is-Purelib: true\nTag: py3-none-any\n" if "WHEEL" in name else name
            archive.writestr(zipfile.ZipInfo(name, (when, 1, 1, 0, 0, 0)), text)
    return path


def test_the_same_parts_make_the_same_wheel_with_a_bill_of_materials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = runpy.run_path(str(ROOT / "tools" / "wheels.py"))
    core = tmp_path / "worker.so"
    core.write_bytes(b"code")
    made = []
    for folder, when, backwards in (("a", 1990, False), ("b", 2020, True)):
        pure = pure_wheel(tmp_path / folder / "skyward_torch-0.1.0-any.whl", when, backwards)
        made.append(tool["platform_wheel"](pure, {core.name: core}, "linux", pure.parent))
    assert made[0].read_bytes() == made[1].read_bytes()

    with zipfile.ZipFile(made[0]) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = list(files)[-1]
    assert record == "skyward_torch-0.1.0.dist-info/RECORD"
    assert {line.split(",")[0] for line in files[record].decode().splitlines()} == {*files}
    bill = json.loads(files["skyward_torch-0.1.0.dist-info/sboms/skyward_torch.cdx.json"])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/skyward-torch@0.1.0"
    parts = {each["name"]: each for each in bill["components"]}
    digest = parts["skyward/device/cores/worker.so"]["hashes"][0]["content"]
    assert digest == hashlib.sha256(b"code").hexdigest()
    assert parts["cryptography"]["scope"] == "required"
    assert parts["cffi"]["scope"] == "required", "cryptography needs it"
    assert parts["kubernetes"]["scope"] == "optional"
    told = {each["bom-ref"] for each in bill["components"]}
    needed = {other for each in bill["dependencies"] for other in each["dependsOn"]}
    assert needed == told, "all that is listed is needed by something, and the other way around"


@only_in_all
@pytest.mark.skipif(
    shutil.which(f"{platform.machine()}-linux-gnu-g++") is None, reason="there is no such compiler"
)
def test_two_builds_in_two_folders_make_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds the sources and compiles the core of links twice, from two copies: a minute."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = runpy.run_path(str(ROOT / "tools" / "wheels.py"))
    headers = tool["Headers"](MINOR, Path(torch.__file__).parent)
    made = []
    for folder in (tmp_path / "a", tmp_path / "another" / "place"):
        folder.mkdir(parents=True)
        sources = Path(shutil.copytree(native.SOURCES, folder / "csrc"))
        for module, name in ((native, "SOURCES"), (toolchain, "LINK_SOURCES")):
            monkeypatch.setattr(module, name, sources)
        core = tool["linux_core"](build.LINK, platform.machine(), headers, folder, folder)
        pure = tool["pure_wheel"](folder)
        made.append(tool["platform_wheel"](pure, {core.name: core}, "linux", folder))
    assert made[0].read_bytes() == made[1].read_bytes()


@only_in_all
@pytest.mark.slow
def test_a_wheel_for_every_linux_needs_no_compiler(tmp_path: Path) -> None:
    """Compiles both cores as `make wheels` does, against torch's wheel of macOS: two minutes."""
    machine = platform.machine()
    made = wheels("--only", f"linux-{machine}", "--torch", MINOR, cwd=tmp_path)
    (name,) = (wheel.name for wheel in made)
    assert "-py3-none-manylinux_2_" in name
    done = run_without_compiler(made[0], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["54.0", "54.0"]


@only_in_all
@pytest.mark.skipif(
    shutil.which(f"{platform.machine()}-linux-gnu-g++") is None, reason="there is no such compiler"
)
def test_the_core_of_links_is_for_every_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiles it as `make wheels` does, which refuses symbols of a newer glibc: 10 s."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = runpy.run_path(str(ROOT / "tools" / "wheels.py"))
    headers = tool["Headers"](MINOR, Path(torch.__file__).parent)
    machine = platform.machine()
    core = tool["linux_core"](build.LINK, machine, headers, tmp_path / "cores", tmp_path)
    assert tool["manylinux"]([core], machine).startswith("manylinux_2_")
    assert native.LinkCore(core).openssl_name


def test_the_core_of_a_wheel_is_taken_only_where_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_taken(version: str, name: str) -> bool:
        monkeypatch.setattr(torch, "__version__", version)
        path = tmp_path / name
        path.touch()
        found = build.library("worker")
        path.unlink()
        return found == path

    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    monkeypatch.setattr(build, "_cached", lambda *_: Path(__file__))
    system, machine = platform.system().lower(), platform.machine()
    fits = build.shipped_name("worker", "2.13", 1, system, machine)
    assert is_taken("2.13.0", fits)
    assert is_taken("2.13.2+cu130", fits), "a patch, and a build for another GPU, fit"
    assert not is_taken("2.14.0", fits)
    assert not is_taken("2.13.0a0+git1234", fits), "not yet released"
    other = "aarch64" if machine != "aarch64" else "x86_64"
    assert not is_taken("2.13.0", build.shipped_name("worker", "2.13", 1, system, other))
    assert not is_taken("2.13.0", build.shipped_name("worker", "2.13", 0, system, machine))
    assert not is_taken("2.13.0", fits.replace(fits[-12:], "0000.so")), "of other sources"


def test_a_core_is_known_without_torch_unless_several_builds_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cache"))
    assert build.ready("worker", "2.13.0") is None
    system, machine = platform.system().lower(), platform.machine()
    paths = [
        tmp_path / build.shipped_name("worker", "2.13", abi, system, machine) for abi in (1, 0)
    ]
    paths[0].touch()
    assert build.ready("worker", "2.13.0") == paths[0]
    assert build.ready("worker", "2.14.0") is None
    paths[1].touch()
    assert build.ready("worker", "2.13.0") is None


def test_operators_that_python_puts_others_for_are_known_by_their_names() -> None:
    build_of_torch = torch_build.installed()
    assert build_of_torch is not None
    assert build_of_torch.version == torch.__version__
    names = build_of_torch.named_by_python()
    if (build_of_torch.home / "_native" / "ops" / "bmm_outer_product").exists():
        assert {"bmm", "topk", "scatter_add_", "_fused_rms_norm"} <= names
    assert "add" not in names


def test_nodes_get_the_cores_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in bootstrap_wheel.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    cores = tmp_path / "skyward" / "device" / "cores"
    cores.mkdir(parents=True)
    (cores / "worker-torch2.13-abi1-linux-x86_64-0.so").touch()
    (cores / "client-torch2.13-abi1-linux-x86_64-0.so").touch()
    (cores / "link-linux-x86_64-0.so").touch()
    origins = {package: tmp_path / package / "__init__.py" for package in bootstrap_wheel.PACKAGES}

    class Spec:
        def __init__(self, package: str) -> None:
            self.origin = str(origins[package])

    monkeypatch.setattr(bootstrap_wheel.importlib.util, "find_spec", Spec)
    sent = dict(bootstrap_wheel._package_files())
    assert "skyward/device/cores/worker-torch2.13-abi1-linux-x86_64-0.so" in sent
    assert "skyward/device/cores/link-linux-x86_64-0.so" in sent
    assert not any("client-" in name for name in sent)
