"""`sky doctor`: what it finds on this machine and of providers, and when its exit code is 1."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skyward.cli import doctor, health, output
from skyward.device import build
from skyward.providers.hosts import openssh
from skyward.wire import native

from ..conftest import has_compiler

CACHE = build.cache().parent


@pytest.fixture(autouse=True)
def nothing_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has set up no provider, in an empty folder."""
    for name in os.environ:
        if name.startswith(("AWS_", "RAY_", "SLURM_", "KUBE", "DOCKER_", "SKYWARD_", "SSH_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


class _Dashboard(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"ray_version": "2.99"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def dashboard() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Dashboard) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_machine_that_works_has_exit_code_0_though_no_provider_is_set_up(
    run_json, nothing_set_up: Path, silent: str
) -> None:
    """Starts a worker and imports torch, in processes of their own: seconds."""
    (nothing_set_up / "skyward.toml").write_text(
        f"""
        [pools.here]
        [pools.far]
        provider = "ssh"
        hosts = ["127.0.0.1:{silent.rpartition(":")[2]}"]
        timeout = 0.5
        [pools.typo]
        node = 2
        """
    )

    document = run_json("doctor")

    assert document["ok"] is True
    found = {each["check"]: each for each in document["checks"]}
    for name in (
        "python",
        "skyward",
        "local",
        "torch",
        "memory",
        "limits",
        "state folder",
    ):
        assert found[name]["state"] == "ok", found[name]
    assert found["device"]["found"].endswith("; tried with torch 2.11, 2.13 and 2.15")
    for name in ("aws", "kubernetes", "ray", "ssh"):
        assert found[name]["state"] == "not set up", found[name]
        assert found[name]["advice"]
    assert found["pool here"]["state"] == "ok"
    assert found["pool typo"]["state"] == "problem"
    assert "did you mean 'nodes'?" in found["pool typo"]["advice"]
    assert found["pool far"]["state"] == "problem"
    assert "127.0.0.1" in found["pool far"]["advice"]


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu", "3.0.0a0+git1234"])
def test_a_torch_that_nobody_has_tried_is_told(version: str) -> None:
    (found,) = health._untried_torch(version)
    assert (found.check, found.state) == ("device", "problem")
    assert found.found == (
        "the torch device has been tried with torch 2.11, 2.13 and 2.15, "
        f"and torch {version} is outside of these versions"
    )
    assert "torch>=2.11,<2.16" in found.advice
    assert not list(health._untried_torch("2.11.0"))
    assert not list(health._untried_torch("2.14.0"))
    assert not list(health._untried_torch("2.15.2+cu132"))


def test_lines_are_no_longer_than_the_terminal_is_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "on_a_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    words = " ".join(f"word-{number}" for number in range(20))
    doctor._tell([health.Finding("aws", "not set up", words, f"install `it` {words}")])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 50
    assert told.count("word-19") == 2, "nothing is cut"
    assert "\n- aws: install `it` word-0 word-1" in told


def test_a_provider_that_answers_is_ok(run, dashboard: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", dashboard)

    lines = run("doctor", "ray").stdout.splitlines()

    assert lines[1].split(None, 2) == ["ray", "ok", f"Ray 2.99 at {dashboard}"]
    assert len(lines) == 2, "only what was named is checked"


def test_a_named_provider_that_is_not_set_up_is_a_failure_with_advice(run) -> None:
    result = run("doctor", "kubernetes", code=1)

    assert "kubernetes  not set up" in result.stdout
    assert "To use more:\n- kubernetes: Kubernetes(): there is no cluster" in result.stdout
    assert "set KUBECONFIG" in result.stdout


def test_a_provider_that_is_out_of_reach_is_a_problem(run, monkeypatch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", closed)

    result = run("doctor", "ray", code=1)

    assert f"To do:\n- ray: Ray('{closed}'): nobody answers there" in result.stdout
    assert "Traceback" not in result.output


def test_a_provider_that_never_answers_holds_up_nobody(run, silent: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", silent)
    monkeypatch.setattr(doctor, "_PROVIDER_SECONDS", 0.3)

    assert "no answer in 0.3 s" in run("doctor", "ray", code=1).stdout


def test_ssh_says_what_carries_connections(run, monkeypatch: Any) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    assert f"by {openssh.program()}; an ssh agent" in run("doctor", "ssh").stdout
    monkeypatch.setattr(openssh, "OLDEST", (999, 0))
    assert "by asyncssh, since" in run("doctor", "ssh").stdout


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1)])
def test_slurm_is_asked_with_its_own_commands(
    run, nothing_set_up: Path, monkeypatch: Any, status: int, code: int
) -> None:
    for name in ("sinfo", "scontrol"):
        script = nothing_set_up / name
        said = "slurm 25.05" if name == "sinfo" else "Slurmctld(primary) at n0"
        script.write_text(f"#!/bin/sh\necho {said!r}\nexit {0 if name == 'sinfo' else status}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nothing_set_up}:{os.environ['PATH']}")

    told = run("doctor", "slurm", code=code).stdout

    assert ("slurm 25.05 on this machine" if not status else "no controller answers") in told


def test_aws_without_credentials_is_not_set_up(run, monkeypatch: Any) -> None:
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_REGION", "us-east-1")

    told = run("doctor", "aws", code=1).stdout

    assert "aws    not set up" in told
    assert "credentials" in told


def test_a_name_that_no_provider_has_is_wrong_usage(run) -> None:
    assert "no provider is called 'awss'; there are aws," in run("doctor", "awss", code=2).stderr


def test_a_state_folder_that_cannot_be_made_breaks_everything(
    nothing_set_up: Path, monkeypatch: Any
) -> None:
    (nothing_set_up / "file").touch()
    monkeypatch.setenv("SKYWARD_STATE", str(nothing_set_up / "file" / "state"))

    found = {each.check: each for each in health.machine_checks()["disk"]()}

    assert found["state folder"].state == "broken"
    assert "name another with SKYWARD_STATE" in found["state folder"].advice
    assert found["temporary folder"].state == "ok"


def test_a_worker_that_does_not_start_is_broken_and_says_why(monkeypatch: Any) -> None:
    monkeypatch.setattr(health, "_WORKER", "raise SystemExit('no such worker')")

    (found,) = health.machine_checks()["local"]()

    assert found.state == "broken"
    assert found.advice.startswith("no such worker; run `python -c")


@pytest.mark.parametrize(
    ("package", "advice"),
    [("skyward", "pip uninstall skyward skyward-torch"), ("skypilot", "`python -m skyward`")],
)
def test_packages_of_others_with_our_name_or_our_command_are_told(
    nothing_set_up: Path, monkeypatch: Any, package: str, advice: str
) -> None:
    folder = nothing_set_up / f"{package}-0.12.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.12\n")
    (nothing_set_up / "interrupted-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(nothing_set_up)

    (problem,) = [each for each in health._versions() if each.state == "problem"]

    assert problem.check == "skyward"
    assert "0.12" in problem.found
    assert advice in problem.advice


def test_links_say_what_moves_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "SHIPPED", tmp_path / "wheel")
    nothing = health._links()
    assert nothing.state == "not set up"
    assert "no compiled core, and no C++ compiler: Python encrypts" in nothing.found
    monkeypatch.setenv("CXX", "/usr/bin/some-c++")
    python = health._links()
    assert python.state == "ok"
    assert "calls go through Python's ssl" in python.found
    assert "compiles a faster core with /usr/bin/some-c++" in python.found
    (tmp_path / "device").mkdir()
    core = build._place(build.LINK)
    core.write_text("no library")
    broken = health._links()
    assert broken.state == "problem"
    assert "the core that was compiled here cannot be loaded" in broken.found
    assert str(core) in broken.advice


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
def test_links_say_which_openssl_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_CACHE", str(CACHE))
    build.library(build.LINK)
    found = health._links()
    assert found.state == "ok"
    assert found.found.startswith("the core that was compiled here with OpenSSL 3.")
    monkeypatch.setenv("SKYWARD_KERNEL_TLS", "1")
    assert "TLS" in health._links().found
    monkeypatch.setattr(native, "openssl_libraries", lambda: ["libnone.so.3"])
    without = health._links()
    assert without.state == "not set up"
    assert without.found.startswith("Python encrypts for the core that was compiled here, which ")
    assert "libnone.so.3" in without.found
