"""The model server as any HTTP client meets it, friendly or not."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import skyward as sky
from skyward.store.server import serve as serve_here

from ..conftest import other_case

Serve = Callable[..., Any]


def ask(
    address: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> http.client.HTTPResponse:
    """One request; `answer.data` is what came back."""
    line = http.client.HTTPConnection(address.removeprefix("http://"), timeout=100)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        line.request(method, path, body, named)
        answer = line.getresponse()
        answer.data = answer.read()  # type: ignore[attr-defined]
        return answer
    finally:
        line.close()


def raw(address: str, request: bytes, seconds: float = 100) -> bytes:
    """What the server says to these bytes, until it hangs up or waits for more of them so long."""
    request = request.replace(b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n")
    host, _, port = address.removeprefix("http://").rpartition(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as line:
        with contextlib.suppress(ConnectionError, TimeoutError):
            line.sendall(request)
            while data := line.recv(1 << 16):
                said += data
    return said


def put_object(folder: Path, data: bytes) -> None:
    (folder / "objects").mkdir(parents=True)
    (folder / "objects" / "x").write_bytes(data)


def test_ranges(served: str, served_folder: Path) -> None:
    put_object(served_folder, b"0123456789")

    def got(asked: str) -> tuple[int, bytes, str | None]:
        answer: Any = ask(served, "GET", "/objects/x", Range=asked)
        return answer.status, answer.data, answer.getheader("Content-Range")

    assert got("bytes=2-4") == (206, b"234", "bytes 2-4/10")
    assert got("bytes=7-") == (206, b"789", "bytes 7-9/10")
    assert got("bytes=-2") == (206, b"89", "bytes 8-9/10")
    assert got("bytes=5-500") == (206, b"56789", "bytes 5-9/10")
    assert got("bytes=10-")[0] == 416
    assert got("bytes=10-")[2] == "bytes */10"
    assert got("bytes=4-2")[0] == 416
    whole = ask(served, "GET", "/objects/x")
    assert (whole.status, whole.getheader("Content-Length")) == (200, "10")
    tag = str(whole.getheader("ETag"))
    assert ask(served, "GET", "/objects/x", If_None_Match=tag).status == 304
    assert ask(served, "GET", "/objects/x", If_Match='"other"').status == 412
    head: Any = ask(served, "HEAD", "/objects/x")
    assert (head.status, head.getheader("Content-Length"), head.data) == (200, "10", b"")


def test_uploads_appear_whole_or_not_at_all(served: str, served_folder: Path) -> None:

    assert ask(served, "PUT", "/objects/ab/x", b"first").status == 201
    assert ask(served, "PUT", "/objects/ab/x", b"second").status == 201
    assert ask(served, "PUT", "/objects/ab/x", b"third", If_None_Match="*").status == 412
    short = b"PUT /objects/y HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nfive!"
    assert b" 201 " not in raw(served, short, 1)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    assert b" 411 " in raw(served, b"PUT /objects/y HTTP/1.1\r\nHost: localhost\r\n" + chunked)
    assert ask(served, "PUT", "/objects/y", b"x", Content_Encoding="gzip").status == 415
    assert ask(served, "PUT", "/objects/y", b"x", If_None_Match='"tag"').status == 400
    assert ask(served, "PUT", "/objects/ab", b"x").status == 409
    assert ask(served, "PUT", "/objects/ab/x/y", b"x").status == 409

    files = [file for file in served_folder.rglob("*") if file.is_file()]
    assert files == [served_folder / "objects" / "ab" / "x"]
    assert files[0].read_bytes() == b"second"
    assert ask(served, "DELETE", "/objects/ab/x").status == 204
    assert ask(served, "DELETE", "/objects/ab/x").status == 404


def test_a_listing(served: str, served_folder: Path) -> None:
    put_object(served_folder, b"123")
    (served_folder / "objects" / ".hidden").write_bytes(b"")

    answer: Any = ask(served, "GET", "/objects/")
    found = json.loads(answer.data)

    about = (served_folder / "objects" / "x").stat()
    assert found["files"] == [{"path": "objects/x", "size": 3, "modified": about.st_mtime}]
    assert abs(found["now"] - about.st_mtime) < 60
    nothing: Any = ask(served, "GET", "/models/none/")
    assert json.loads(nothing.data)["files"] == []


OUTSIDE = [
    "/../secret",
    "/objects/../../secret",
    "/objects/../secret",
    "/objects/..",
    "/objects/%2e%2e/%2e%2e/secret",
    "/objects/%2E%2E%2F%2E%2E%2Fsecret",
    "/objects/..%2f..%2fsecret",
    "/objects/%252e%252e/secret",
    "/objects/..%5c..%5csecret",
    "/objects/..\\..\\secret",
    "/objects//etc/passwd",
    "//etc/passwd",
    "/%2fetc/passwd",
    "/objects/x%00",
    "/objects/%00",
    "/objects/.hidden",
    "/objects/./x",
    "/objects/..;/secret",
    "/objects/%c0%ae%c0%ae/secret",
    "/objects/\xff",
    "/secret",
    "/objectsx/y",
    "/download/../secret.safetensors",
    "/download/%2e%2e/secret.safetensors",
    "file:///etc/passwd",
    "http://localhost/objects/../../secret",
]


def test_no_path_leads_outside(served: str, served_folder: Path) -> None:
    put_object(served_folder, b"inside")
    (served_folder.parent / "secret").write_bytes(b"the secret")
    (served_folder / "secret").write_bytes(b"the secret")
    (served_folder / "objects" / "link").symlink_to(served_folder.parent / "secret")
    (served_folder / "objects" / "up").symlink_to(served_folder.parent)

    for path in [*OUTSIDE, "/objects/link", "/objects/up/secret", "/objects/up/"]:
        for method in ("GET", "PUT", "DELETE", "HEAD"):
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
            said = raw(served, f"{head}Content-Length: 1\r\n\r\n!".encode("latin-1"))
            status = said.split(b" ")[1:2]
            assert status in ([b"400"], [b"403"], [b"404"], [b"405"]), (path, said)
            assert b"the secret" not in said
            assert b"root:" not in said
    assert (served_folder.parent / "secret").read_bytes() == b"the secret"
    assert (served_folder / "secret").read_bytes() == b"the secret"
    assert (served_folder / "objects" / "x").read_bytes() == b"inside"


HOSTILE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"\r\n\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    b"PUT /objects/y HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\nhello",
    b"PUT /objects/y HTTP/1.1\r\nHost: localhost\r\nContent-Length: five\r\n\r\nhello",
    b"PUT /objects/y HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
    b"Content-Length: 5\r\n\r\nhello",
    b"PUT /objects/y HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nhello",
    b"PUT /objects/y HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello",
    b"PUT /objects/y HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999\r\n\r\nhello",
    b"POST /objects/y HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
    b"BREW /objects/y HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


def test_hostile_requests_cost_nobody_else_anything(serve: Serve, folder: Path) -> None:
    put_object(folder, b"inside")
    address = serve(folder).address

    for request in HOSTILE:
        said = raw(address, request, 1)
        assert said == b"" or said.split(b" ")[1][:1] in (b"4", b"5"), (request[:80], said[:200])

    answer: Any = ask(address, "GET", "/objects/x")
    assert answer.data == b"inside"
    assert [file for file in folder.rglob("*") if file.is_file()] == [folder / "objects" / "x"]


def test_what_is_no_http_leaves_no_traceback(serve: Serve, folder: Path) -> None:
    server = serve(folder)
    raw(server.address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")

    for request in HOSTILE:
        raw(server.address, request, 1)
    server.process.terminate()

    assert server.process.wait(100) == 0
    assert server.process.stderr.read() == ""


def test_a_failure_of_the_server_itself_is_logged_and_answered_in_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    web = pytest.importorskip("skyward.store.web", reason="aiohttp is not installed")
    interface = web.Interface(folder, token=None, read_only=False, durable=False, private=False)
    request = SimpleNamespace(method="GET", path="/objects/x", headers={})

    async def handler(request: object) -> None:
        raise LookupError("a bug")

    with pytest.raises(web.web.HTTPInternalServerError) as raised:
        asyncio.run(interface._guard(request, handler))
    assert raised.value.text == "the server failed; see its log\n"
    assert "a bug" in caplog.text


def test_every_answer_is_marked_and_every_error_one_line(served: str, served_folder: Path) -> None:
    put_object(served_folder, b"inside")

    for method, path, status in [
        ("GET", "/", 200),
        ("GET", "/objects/x", 200),
        ("GET", "/objects", 400),
        ("PUT", "/objects/d/x", 201),
        ("GET", "/objects/d", 404),
        ("GET", "/objects/none", 404),
        ("GET", "/objects/x/y", 404),
        ("POST", "/objects/x", 405),
        ("OPTIONS", "/objects/x", 405),
    ]:
        answer: Any = ask(served, method, path, b"x" if method == "PUT" else None)
        assert answer.status == status, (method, path)
        assert answer.getheader("Skyward-Store") == "1"
        assert status < 300 or len(answer.data.splitlines()) == 1, (method, path, answer.data)
    strange: Any = ask(served, "GET", "/", Expect="a wonder")
    assert (strange.status, strange.getheader("Skyward-Store")) == (417, "1")


def test_a_connection_without_a_whole_request_is_closed(serve: Serve, folder: Path) -> None:
    address = serve(folder, constants={"WAITING_SECONDS": 0.5}).address
    host, _, port = address.removeprefix("http://").rpartition(":")

    for start in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /"):
        with socket.create_connection((host, int(port)), timeout=100) as line:
            line.sendall(start)
            while line.recv(1 << 16):
                pass


def test_a_long_upload_is_no_waiting(serve: Serve, folder: Path) -> None:
    address = serve(folder, constants={"WAITING_SECONDS": 2.0}).address
    host, _, port = address.removeprefix("http://").rpartition(":")

    with socket.create_connection((host, int(port)), timeout=100) as line:
        line.sendall(b"PUT /objects/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n\r\n")
        for _ in range(6):
            time.sleep(0.5)  # the time itself is what is tested
            line.sendall(b"x")
        assert b" 201 " in line.recv(1 << 16)


def test_an_upload_cancelled_while_its_file_is_opened_leaves_nothing(folder: Path) -> None:
    web = pytest.importorskip("skyward.store.web", reason="aiohttp is not installed")
    folder.mkdir()
    interface = web.Interface(folder, token=None, read_only=False, durable=False, private=True)
    entered, go_on = threading.Event(), threading.Event()
    temporary = interface._files.temporary

    @contextlib.contextmanager
    def slow() -> Any:
        with temporary() as opened:
            entered.set()
            go_on.wait(100)
            yield opened

    interface._files.temporary = slow
    request = SimpleNamespace(raw_path="/objects/x", content_length=1, headers={})

    async def cancelled() -> None:
        putting = asyncio.ensure_future(interface._put(request))
        await asyncio.to_thread(entered.wait, 20)
        putting.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await putting

    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(cancelled())

    assert list((folder / "tmp").iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before


def test_without_the_token_nothing_is_told(serve: Serve, folder: Path) -> None:
    put_object(folder, b"inside")
    address = serve(folder, token="s3cret").address

    for given in ("", "s3cret", "Bearer", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret"):
        for path in ("/", "/objects/x", "/objects/none", "/../x", "/download/m.safetensors"):
            answer: Any = ask(address, "GET", path, Authorization=given)
            assert answer.status == 401
            assert answer.getheader("WWW-Authenticate") == 'Bearer realm="skyward"'
            assert b"s3cret" not in answer.data
    odd = "GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n"
    assert raw(address, odd.encode("latin-1")).split(b" ")[1] in (b"400", b"401")
    assert ask(address, "GET", "/objects/x", Authorization="Bearer s3cret").status == 200


def test_a_website_cannot_reach_an_open_store_by_a_name_of_its_own(served: str) -> None:

    assert ask(served, "GET", "/", Host="evil.example:8470").status == 421
    for host in ("localhost:1", "127.0.0.1", "[::1]:8470"):
        assert ask(served, "GET", "/", Host=host).status == 200


def test_a_website_cannot_have_a_browser_read_or_write(served: str) -> None:
    """It asks before it writes for another site, and shows a site nothing that is not meant so."""
    for method, status in (("OPTIONS", 405), ("POST", 405), ("GET", 200)):
        asking = {"Origin": "https://evil.example", "Access-Control-Request-Method": "PUT"}
        answer: Any = ask(served, method, "/", **asking)
        assert answer.status == status
        assert not [each for each in answer.headers if each.lower().startswith("access-control")]
        assert answer.getheader("X-Content-Type-Options") == "nosniff"


@pytest.fixture
def tied() -> dict[str, torch.Tensor]:
    weight = torch.randn(300, 40)
    return {
        "emb.weight": weight,
        "head.weight": weight,
        "turned": weight.t(),
        "part": weight[3:7, 1:3],
        "steps": torch.arange(5),
        "half": torch.randn(3).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "repeated": torch.ones(1).expand(6),
    }


def test_a_download_is_an_ordinary_safetensors_file(
    served: str, served_folder: Path, tmp_path: Path, tied: dict[str, torch.Tensor]
) -> None:
    files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    store = sky.ModelStore(served_folder)
    store.save_model(tied, "team/m.v")
    store.save_model({"x": torch.zeros(2)}, "team/m.v")
    path = "/download/team/m.v.safetensors"

    answer: Any = ask(served, "GET", f"{path}?version=1")
    (tmp_path / "whole").write_bytes(answer.data)
    loaded = files.load_file(tmp_path / "whole")
    newest: Any = ask(served, "GET", path)
    cut: Any = ask(served, "GET", f"{path}?version=1", Range="bytes=1000-40000")
    head = ask(served, "HEAD", f"{path}?version=1")

    assert set(loaded) == set(tied)
    for name, tensor in tied.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype
    assert files.load(newest.data).keys() == {"x"}
    assert (cut.status, cut.data) == (206, answer.data[1000:40001])
    assert cut.getheader("Content-Range") == f"bytes 1000-40000/{len(answer.data)}"
    assert head.getheader("Content-Length") == str(len(answer.data))
    assert ask(served, "GET", path, Range="bytes=999999999-").status == 416


def test_nested_values_get_dotted_names(served: str, served_folder: Path) -> None:
    files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    store = sky.ModelStore(served_folder)
    store.save_model({"model": model.state_dict(), "adam": optimizer.state_dict(), "n": 1}, "c")
    store.save_model(torch.ones(3), "bare")

    answer: Any = ask(served, "GET", "/download/c.safetensors")
    loaded = files.load(answer.data)
    bare: Any = ask(served, "GET", "/download/bare.safetensors")

    assert torch.equal(loaded["model.weight"], model.weight)
    assert "adam.state.0.exp_avg" in loaded
    assert files.load(bare.data).keys() == {"tensor"}


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from skyward.store.catalog import Catalog
from skyward.store.web import Download
from skyward.store.local import LocalFiles

files = LocalFiles(Path(sys.argv[1]))
head = bytes(next(Download(files, Catalog(files).read("m", 1)).parts(0, 1 << 20)))
print(head[8:].decode())
"""


