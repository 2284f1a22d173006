"""Hugging Face on a pool: datasets are sharded, and the token is seen by nobody else.

That the Trainer is distributed is shown by `examples/hf_trainer.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.errors import ConfigurationError, PluginError

from ..conftest import other_case

for needed in ("torch", "transformers", "datasets", "accelerate"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

QUIET = sky.Options(console=False)
TOKEN = "hf_sesame0open"
Sharing = Callable[[sky.Compute], AbstractContextManager[sky.Compute]]


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[sky.Compute]:
    """Two nodes with a token, where no hub can be reached."""
    image = sky.Image(env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    plugins = [sky.plugins.huggingface(token=TOKEN)]
    with sharing(sky.Compute(nodes=2, plugins=plugins, image=image, options=QUIET)) as compute:
        yield compute


def test_a_dataset_is_sharded_as_a_dataset(pool: sky.Compute) -> None:
    @sky.function
    def parts() -> tuple[str, list[int], list[int]]:
        from datasets import Dataset

        rows = Dataset.from_dict({"n": list(range(10))})
        mine = sky.shard(rows)
        shuffled = sky.shard(rows, shuffle=True, seed=3, drop_last=True)
        return type(mine).__name__, mine["n"][:], shuffled["n"][:]

    first, second = parts() @ pool

    assert first[:2] == ("Dataset", [0, 2, 4, 6, 8])
    assert second[:2] == ("Dataset", [1, 3, 5, 7, 9])
    assert sorted(first[2] + second[2]) == list(range(10))


# The token.


def test_workers_have_the_token(pool: sky.Compute) -> None:
    @sky.function
    def token() -> tuple[str | None, str | None]:
        import huggingface_hub

        return os.environ.get("HF_TOKEN"), huggingface_hub.get_token()

    assert token() @ pool == [(TOKEN, TOKEN)] * 2


def test_the_token_is_in_no_image_command_line_environment_or_file(pool: sky.Compute) -> None:
    sky.function(os.getpid)() @ pool
    processes = psutil.Process().children(recursive=True)
    files = [path for path in Path(os.environ["XDG_RUNTIME_DIR"]).rglob("*") if path.is_file()]

    assert TOKEN not in repr(pool._spec)
    assert all(TOKEN not in value for value in pool._spec.request.image.env.values())
    assert "HF_TOKEN" not in os.environ
    assert len(processes) >= 4
    for process in processes:
        assert TOKEN not in " ".join(process.cmdline())
        assert TOKEN not in process.environ().values()  # what it was started with
    assert files
    for path in files:
        assert TOKEN.encode() not in path.read_bytes(), path


def test_the_token_shows_in_nothing_that_describes_the_plugin() -> None:
    plugin = sky.plugins.huggingface(token=TOKEN, models=["org/model"])
    compute = sky.Compute(plugins=[plugin])

    for shown in (plugin, plugin.around_process, compute, compute._spec):
        assert TOKEN not in repr(shown)
        assert TOKEN not in f"{shown}"


def test_the_token_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """With the console on, and a hook after it that fails."""

    def fail(info: object) -> Iterator[None]:
        raise RuntimeError("another plugin's problem")
        yield

    plugins = [
        sky.plugins.huggingface(token=TOKEN),
        sky.Plugin.create("failing").with_around_process(fail),
    ]
    image = sky.Image(env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    with pytest.raises(PluginError, match="another plugin's problem") as caught:
        with sky.Compute(plugins=plugins, image=image, options=sky.Options(console=True)):
            pass

    assert TOKEN not in str(caught.value)
    assert TOKEN not in "".join(capfd.readouterr())


@pytest.mark.parametrize("token", ["", "two words", "hf_x\n", 7])
def test_what_is_no_token_is_refused_without_being_shown(token: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"one word, such as 'hf_\.\.\.'") as caught:
        sky.plugins.huggingface(token=token)

    assert "two" not in str(caught.value)


# The hub.


COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"weights" * 100}


class Hub(ThreadingHTTPServer):
    """As much of the hub as signing in and downloading one model need."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        token = self.headers.get("Authorization")
        self.server.asked.append((path, token))
        if token not in (None, f"Bearer {TOKEN}"):
            self.answer(401, {"error": "Invalid credentials"})
        elif path == "/api/whoami-v2":
            self.answer(200, {"name": "someone", "type": "user"})
        elif path == "/api/models/org/model/revision/main":
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(200, {"id": "org/model", "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/org/model/tree/{COMMIT}":
            rows = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in FILES.items()]
            self.answer(200, rows)
        elif (name := path.rpartition(f"/org/model/resolve/{COMMIT}/")[2]) in FILES:
            self.answer(200, FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub on this machine."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def near(hub: Hub, tmp_path: Path) -> sky.Image:
    """Nodes that use that hub, and a cache of their own."""
    return sky.Image(env={"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)})


def test_the_pool_signs_in_once_where_the_hub_is_reachable(hub: Hub, near: sky.Image) -> None:
    plugins = [sky.plugins.huggingface(token=TOKEN)]
    with sky.Compute(nodes=2, plugins=plugins, image=near, options=QUIET):
        signed_in = [token for path, token in hub.asked if path == "/api/whoami-v2"]
        assert signed_in == [f"Bearer {TOKEN}"]


def test_a_token_that_the_hub_refuses_is_an_error_that_does_not_show_it(near: sky.Image) -> None:
    wrong = "hf_wrong0token"
    with pytest.raises(PluginError, match=r"the hub refuses the token \(401\)") as caught:
        with sky.Compute(plugins=[sky.plugins.huggingface(token=wrong)], image=near, options=QUIET):
            pass

    assert wrong not in str(caught.value)


def test_models_are_there_before_the_first_task(hub: Hub, near: sky.Image) -> None:
    @sky.function
    def cached() -> list[str]:
        import huggingface_hub

        folder = huggingface_hub.snapshot_download("org/model", local_files_only=True)
        return sorted(os.listdir(folder))

    plugins = [sky.plugins.huggingface(models=["org/model"])]
    with sky.Compute(plugins=plugins, image=near, options=QUIET) as compute:
        assert cached() >> compute == ["config.json", "model.safetensors"]


@other_case
def test_a_model_that_cannot_be_had_is_named(near: sky.Image) -> None:
    plugins = [sky.plugins.huggingface(models=["org/no-such-model"])]
    with pytest.raises(PluginError, match="the model 'org/no-such-model' could not be downloaded"):
        with sky.Compute(plugins=plugins, image=near, options=QUIET):
            pass


@pytest.mark.parametrize("models", ["org/model", ["org/a/b"], [""], [3], 3])
def test_what_are_no_models_is_refused(models: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"huggingface\(models=.*such as"):
        sky.plugins.huggingface(models=models)


def test_the_image_gets_its_libraries() -> None:
    pip = sky.Compute(plugins=[sky.plugins.huggingface()])._spec.request.image.pip

    assert {"transformers", "datasets", "tokenizers"} <= set(pip)
