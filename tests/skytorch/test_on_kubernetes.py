"""Arguments of computes that only a cluster takes; tests/providers has the pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import skyward as sky
from skytorch.client import Compute, default_namespace, init, kubeconfig
from skyward.providers.kubernetes import access
from skyward.providers.kubernetes.access import Access

KUBECONFIG = {
    "current-context": "lab",
    "clusters": [{"name": "lab", "cluster": {"server": "https://lab.example"}}],
    "users": [{"name": "me", "user": {"token": "secret"}}],
    "contexts": [
        {"name": "lab", "context": {"cluster": "lab", "user": "me", "namespace": "research"}}
    ],
}


# Arguments, without a cluster.


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A kubeconfig that names a cluster, which nobody asks."""
    pytest.importorskip("kubernetes")
    path = tmp_path / "config"
    path.write_text(json.dumps(KUBECONFIG))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": ["--port", "1"]}, r"args=\['--port', '1'\]\): the first process .*give command="),
        ({"resources": {"tpu": "1"}}, "knows no such resource.*'hugepages-2Mi'"),
        ({"resources": {"memory": "8 GB"}}, "not an amount above 0"),
        ({"resources": {"habana.ai/gaudi": "1500m"}}, "GPUs and other devices are whole"),
        ({"volumes": ["/data"]}, r"'/data' is no mapping; write \{'name': 'data', 'storage'"),
        ({"volumes": [{"path": "data"}]}, "has no absolute path"),
        ({"volumes": [{"path": "/d", "size": "1"}]}, "has the unknown key 'size'"),
        ({"volumes": [{"path": "/d", "storage": "1Gi"}]}, "has no name that Kubernetes would take"),
        ({"volumes": [{"path": "/d", "name": "d", "storage": "big"}]}, "no amount such as '10Gi'"),
        ({"volumes": [{"path": "/d", "claim": "A B"}]}, "names no claim"),
        ({"volumes": [{"path": "/d", "claim": "a", "storage": "1"}]}, "both storage and a claim"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_cluster_is_asked(
    configured: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=message):
        Compute(name="node", **arguments)


def test_every_resource_of_kubernetes_is_asked_for_as_it_is_written(configured: Path) -> None:
    asked = {
        "cpu": "1500m",
        "memory": "8Gi",
        "ephemeral-storage": "20Gi",
        "hugepages-2Mi": "512Mi",
        "nvidia.com/mig-1g.5gb": 1,
        "google.com/tpu": "4",
    }
    provider = Compute(name="node", resources=asked)._provider
    assert provider is not None
    assert provider.pod_template is not None

    (container,) = provider.pod_template["spec"]["containers"]
    written = {name: str(amount) for name, amount in asked.items()}
    assert container["resources"] == {"requests": written, "limits": written}
    assert [each["key"] for each in provider.tolerations] == [
        "nvidia.com/mig-1g.5gb",
        "google.com/tpu",
        "nvidia.com/gpu",
    ]


def test_the_pod_gets_the_torch_of_this_process(configured: Path) -> None:
    version = torch.__version__.partition("+")[0]
    plain, gpu = Compute("a"), Compute("b", resources={"nvidia.com/gpu": 1})

    assert f"torch=={version}" in plain._image.pip
    assert [index.url for index in plain._image.pip_indexes] == [
        "https://download.pytorch.org/whl/cpu"
    ]
    assert not gpu._image.pip_indexes


def test_the_namespace_is_that_of_init_or_of_the_context(configured: Path) -> None:
    assert default_namespace() == Compute(name="node").namespace == "research"
    init(namespace="mine")
    assert default_namespace() == Compute(name="node").namespace == "mine"


def test_in_a_pod_its_own_credentials_count_when_no_kubeconfig_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("kubernetes")
    own = tmp_path / "namespace"
    own.write_text("team-a\n")
    monkeypatch.setattr(access, "_NAMESPACE", own)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kubeconfig.place(None, None) is None, "an empty KUBECONFIG asks for this machine"

    monkeypatch.delenv("KUBECONFIG")
    assert default_namespace() == Compute(name="node").namespace == "team-a"


def test_a_client_config_is_a_path_a_mapping_or_a_configuration(
    configured: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubernetes import client

    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    init(client_config=configured)
    assert kubeconfig.chosen(str(configured)) == str(configured)
    assert Compute(name="node").namespace == "research"

    init(client_config=KUBECONFIG)
    assert Compute(name="node").namespace == "research"

    certificate = tmp_path / "ca.crt"
    certificate.write_text("a certificate")
    configuration = client.Configuration()
    configuration.host = "https://lab.example"
    configuration.ssl_ca_cert = str(certificate)
    configuration.api_key["authorization"] = "secret"
    configuration.api_key_prefix["authorization"] = "Bearer"
    init(client_config=configuration)
    assert Compute(name="node").namespace == "default"
    written = Path(str(kubeconfig.chosen(configuration)))
    assert written.stat().st_mode & 0o777 == 0o600
    assert json.loads(written.read_text())["users"][0]["user"] == {"token": "secret"}
    certificate.unlink()  # as those that the official client makes of a kubeconfig
    access = Access(sky.Kubernetes(kubeconfig=str(written))._place)
    assert (access.server, access.token) == ("https://lab.example", "secret")

    for wrong, message in ((object(), "give a kubernetes.client.Config"), ("/no", "no such file")):
        init(client_config=wrong)
        with pytest.raises(sky.errors.ConfigurationError, match=message):
            Compute(name="node")
