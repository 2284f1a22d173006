"""Arguments that cannot work are refused before anything starts, with the value and a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skytorch.client import Compute, kubeconfig
from skytorch.client.resources import Resources, number


async def late(event: object) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": 5}, r"Compute\(name=5\): name must be a str"),
        ({"name": "My_Node"}, r"Compute\(name='My_Node'\): .* write one such as 'trainer-1'"),
        ({"image": ""}, r"Compute\(image=''\): image is empty"),
        ({"command": "serve"}, r"write command=\['serve'\]"),
        ({"args": [1]}, r"args\[0\] must be a str, not int"),
        ({"env": {"A": 1}}, r"env=\{'A': \.\.\.\}.*must be a str, not int"),
        ({"labels": ["a"]}, r"Compute\(labels=\['a'\]\): labels must map text to text"),
        ({"annotations": {"a": 1}}, "annotations must map text to text"),
        ({"suspend": "no"}, r"Compute\(suspend='no'\): suspend must be True or False"),
        (
            {"volumes": [{"name": "v", "path": "/no/such"}]},
            "'/no/such'.* names no path that exists",
        ),
        ({"volumes": "data"}, "'data' names no path that exists"),
        ({"on_events": 3}, r"Compute\(on_events=3\): on_events must be a plain function"),
        ({"on_metrics": late}, "on_metrics must be a plain function"),
        ({"resources": ["gpu"]}, r"Compute\(resources=\['gpu'\]\): resources must be a mapping"),
        ({"resources": {"tpu": "1"}}, "knows no such resource; ask for 'cpu', 'memory'"),
        ({"resources": {"google.com/tpu": "4"}}, "this machine gives 'cpu', 'memory'"),
        ({"resources": {"cpu": "many"}}, "not an amount above 0; write one such as '2'"),
        ({"resources": {"cpu": True}}, "not an amount above 0"),
        ({"resources": {"memory": "0"}}, "not an amount above 0"),
        ({"resources": {"nvidia.com/gpu": "500m"}}, "GPUs and other devices are whole"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_value(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=message):
        Compute(**{"name": "node", **arguments})


def test_quantities_are_read_as_kubernetes_writes_them() -> None:
    given = {"cpu": "1500m", "memory": "8Gi", "nvidia.com/gpu": "2"}
    read = Resources.of(None, given)

    assert (read.cpus, read.memory_gb, read.devices) == (1.5, 8 * 2**30 / 1e9, ["nvidia.com/gpu"])
    read = Resources.of(None, {"cpu": 2, "memory": "500M"})
    assert (read.cpus, read.memory_gb, read.devices) == (2.0, 0.5, [])
    for text, value in {"1e3": 1e3, "2E": 2e18, ".5": 0.5, "5.": 5.0, "3Ei": 3 * 2.0**60}.items():
        assert number(text) == value


def test_more_gpus_than_there_are_is_refused_naming_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SKYWARD_DEVICE")

    with pytest.raises(
        sky.errors.ConfigurationError, match=r"this machine has 1 x cpu.*SKYWARD_DEVICE=cpu"
    ):
        Compute(name="big", resources={"nvidia.com/gpu": "1000"})


def test_cpus_stand_in_for_gpus_on_request() -> None:
    assert Compute(name="small", resources={"nvidia.com/gpu": "1"}).name == "small"


def test_a_volume_is_a_path_of_this_machine(tmp_path: Path) -> None:
    Compute(name="reader", volumes=[{"name": "data", "path": str(tmp_path), "storage": "1Gi"}])


def test_the_usual_kubeconfig_counts_when_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG")
    assert kubeconfig.chosen(None) is None

    (tmp_path / ".kube").mkdir()
    usual = tmp_path / ".kube" / "config"
    usual.touch()
    assert kubeconfig.chosen(None) is None
    usual.write_text("apiVersion: v1\n")
    assert kubeconfig.chosen(None) == str(usual)

    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    assert kubeconfig.chosen(None) is None


def test_a_kubeconfig_that_names_no_cluster_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text("apiVersion: v1\n")
    monkeypatch.setenv("KUBECONFIG", str(config))

    with pytest.raises(
        sky.errors.ConfigurationError,
        match=r"no cluster to talk to.*KUBECONFIG=/dev/null runs computes",
    ):
        Compute(name="node")


def test_a_kubeconfig_that_is_not_there_is_a_mistake_not_a_wish_to_run_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/no/such/config")

    with pytest.raises(sky.errors.ConfigurationError, match="there is no file '/no/such/config'"):
        Compute(name="node")


def test_that_it_runs_here_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kubeconfig, "_said", False)

    Compute(name="one")
    Compute(name="two")

    said = capsys.readouterr().err
    assert said.count("skytorch: no kubeconfig, so computes are processes on this machine") == 1