def test_the_server_needs_no_torch_to_name_tensors(folder: Path) -> None:
    odd = {"size": torch.Size([2]), 7: (torch.ones(1),), float("inf"): [None, torch.zeros(1)]}
    sky.ModelStore(folder).save_model(odd, "m")

    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, folder], capture_output=True, text=True
    )

    assert said.stderr == ""
    assert set(json.loads(said.stdout)) == {"__metadata__", "7.0", "inf.1"}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "two things would be called 'a.b'"),
        ({"z": torch.ones(1, dtype=torch.complex128)}, "'z' is of the dtype complex128"),
    ],
)
def test_what_no_safetensors_file_can_hold_is_explained(
    served: str, served_folder: Path, value: Any, told: str
) -> None:
    sky.ModelStore(served_folder).save_model(value, "m")

    answer: Any = ask(served, "GET", "/download/m.safetensors")

    assert answer.status == 422
    assert told in answer.data.decode()
    assert "load_model instead" in answer.data.decode()


def test_models_that_are_not_there_are_told(served: str, served_folder: Path) -> None:
    sky.ModelStore(served_folder).save_model({"x": 1}, "m")

    missing: Any = ask(served, "GET", "/download/none.safetensors")
    version: Any = ask(served, "GET", "/download/m.safetensors?version=7")

    assert (missing.status, version.status) == (404, 404)
    assert missing.data == b"the store has no model 'none'; it has: m\n"
    assert version.data == b"the store has no version 7 of 'm'; it has: 1\n"
    assert ask(served, "GET", "/download/m.safetensors?version=x").status == 400
    bare: Any = ask(served, "GET", "/download/m")
    assert (bare.status, b"/download/<name>.safetensors" in bare.data) == (400, True)


