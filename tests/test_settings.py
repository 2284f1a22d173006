"""Pools by name: what skyward.toml and [tool.skyward] may say, and how they are refused."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import skyward as sky
from skyward.compute.arguments import _Reader, arguments_of, seconds_of
from skyward.settings import ProjectSettings, settings_file


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, without a file that the environment names."""
    monkeypatch.delenv("SKYWARD_CONFIG", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refusal(project: Path, text: str, pool: str = "train") -> str:
    """The message with which a file is refused; it begins with the file."""
    (project / "skyward.toml").write_text(text)
    with pytest.raises(sky.errors.ConfigurationError) as caught:
        arguments_of(pool)
    message = str(caught.value)
    assert message.startswith(str(project / "skyward.toml"))
    return message.removeprefix(str(project / "skyward.toml"))


# What a file may say.


def test_a_pool_has_the_arguments_of_compute_and_those_of_its_provider(project: Path) -> None:
    (project / "skyward.toml").write_text(
        """
        [pools.train]
        provider = "ssh"
        hosts = ["gpu1", "me@gpu2:2222"]
        timeout = "20s"
        nodes = 2
        accelerator = "H100:8"
        ttl = "8h"
        keep = true
        vcpus = 4
        image = {pip = ["numpy"], env = {LEVEL = "3"}, includes = ["src"]}
        plugins = ["torch", {keras = {backend = "torch"}}]
        volumes = ["/data", {source = "/fast", read_only = true}]

        [pools.train.worker]
        per_node = "accelerator"

        [pools.train.options]
        idle_timeout = "1h30m"
        """
    )
    found = arguments_of("train")
    assert [plugin.name for plugin in found.pop("plugins")] == ["torch", "keras"]
    assert found == {
        "name": "train",
        "provider": sky.SSH(["gpu1", "me@gpu2:2222"], timeout=20.0),
        "nodes": 2,
        "accelerator": sky.accelerators.H100(count=8),
        "ttl": 28800.0,
        "keep": True,
        "vcpus": 4,
        "image": sky.Image(pip=["numpy"], env={"LEVEL": "3"}, includes=[str(project / "src")]),
        "volumes": [sky.Volume("/data"), sky.Volume("/fast", read_only=True)],
        "worker": sky.Worker(per_node="accelerator"),
        "options": sky.Options(idle_timeout=5400.0),
    }


@pytest.mark.parametrize(
    ("written", "nodes"),
    [
        ("3", 3),
        ("[2, 8]", sky.Nodes(2, min=2, max=8)),
        ("{desired = 8, min = 4}", sky.Nodes(8, min=4)),
    ],
)
def test_nodes_are_a_number_a_pair_or_a_table(project: Path, written: str, nodes: object) -> None:
    (project / "skyward.toml").write_text(f"[pools.a]\nnodes = {written}")
    assert arguments_of("a") == {"name": "a", "nodes": nodes}


def test_a_provider_with_a_table_of_its_own_keeps_its_keys_apart(project: Path) -> None:
    (project / "skyward.toml").write_text(
        """
        [pools.boxes]
        provider = {name = "container", image = "python:3.12-slim", mounts = ["/data"]}
        image = {pip = ["numpy"]}
        """
    )
    found = arguments_of("boxes")
    assert found["provider"] == sky.Container("python:3.12-slim", mounts=[sky.Volume("/data")])
    assert found["image"] == sky.Image(pip=["numpy"])


def test_a_project_is_relative_to_the_file(project: Path) -> None:
    (project / "skyward.toml").write_text(
        '[pools.a]\nproject = "src"\n[pools.b]\nproject = {excludes = ["data"]}'
    )
    assert arguments_of("a")["project"] == sky.Project(str(project / "src"))
    assert arguments_of("b")["project"] == sky.Project(str(project), excludes=["data"])


def test_every_argument_of_compute_can_be_written() -> None:
    known = set(inspect.signature(sky.Compute.__init__).parameters) - {"self", "provider", "name"}
    readers = set(_Reader(ProjectSettings(Path(), {}), "any")._readers())
    assert known - readers <= {"on_event"}, "an argument of Compute that no file can say"
    assert readers - known <= {"keep"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("45 min", 2700), ("8h", 28800), ("1h30m", 5400), ("1.5d", 129600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_a_named_compute_runs_and_its_overrides_count(project: Path) -> None:
    (project / "skyward.toml").write_text(
        """
        [pools.here]
        provider = "ssh"
        hosts = ["nowhere.invalid"]
        nodes = 7
        options = {console = false}
        """
    )

    @sky.function
    def double(number: int) -> int:
        return 2 * number

    with sky.Compute.named("here", provider=sky.Local(), nodes=1) as compute:
        assert compute.name == "here"
        assert double(4) >> compute == 8


# Where the file is.


def test_the_nearest_file_upwards_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "skyward.toml").write_text("[pools.outer]")
    inner = project / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert arguments_of("outer") == {"name": "outer"}
    (project / "a" / "pyproject.toml").write_text("[project]\nname = 'x'")
    assert settings_file() == project / "skyward.toml", "a pyproject.toml without tool.skyward"
    (project / "a" / "pyproject.toml").write_text("[tool.skyward.pools.inner]\nnodes = 2")
    assert arguments_of("inner") == {"name": "inner", "nodes": 2}
    (project / "a" / "skyward.toml").write_text("[pools.own]")
    assert settings_file() == project / "a" / "skyward.toml"


def test_the_environment_names_another_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "skyward.toml").write_text("[pools.a]")
    (project / "other.toml").write_text("[pools.b]")
    monkeypatch.setenv("SKYWARD_CONFIG", "other.toml")
    assert arguments_of("b") == {"name": "b"}
    monkeypatch.setenv("SKYWARD_CONFIG", "absent.toml")
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"absent\.toml: No such file.*SKYWARD_CONFIG"
    ):
        arguments_of("b")


