"""A store in a folder of its own, servers of one, and what the tests compare."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import skyward as sky

torch = pytest.importorskip("torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the store of this test lies."""
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> sky.ModelStore:
    """An empty store."""
    return sky.ModelStore(folder)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server of our own, with a bucket."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'skyward-torch[s3]'")
    server_of = pytest.importorskip(
        "moto.server", reason="moto is not installed: pip install 'moto[s3]' flask flask-cors"
    )
    import boto3

    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="models")
        yield "s3://models"
    server.stop()


@pytest.fixture(scope="session")
def same() -> Any:
    """Equality of nested values, down to dtypes, strides, types and the sign of zero."""
    return _same


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and (left.numel() == 0 or left.stride() == right.stride())
            and _raw(left) == _raw(right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return repr(left) == repr(right)


def _raw(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if tensor.numel() else b""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small filesystem needs root and a kernel that lets it")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@dataclass
class Server:
    """A model server in a process of its own."""

    process: subprocess.Popen[str]
    address: str

    def kill(self) -> None:
        """End it at once, as a power failure would."""
        self.process.kill()
        self.process.wait()


SERVE = """
import sys, json
from skyward.store import server
options = json.loads(sys.argv[1])
for name, value in options.pop("constants", {}).items():
    setattr(server, name, value)
server.serve(started=lambda address: print(address, flush=True), **options)
"""


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers, and ends them after the test; each must then end cleanly."""
    with serving() as start:
        yield start


@contextlib.contextmanager
def serving() -> Iterator[Callable[..., Server]]:
    """Starts servers, and ends them with the block; each must then end cleanly."""
    pytest.importorskip(
        "aiohttp", reason="aiohttp is not installed: pip install skyward-torch[server]"
    )
    with contextlib.ExitStack() as stack:

        def start(folder: Path, **options: Any) -> Server:
            options = {"port": 0, "directory": str(folder)} | options
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", SERVE, json.dumps(options)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, process.stderr and process.stderr.read()
            server = Server(process, address)
            running.append(server)
            return server

        running: list[Server] = []
        yield start
        for server in running:
            server.process.send_signal(signal.SIGTERM)
        for server in running:
            assert server.process.wait(100) in (0, -signal.SIGKILL)


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server that tests share serves."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="session")
def server(served_folder: Path) -> Iterator[Server]:
    """One for all tests: to start one takes a second of a processor."""
    with serving() as start:
        yield start(served_folder)


@pytest.fixture
def served(server: Server, served_folder: Path) -> str:
    """The address of a server whose folder is empty."""
    for left in served_folder.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return server.address