def test_a_damaged_model_is_not_downloaded_whole(serve: Serve, folder: Path) -> None:
    sky.ModelStore(folder).save_model({"x": torch.randn(100_000)}, "m")
    (file,) = folder.glob("objects/*/*")
    whole = file.read_bytes()
    server = serve(folder)
    address = server.address

    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(http.client.IncompleteRead):
        ask(address, "GET", "/download/m.safetensors")
    file.write_bytes(whole[:-1])
    answer: Any = ask(address, "GET", "/download/m.safetensors")
    assert answer.status == 500
    assert b"not as long as it was; take another version" in answer.data
    assert str(folder).encode() not in answer.data
    server.process.terminate()
    assert server.process.wait(100) == 0
    lines = server.process.stderr.read().splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "/download/m.safetensors",
        "GET /download/m.safetensors",
    ]


def test_curl_follows_the_front_page(serve: Serve, folder: Path, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    state = torch.nn.Linear(4, 3).state_dict()
    sky.ModelStore(folder).save_model(state, "mnist")
    address = serve(folder, token="s3cret").address

    page: Any = ask(address, "GET", "/", Authorization="Bearer s3cret")
    (line,) = [each for each in page.data.decode().splitlines() if "curl" in each]
    table: Any = ask(address, "GET", "/", Authorization="Bearer s3cret", Accept="application/json")
    subprocess.run(
        [line.replace("curl", "curl -sS")],
        shell=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"SKYWARD_STORE_TOKEN": "s3cret"},
    )

    loaded = files.load_file(tmp_path / "mnist.safetensors")
    assert torch.equal(loaded["weight"], state["weight"])
    assert json.loads(table.data)["models"] == [
        {"name": "mnist", "versions": [1], "url": f"{address}/download/mnist.safetensors"}
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"host": "0.0.0.0"}, r"anyone in the network.*token=.*SKYWARD_STORE_TOKEN.*insecure=True"),
        ({"host": "::"}, "anyone in the network"),
        ({"host": "", "token": None}, "anyone in the network"),
        ({"token": "two words"}, "not a token"),
        ({"token": ""}, "not a token"),
        ({"key": "key.pem"}, "pass both"),
        ({"certificate": "missing.pem"}, r"missing\.pem.*No such file.*PEM"),
        ({"read_only": True}, "cannot be served: .* is no folder"),
        ({"port": -1}, "port=-1: cannot listen"),
        ({"port": 70000}, "port=70000: cannot listen"),
    ],
)
def test_servers_that_cannot_be_are_refused(
    folder: Path, options: dict[str, Any], told: str
) -> None:
    pytest.importorskip(
        "aiohttp", reason="aiohttp is not installed: pip install skyward-torch[server]"
    )
    with pytest.raises(sky.errors.ConfigurationError, match=told):
        serve_here(folder, **{"port": 0} | options)


