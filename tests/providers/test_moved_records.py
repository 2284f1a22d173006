"""Records of pools that go to another machine, which has its files in other places."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import skyward as sky
from skyward import providers
from skyward.nodes import records
from skyward.nodes.kept import exported, imported
from skyward.nodes.records import KeptNode, KeptPool
from skyward.providers import Allocation, Capabilities, Request
from skyward.providers.kubernetes import access

from . import kept_pools


def record_of(provider: str, arguments: Mapping[str, Any], **changed: Any) -> KeptPool:
    """The record of a pool that is stopped, so that nobody connects to it."""
    told = KeptPool(
        *("p1", "bench", provider, dict(arguments), 0.0, 0.0, None, None, None, None, ""),
        nodes=[],
        stopped=True,
    )
    return msgspec.structs.replace(told, **changed)


class User:
    """A user of two machines, whose home folders and state are elsewhere on each."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch
        self._homes: dict[str, Path] = {}

    def at(self, machine: str) -> Path:
        """Go to a machine, where nothing of the others is; gives the home folder there."""
        for left in self._homes.values():
            if left.exists():
                left.rename(left.with_name("away"))
        home = self._homes.setdefault(machine, self._folder / machine / "me")
        if home.with_name("away").exists():
            home.with_name("away").rename(home)
        for variable, value in {"HOME": home, "SKYWARD_STATE": home / "state"}.items():
            self._patch.setenv(variable, str(value))
        home.mkdir(parents=True, exist_ok=True)
        return home


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    for variable in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "DOCKER_HOST"):
        monkeypatch.delenv(variable, raising=False)
    return User(tmp_path, monkeypatch)


