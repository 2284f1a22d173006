"""Getting into an SSH host: host keys, user keys, and what is not there."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.nodes import host
from skyward.nodes.records import Journal
from skyward.providers import Order
from skyward.testing import plain_request

from ..conftest import PATIENCE
from .ssh_hosts import Sshd, another, created, refusal

pytestmark = pytest.mark.usefixtures("carrier")


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_the_fix(
    sshd: Sshd, tmp_path: Path
) -> None:
    empty = tmp_path / "known hosts"

    message = refusal(sshd.provider(known_hosts=str(empty)), sky.errors.HostKeyError)

    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(sshd.folder / "host1.pub")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[1]
    assert shown.startswith("SHA256:")
    assert f"is not known. It showed ssh-ed25519 {shown}" in message
    assert f"{empty} (no such file) had no entry for" in message
    assert f"ssh-keyscan -p {sshd.port} 127.0.0.1 >> '{empty}'" in message
    assert f"-p {sshd.port} {sshd.user}@127.0.0.1" in message

    fix = next(line for line in message.splitlines() if "ssh-keyscan" in line)
    subprocess.run(fix, shell=True, check=True, capture_output=True)

    asyncio.run(created(sshd.provider(known_hosts=str(empty))))


def test_a_changed_host_key_is_loud(sshd: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    other = (sshd.folder / "host2.pub").read_text()
    known.write_text(f"[127.0.0.1]:{sshd.port} {other}")

    message = refusal(sshd.provider(known_hosts=str(known)), sky.errors.HostKeyError)

    assert "ITS HOST KEY HAS CHANGED" in message
    assert f"ssh-keygen -f {known} -R '[127.0.0.1]:{sshd.port}'" in message


def test_an_ssh_config_that_turns_checking_off_does_not(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  UserKnownHostsFile none\n  StrictHostKeyChecking no\n")

    refusal(sshd.provider(config=str(config), known_hosts=None), sky.errors.HostKeyError)


def test_hashed_names_are_known(sshd: Sshd, tmp_path: Path) -> None:
    hashed = tmp_path / "hashed"
    shutil.copy(sshd.known_hosts, hashed)
    subprocess.run(["ssh-keygen", "-qHf", str(hashed)], check=True, capture_output=True)
    assert "127.0.0.1" not in hashed.read_text()

    asyncio.run(created(sshd.provider(known_hosts=str(hashed))))


def test_an_authority_vouches_for_a_host(sshd: Sshd, tmp_path: Path) -> None:
    keygen = ["ssh-keygen", "-q"]
    for name in ("authority", "host"):
        subprocess.run([*keygen, "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    sign = ["-s", str(tmp_path / "authority"), "-I", "t", "-h", "-n", "127.0.0.1"]
    subprocess.run([*keygen, *sign, str(tmp_path / "host.pub")], check=True)
    known = tmp_path / "known_hosts"
    known.write_text(f"@cert-authority * {(tmp_path / 'authority.pub').read_text()}")
    settings = [f"HostKey {tmp_path}/host", f"HostCertificate {tmp_path}/host-cert.pub"]
    strange = tmp_path / "strange"
    strange.write_text(f"@cert-authority * {(tmp_path / 'host.pub').read_text()}")

    with another(sshd, tmp_path, *settings) as port:
        asyncio.run(created(sshd.provider("127.0.0.1", known_hosts=str(known), port=port)))
        refusal(
            sshd.provider("127.0.0.1", known_hosts=str(strange), port=port), sky.errors.HostKeyError
        )


def test_a_login_that_was_refused_leaves_nothing_on_record(
    sshd: Sshd, tmp_path: Path, state: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was made; `sky down` could not log in, either."""
    # Of a login that is cut short, since the other one was refused, nobody knows what it has made.
    monkeypatch.setattr(host, "SETTLE_SECONDS", PATIENCE)
    key = tmp_path / "stranger"
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(make, check=True)
    for _ in range(4):
        with pytest.raises(sky.errors.LoginError):
            sky.Compute(
                sshd.provider(key=str(key)), nodes=2, options=sky.Options(console=False)
            ).__enter__()
        assert state.pools() == []


def test_a_key_that_is_not_let_in_is_named(sshd: Sshd, tmp_path: Path) -> None:
    key = tmp_path / "stranger"
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "stranger@test", "-f", str(key)]
    subprocess.run(make, check=True)

    message = refusal(sshd.provider(key=str(key)), sky.errors.LoginError)

    assert f"127.0.0.1:{sshd.port}: no login as {sshd.user!r}" in message
    assert re.search(rf"tried ({key}|stranger@test) \(SHA256:", message)
    assert f"ssh -i {key}" in message


@pytest.fixture
def locked_key(sshd: Sshd, tmp_path: Path) -> Path:
    """The key that is let in, with a passphrase on its file."""
    key = tmp_path / "locked"
    shutil.copy(sshd.key, key)
    key.chmod(0o600)
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret phrase", "-f", str(key)]
    subprocess.run(change, check=True, capture_output=True)
    return key


def test_a_key_with_a_passphrase_needs_the_agent(
    sshd: Sshd, locked_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)

    message = refusal(sshd.provider(key=str(locked_key)), sky.errors.LoginError)

    assert f"ssh-add {locked_key}" in message


@pytest.fixture
def agent(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An ssh-agent that holds the key that is let in."""
    path = str(sshd.folder / "agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", path)
    while not os.path.exists(path):
        time.sleep(0.005)
    subprocess.run(["ssh-add", "-q", sshd.key], check=True, capture_output=True)
    yield
    process.terminate()
    process.wait()


def test_the_agent_opens_a_key_with_a_passphrase(sshd: Sshd, locked_key: Path, agent: None) -> None:
    asyncio.run(created(sshd.provider(key=str(locked_key))))


def test_a_key_that_is_not_there_is_named(sshd: Sshd) -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"/nowhere/key.*name the private key's file"
    ):
        asyncio.run(sshd.provider(key="/nowhere/key").create(Order("t", 0, plain_request())))


def test_a_refused_port_is_named(sshd: Sshd) -> None:
    assert "SSH host 127.0.0.1:1: connection refused" in refusal(sshd.provider(port=1))


def test_a_name_nobody_knows_is_named(sshd: Sshd) -> None:
    message = refusal(sshd.provider("no-such-host.invalid"))

    assert "no-such-host.invalid" in message


def test_a_host_that_never_answers_is_given_up(sshd: Sshd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        started = time.monotonic()

        message = refusal(sshd.provider("127.0.0.1", port=port, timeout=0.3))

    assert time.monotonic() - started < 60
    assert f"127.0.0.1:{port}: no answer within 0.3 s" in message


def test_a_host_that_is_no_sshd_is_no_riddle(sshd: Sshd) -> None:
    def greet(listener: socket.socket) -> None:
        with listener.accept()[0] as peer:
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, args=(listener,), daemon=True).start()

        message = refusal(sshd.provider("127.0.0.1", port=listener.getsockname()[1]))

    assert "SSH host 127.0.0.1" in message