def test_a_port_that_is_taken_is_told(folder: Path, serve: Serve) -> None:
    port = int(serve(folder).address.rpartition(":")[2])

    with pytest.raises(sky.errors.ConfigurationError, match=rf"port={port}.*in use.*another port"):
        serve_here(folder, port=port)


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "skyward.store.web", raising=False)

    with pytest.raises(sky.errors.ConfigurationError, match=r"install skyward-torch\[server\]"):
        serve_here(folder)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=other_case), signal.SIGTERM])
def test_a_signal_ends_it_with_an_upload_under_way(serve: Serve, folder: Path, number: int) -> None:
    server = serve(folder, insecure=True, host="0.0.0.0")
    port = int(server.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as upload:
        upload.sendall(b"PUT /objects/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nfive!")
        while not list(folder.glob("tmp/*")):
            pass
        server.process.send_signal(number)
        assert server.process.wait(100) == 0

    assert list(folder.glob("tmp/*")) == []
    assert server.process.stderr.read() == ""


@pytest.mark.parametrize(
    "host", [[], pytest.param(["--host", "0.0.0.0", "--insecure"], marks=other_case)]
)
def test_the_command_says_where_it_serves(folder: Path, host: list[str]) -> None:
    pytest.importorskip(
        "aiohttp", reason="aiohttp is not installed: pip install skyward-torch[server]"
    )
    folder.mkdir()
    command = [sys.executable, "-m", "skyward", "models", "serve", folder, "--port", "0", "--json"]
    command += host
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            assert "0.0.0.0" not in url
            sky.ModelStore(url).save_model({"x": 1}, "m")
            server.terminate()
            assert server.wait(100) == 0
        finally:
            server.kill()

    assert sky.ModelStore(folder).load_model("m") == {"x": 1}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], r"at http://127\.0\.0\.1:\d+, without a token, until interrupted\n"),
        pytest.param(
            ["--token", "s3cret"],
            r"at http://127\.0\.0\.1:\d+, until interrupted\n",
            marks=other_case,
        ),
        (
            ["--token", "s3cret", "--host", "0.0.0.0"],
            r"at http://[^0/]\S*:\d+ and on every address of this machine \(0\.0\.0\.0\), until",
        ),
    ],
)
def test_the_command_says_who_may_come(
    folder: Path, options: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "aiohttp", reason="aiohttp is not installed: pip install skyward-torch[server]"
    )
    monkeypatch.delenv("SKYWARD_STORE_TOKEN", raising=False)
    folder.mkdir()
    command = [sys.executable, "-m", "skyward", "models", "serve", folder, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
        finally:
            server.kill()

    assert re.search(told, line), line