def write(path: Path, text: str = "") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def kubeconfig(path: Path, *contexts: str) -> str:
    """Write a kubeconfig with these contexts of one cluster."""
    document = {
        "clusters": [{"name": "one", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
        "contexts": [{"name": n, "context": {"cluster": "one", "user": "me"}} for n in contexts],
        "current-context": contexts[0],
    }
    return write(path, yaml.safe_dump(document))


@pytest.fixture
def from_a_cluster(user: User) -> bytes:
    """The record of a pool on a cluster whose kubeconfig has a path of its own, exported."""
    pytest.importorskip("kubernetes")
    config = kubeconfig(user.at("laptop") / "clusters" / "lab.yaml", "lab")
    provider = sky.Kubernetes(kubeconfig=config, namespace="team")
    return exported(record_of("kubernetes", provider.describe()))


def place(record: KeptPool) -> tuple[str, str, str]:
    told = record.arguments
    return told["kubeconfig"], told["context"], told["namespace"]


def test_a_context_is_found_in_the_users_own_kubeconfig(from_a_cluster: bytes, user: User) -> None:
    own = kubeconfig(user.at("server") / ".kube" / "config", "default", "lab")

    assert place(imported(from_a_cluster, "file")) == (own, "lab", "team")
    assert place(records.read("bench")) == (own, "lab", "team"), "it stays what it is"


def test_a_kubeconfig_at_the_same_place_in_the_home_folder_goes_first(
    from_a_cluster: bytes, user: User
) -> None:
    kubeconfig(user.at("server") / ".kube" / "config", "lab")
    same = kubeconfig(user.at("server") / "clusters" / "lab.yaml", "lab")

    assert place(imported(from_a_cluster, "file")) == (same, "lab", "team")


def test_a_context_that_is_not_here_is_named_with_the_next_step(
    from_a_cluster: bytes, user: User, tmp_path: Path
) -> None:
    own = kubeconfig(user.at("server") / ".kube" / "config", "default", "eks-lab")
    file = write(tmp_path / "file", from_a_cluster.decode())

    said = kept_pools.says("attach", "--import", file, code=1)
    assert f"Kubernetes(context='lab'): {own} has no such context; it has default, eks-lab" in said
    assert "clusters/lab.yaml' on the other machine, and is None here; --with kubeconfig=" in said
    assert records.names() == []

    said = kept_pools.says("attach", "--import", file, "mine", "--with", "context=eks-lab")
    assert place(records.read("mine")) == (own, "eks-lab", "team")
    assert f"{file}: others can read this key to the pool; delete it" in said


def test_in_a_pod_without_a_kubeconfig_its_own_credentials_count(
    from_a_cluster: bytes, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write(user.at("pod") / "namespace", "pods-own")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(access, "_NAMESPACE", Path(own))

    record = imported(from_a_cluster, "file")
    assert place(record) == ("in-cluster", None, "team")
    sent_back = exported(record)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    config = kubeconfig(user.at("server") / ".kube" / "config", "lab")
    assert place(imported(sent_back, "file")) == (config, "lab", "team")


def test_files_of_ssh_are_those_that_are_here(user: User) -> None:
    there = user.at("laptop")
    key, config = write(there / ".ssh" / "lab"), write(there / "lab.config")
    hosts = sky.SSH(["gpu1"], key=key, config=config, known_hosts=write(there / "known"))
    alone = exported(record_of("ssh", hosts.describe()))
    login = exported(record_of("slurm", sky.Slurm(login=hosts).describe(), name="cluster"))

    own = write(user.at("server") / ".ssh" / "lab")
    told = imported(alone, "file").arguments
    assert (told["key"], told["config"], told["known_hosts"]) == (own, "~/.ssh/config", None)
    assert imported(login, "file").arguments["login"] == told
    told = imported(alone, "file", "agent", {"key": ""}).arguments
    assert told["key"] is None


def test_a_socket_of_another_machine_is_not_taken_for_ones_own(user: User) -> None:
    pytest.importorskip("docker")
    socket = write(user.at("laptop") / "docker.sock")
    told = exported(record_of("container", sky.Container(host=f"unix://{socket}").describe()))
    remote = exported(record_of("container", sky.Container(host="ssh://me@gpu1").describe()))

    user.at("server")
    assert imported(told, "file").arguments["host"] is None
    assert imported(remote, "file", "far").arguments["host"] == "ssh://me@gpu1"
    own = write(user.at("server") / "docker.sock")
    assert imported(told, "file", "same").arguments["host"] == f"unix://{own}"


def test_a_profile_of_aws_that_is_not_here_is_left_to_the_account(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_CONFIG_FILE", write(user.at("server") / "aws", "[profile own]\n"))
    told = {"profile": "lab", "key": "/home/me/key", "account": "123456789012"}
    told["region"] = "us-east-1"

    here = sky.AWS.arguments_here(told, "/home/me")
    assert here == told | {"profile": None, "key": None}
    assert sky.AWS.arguments_here({**told, "profile": "own"}, "")["profile"] == "own"
    assert sky.AWS(**here).describe()["account"] == "123456789012"


def test_what_only_this_machine_can_use_is_not_exported(user: User) -> None:
    user.at("laptop")
    for record, words in [
        (record_of("local", {}), "processes of this machine.* with sky.SSH"),
        (record_of("aws", {}, inside=True), "export .* on the machine that made the pool"),
    ]:
        with pytest.raises(sky.errors.PoolError, match=words):
            exported(record)


class Empty:
    """A place that has no machine of any pool."""

    name, where = "empty", "empty at 10.0.0.1"
    capabilities = Capabilities(collects=True)

    def __init__(self, host: str | None = None) -> None:
        self.host = host

    def describe(self) -> Mapping[str, Any]:
        return {"host": self.host}

    def price(self, request: Request) -> None: ...

    def check(self, request: Request) -> None: ...

    def allocate(self, pool: str) -> Allocation[Any]:
        return Allocation(self, pool)  # type: ignore[arg-type]

    async def find(self, pool: str) -> Sequence[Any]:
        return []


def test_a_pool_that_is_not_there_is_not_written_down(
    user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(providers.BUILT_IN, "empty", f"{__name__}:Empty")
    user.at("laptop")
    node = KeptNode(0, "tcp:10.0.0.2:1", 1, "gpu1", "10.0.0.2", 0, None, "m1")
    records.write(record_of("empty", {"host": None}, nodes=[node], stopped=False))
    file = str(tmp_path / "file")
    kept_pools.says("attach", "bench", "--export", file)
    assert os.stat(file).st_mode & 0o777 == 0o600

    user.at("server")
    said = kept_pools.says("attach", "--import", file, code=1)
    assert "bench: there is no machine of the pool: empty at 10.0.0.1; if that is not" in said
    said = kept_pools.says("attach", "--import", file, "--with", "port=1", code=1)
    assert "the provider empty has no argument 'port'; it has host" in said
    assert "write NAME=VALUE" in kept_pools.says(
        "attach", "--import", file, "--with", "port", code=2
    )
    assert records.names() == []


def test_a_record_that_is_here_is_not_replaced(user: User) -> None:
    user.at("laptop")
    record = record_of("ray", sky.Ray("http://head:8265").describe())
    records.write(record)
    file = msgspec.json.encode(record)
    with pytest.raises(sky.errors.ConfigurationError, match="'bench' is kept already"):
        imported(file, "file")
    assert records.read("bench") == record
