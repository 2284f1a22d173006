"""What an image means on this machine: nothing is installed, what is missing is told at once."""

from __future__ import annotations

import importlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward.providers.local import image
from skyward.spec import Image, PipIndex

QUIET = sky.Options(console=False)
Install = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Adds a package to those that this environment has."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def install(name: str, version: str, *fields: str, url: str | None = None) -> None:
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *fields]
        (folder / "METADATA").write_text("\n".join([*lines, ""]))
        if url is not None:
            (folder / "direct_url.json").write_text(f'{{"url": "{url}"}}')
        importlib.invalidate_caches()

    install(
        "Sky.Sample",
        "2.13.0+cpu",
        "Provides-Extra: fast",
        *(
            'Requires-Dist: sky-turbo>=2; extra == "fast"',
            'Requires-Dist: sky-elsewhere; extra == "fast" and sys_platform == "nowhere"',
            "Requires-Dist: sky-always",
        ),
    )
    return install


def problems(*pip: str) -> str:
    """The error for these requirements, or nothing."""
    try:
        image.check(Image(pip=list(pip)))
    except sky.errors.ImageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "requirement",
    [
        "sky-sample",
        "Sky_Sample",
        "sky-sample==2.13.*",
        "sky-sample==2.13.0",
        "sky-sample==2.13.0+cpu",
        "sky-sample>=2,<3,!=2.12",
        "sky-sample~=2.10",
        "nosuchpackage; sys_platform == 'nowhere'",
        "nosuchpackage>=3; python_version < '3'",
        "sky-sample @ https://example.org/sky_sample-2.13.0+cpu-py3-none-any.whl",
        "https://example.org/sky_sample-2.13.0%2Bcpu-py3-none-any.whl",
        "git+https://example.org/sky.git#egg=sky-sample",
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_requirement_that_is_met_passes(requirement: str) -> None:
    assert problems(requirement) == ""


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("nosuchpackage", "nosuchpackage is not installed"),
        ("sky-sample>=99", "sky-sample 2.13.0+cpu is installed"),
        ("sky-sample==2.13.0+cu126", "sky-sample 2.13.0+cpu is installed"),
        ("sky-sample[slow]", "Sky.Sample 2.13.0+cpu has no extra 'slow'"),
        ("sky-sample[fast]", "its extra 'fast' needs sky-turbo>=2: sky-turbo is not installed"),
        (
            "sky-sample @ https://example.org/sky_sample-3.0-py3-none-any.whl",
            "Sky.Sample 2.13.0+cpu is installed",
        ),
        ("https://example.org/sky_sample-3.0.tar.gz", "sky-sample 2.13.0+cpu is installed"),
        ("git+https://example.org/sky.git", "no installed package comes from there"),
        ("./no/such/folder", "no installed package comes from there"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_requirement_that_is_not_met_is_named_with_the_reason(
    requirement: str, reason: str
) -> None:
    message = problems(requirement)
    assert f"  pip: {requirement} ({reason})\n" in message
    command = shlex.join([sys.executable, "-m", "pip", "install", requirement])
    assert f"install it here:\n  {command}\n" in message


def test_an_extra_is_met_when_its_packages_are_there(installed: Install) -> None:
    installed("sky-turbo", "1.0")
    assert "needs sky-turbo>=2: sky-turbo 1.0 is installed" in problems("sky-sample[fast]")


def test_an_extra_with_all_its_packages_passes(installed: Install) -> None:
    installed("sky-turbo", "2.0")
    assert problems("sky-sample[fast]") == ""


def test_a_package_knows_where_it_came_from(installed: Install) -> None:
    installed("sky-tree", "1", url="https://example.org/tree.git")
    assert problems("git+https://me:secret@example.org/tree.git@v1") == ""
    assert problems("sky-tree @ git+https://example.org/tree.git@main") == ""
    message = problems("sky-tree @ git+https://me:secret@example.org/other.git")
    assert "the sky-tree that is installed comes from https://example.org/tree.git" in message
    assert "secret" not in message


def test_a_folder_is_known_by_the_name_of_its_project(installed: Install, tmp_path: Path) -> None:
    project = tmp_path / "checkout"
    project.mkdir()
    (project / "pyproject.toml").write_text('[project]\nname = "sky-mine"\n')
    assert "(sky-mine is not installed)" in problems(str(project))
    installed("sky-mine", "0.1")
    assert problems(str(project)) == ""


@pytest.fixture
def dpkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dpkg that knows three packages."""
    program = tmp_path / "bin" / "dpkg-query"
    program.parent.mkdir()
    lines = [
        "ffmpeg\tamd64\tinstalled\t7:5.1.6-0\t",
        "mawk\tamd64\tinstalled\t1.3.4\tawk, weak (= 2)",
        "removed\tamd64\tconfig-files\t1\t",
    ]
    text = "\\n".join(lines).replace("\t", "\\t")
    program.write_text(f"#!/bin/sh\nprintf '{text}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.usefixtures("dpkg")
def test_packages_of_the_system_that_are_there_pass() -> None:
    image.check(Image(apt=["ffmpeg", "ffmpeg:amd64", "ffmpeg=7:5.1.6-0", "ffmpeg/stable", "awk"]))


@pytest.mark.usefixtures("dpkg")
def test_one_error_names_all_that_is_missing_and_the_commands() -> None:
    wanted = Image(
        pip=["nosuchpackage>=3", "pytest"],
        pip_indexes=[PipIndex("https://me:secret@example.org/simple", packages=["nosuchpackage"])],
        apt=["nosuchprogram", "ffmpeg", "removed", "ffmpeg=8"],
        includes=["/nonexistent", "/also/nonexistent"],
    )
    with pytest.raises(sky.errors.ImageError) as caught:
        image.check(wanted)
    message = str(caught.value)
    for line in (
        "pip: nosuchpackage>=3 (nosuchpackage is not installed)",
        "apt: nosuchprogram (not installed)",
        "apt: removed (not installed)",
        "apt: ffmpeg=8 (not installed)",
        "includes: Image(includes=['/nonexistent']): there is no /nonexistent",
        "includes: Image(includes=['/also/nonexistent']): there is no /also/nonexistent",
        "-m pip install --extra-index-url https://***@example.org/simple 'nosuchpackage>=3'",
        "sudo apt-get install -y nosuchprogram removed ffmpeg=8",
    ):
        assert line in message
    assert "pytest" not in message
    assert "secret" not in message


def test_a_machine_without_dpkg_says_that_apt_cannot_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match=r"Image\(apt=\['ffmpeg'\]\): this machine has no dpkg"):
        image.check(Image(apt=["ffmpeg"]))


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="this machine has no dpkg")
def test_the_dpkg_of_this_machine_is_read() -> None:
    said = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package}=${Version} ${db:Status-Status}\n"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    first = next(line.split()[0] for line in said.splitlines() if line.endswith(" installed"))
    image.check(Image(apt=[first]))
    with pytest.raises(sky.errors.ImageError, match=r"apt: nosuchpackage-xyz \(not installed\)"):
        image.check(Image(apt=[first, "nosuchpackage-xyz"]))


def test_python_is_judged_by_as_much_of_its_version_as_is_given() -> None:
    version = platform.python_version()
    major, minor, _ = version.split(".")
    for same in ("auto", version, f"{major}.{minor}"):
        image.check_python(Image(python=same))
    for other in (f"{major}.{int(minor) + 1}", f"{major}.{minor}.99"):
        with pytest.raises(
            sky.errors.ConfigurationError, match=f"python='{other}'.*Python, {version}"
        ):
            image.check_python(Image(python=other))


def test_a_pool_does_not_start_without_what_its_image_asks_for() -> None:
    wanted = Image(pip=["skyward>=99"], includes=["/nonexistent"])
    with pytest.raises(sky.errors.ImageError, match=r"(?s)skyward>=99 .*there is no /nonexistent"):
        with sky.Compute(image=wanted, options=QUIET):
            pass


def test_includes_are_importable_and_excludes_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on every other node: in the working directory, which is the first place for imports."""
    package = tmp_path / "elsewhere" / "sky_included"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("from pathlib import Path\nHERE = Path(__file__).parent\n")
    (package / "answer.txt").write_text("42")
    (package / "large.ckpt").write_text("not sent")
    project = tmp_path / "project"
    (project / "conf").mkdir(parents=True)
    (project / "conf" / "a.toml").write_text("a = 1")
    monkeypatch.chdir(project)

    @sky.function
    def look() -> tuple[str, list[str], str, bool, str | None]:
        import importlib
        import os
        from pathlib import Path

        module = importlib.import_module("sky_included")
        listed = sorted(path.name for path in Path("sky_included").iterdir())
        answer = (module.HERE / "answer.txt").read_text()
        return answer, listed, Path("conf/a.toml").read_text(), Path("x").exists(), os.getenv("HI")

    (project / "x").touch()
    wanted = Image(
        includes=[str(package), "conf"], excludes=["*.ckpt"], env={"HI": "there"}, apt=[]
    )
    with sky.Compute(image=wanted, nodes=2, options=QUIET) as compute:
        for answer, listed, conf, has_more, variable in look() @ compute:
            assert answer == "42"
            assert [name for name in listed if name != "__pycache__"] == [
                "__init__.py",
                "answer.txt",
            ]
            assert (conf, has_more, variable) == ("a = 1", False, "there")
    assert not (package / "__pycache__").exists() or not any((package / "__pycache__").iterdir())