def test_without_a_file_the_error_says_where_one_was_looked_for(project: Path) -> None:
    with pytest.raises(sky.errors.ConfigurationError) as caught:
        sky.Compute.named("train")
    assert f"neither {project} nor a folder above it has a skyward.toml" in str(caught.value)


# Variables.


def test_variables_of_the_environment_are_expanded(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "skyward.toml").write_text(
        "[pools.a]\nimage = {env = {TOKEN = 'x${MY_TOKEN}', PLAIN = '$${MY_TOKEN}'}}"
    )
    monkeypatch.setenv("MY_TOKEN", "1234")
    assert dict(arguments_of("a")["image"].env) == {"TOKEN": "x1234", "PLAIN": "${MY_TOKEN}"}
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(
        sky.errors.ConfigurationError, match="the environment variable MY_TOKEN is not se"
    ):
        arguments_of("a")


def test_an_expanded_value_is_not_shown(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    message = refusal(project, "[pools.train]\nimage = {env = {A = '${MY_TOKEN}', B = 3}}")
    assert "secret" not in message
    assert "${MY_TOKEN}" in message


# What is refused.

REFUSED = {
    "[pools.trian]": " has no pool 'train', did you mean 'trian'?; it has trian; add a table ",
    "[pools": " is not TOML: ",
    "[pool.train]": ": pool: there is no such table, did you mean 'pools'?; pools are written as",
    "[pools]\ntrain = 3": ": pools.train = 3: a pool is a table; write [pools.NAME] above its keys",
    "[pools.train]\nnode = 2": (
        ": [pools.train] node = 2: neither a pool nor the provider 'local' has it, did you mean "
        "'nodes'?; a pool has provider, nodes, accelerator"
    ),
    "[pools.train]\nprovider = 'sssh'": (
        ": [pools.train] provider = \"sssh\": no provider is called 'sssh'; there are aws, "
    ),
    "[pools.train]\nprovider = 'ssh'": (
        ': [pools.train] provider = "ssh": it needs hosts; add hosts = ...'
    ),
    "[pools.train]\nprovider = 'ssh'\nhosts = 'gpu1'": "write hosts=['gpu1']",
    "[pools.train]\nprovider = ['ssh']": (
        ': [pools.train] provider = ["ssh"]: write its name, provider = "ssh", or a table'
    ),
    "[pools.train]\nttl = '8 hours'": (
        ': [pools.train] ttl = "8 hours": not a duration; write a number of seconds, or one such '
    ),
    "[pools.train]\naccelerator = 'H1000'": "accelerator = \"H1000\": accelerator 'H1000': no mode",
    "[pools.train]\naccelerator = 3": "accelerator = 3: must be a string; write one such as",
    "[pools.train]\nkeep = 'yes'": 'keep = "yes": must be true or false; write one such as true',
    "[pools.train]\nnodes = 0": ": [pools.train] nodes = 0: ",
    "[pools.train]\nvcpus = -1": "vcpus = -1: must be a number above 0",
    "[pools.train]\nimage = {pipp = ['x']}": "image has no 'pipp', did you mean 'pip'?; it has pyt",
    "[pools.train]\nimage = 'python:3.12'": "the image of a provider's containers goes to the prov",
    "[pools.train]\nplugins = ['toch']": "there is no plugin 'toch'; there are accelerate",
    "[pools.train]\nplugins = ['plugin']": "there is no plugin 'plugin'; there are accelerate",
    "[pools.train]\nplugins = 'torch'": 'must be a list; write one such as ["torch"',
    "[pools.train]\nplugins = [{torch = {backnd = 'gloo'}}]": (
        "plugin 'torch' has no 'backnd', did you mean 'backend'?; it has backend, cuda"
    ),
    "[pools.train]\nplugins = [{torch = {backend = 'mpi'}}]": "choose 'nccl', 'gloo', or None",
    "[pools.train]\nvolumes = [{target = '/data'}]": "a volume needs source",
    "[pools.train]\noptions = {retries = 'two'}": "retries must be a whole number",
    "[pools.train]\nregion = '${}'": "names no variable; write ${NAME}, or $${ for a plain ${",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_work_is_refused_with_file_key_and_value(project: Path, text: str) -> None:
    assert REFUSED[text] in refusal(project, text)
