"""A store behind the model server: what users see of it, and of everything that can go wrong."""

from __future__ import annotations

import contextlib
import http.server
import os
import pickle
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import skyward as sky
from skyward.store import http as client
from skyward.store.address import Address
from skyward.store.http import HttpFiles
from skyward.wire.handshake import Authority

from ..conftest import only_in_all

Serve = Callable[..., Any]


def refused(url: str, token: str | None = None) -> str:
    with pytest.raises(sky.errors.StoreError) as caught:
        sky.ModelStore(url, token).list()
    return str(caught.value)


def test_what_is_saved_through_the_server_is_loaded(
    served: str, served_folder: Path, same: Any
) -> None:
    tied = torch.randn(40, 30)
    value = {
        "tied": [tied, tied, tied.t()],
        "large": torch.randn(5_000_000),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(7, dtype=torch.complex64),
        "n": 3,
    }
    store = sky.ModelStore(served)

    store.save_model(value, "team/m", metadata={"accuracy": 0.9})
    loaded = store.load_model("team/m")

    assert same(loaded, value)
    assert loaded["tied"][0].data_ptr() == loaded["tied"][2].data_ptr()
    assert same(sky.ModelStore(served_folder).load_model("team/m"), value)
    assert list((served_folder / "tmp").iterdir()) == []
    assert list((served_folder / "saves").glob("*")) == []


def test_a_module_is_filled_from_the_server(served: str) -> None:
    model, other = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
    store = sky.ModelStore(served)
    store.save_model(model, "m")

    store.load_model("m", into=other)

    assert torch.equal(model.weight, other.weight)
    with pytest.raises(sky.errors.ModelMismatchError, match="does not fit"):
        store.load_model("m", into=torch.nn.Linear(30, 21))


def test_a_store_travels_and_opens_connections_of_its_own(serve: Serve, folder: Path) -> None:
    store = sky.ModelStore(serve(folder, token="s3cret").address, "s3cret")
    store.save_model({"x": 1}, "m")

    copy = pickle.loads(pickle.dumps(store))

    assert copy.load_model("m") == {"x": 1}


@pytest.mark.slow
def test_a_worker_loads_from_the_server(serve: Serve, folder: Path) -> None:
    """A pool is started, and its worker imports torch."""
    store = sky.ModelStore(serve(folder, token="s3cret").address, "s3cret")
    store.save_model({"x": torch.arange(5)}, "m")

    @sky.function
    def total(store: sky.ModelStore) -> int:
        return int(store.load_model("m")["x"].sum())

    with sky.Compute() as compute:
        assert (total(store) >> compute) == 10


def test_a_forked_process_uses_no_connection_of_its_parent(served: str) -> None:
    store = sky.ModelStore(served)
    store.save_model({"x": 1}, "m")

    child = os.fork()
    if child == 0:
        os._exit(0 if store.load_model("m") == {"x": 1} else 1)
    loaded = [store.load_model("m") for _ in range(20)]

    assert os.waitpid(child, 0)[1] == 0
    assert loaded == [{"x": 1}] * 20


def test_the_token_opens_the_store(serve: Serve, folder: Path) -> None:
    address = serve(folder, token="s3cret").address

    sky.ModelStore(address, "s3cret").save_model({"x": 1}, "m")

    missing, wrong = refused(address), refused(address, "guessed")
    assert re.search(r"wants a token; pass token=\.\.\. or set SKYWARD_STORE_TOKEN", missing)
    assert "refused the token" in wrong
    assert "guessed" not in wrong


def test_both_ends_take_the_token_from_the_environment(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_STORE_TOKEN", "s3cret")
    address = serve(folder).address
    store = sky.ModelStore(address)

    assert store.list() == ()
    assert "s3cret" not in repr(store) + repr(store._files)
    monkeypatch.delenv("SKYWARD_STORE_TOKEN")
    assert "wants a token" in refused(address)


def test_a_read_only_store_is_read_and_not_written(serve: Serve, folder: Path) -> None:
    sky.ModelStore(folder).save_model({"x": 1}, "m")
    store = sky.ModelStore(serve(folder, read_only=True).address)

    assert store.load_model("m") == {"x": 1}
    with pytest.raises(
        sky.errors.StoreError, match="writing failed: 403 this store is served read-only"
    ):
        store.save_model({"x": torch.randn(3_000_000)}, "m")
    with pytest.raises(sky.errors.StoreError, match=r"1\.gone: writing failed: 403"):
        store.delete("m")
    assert store.load_model("m") == {"x": 1}


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """An authority's file, and the options of a server that it vouches for."""
    made = Authority("test").issue("localhost")
    for name, text in (("ca", made.authority), ("cert", made.certificate), ("key", made.key)):
        (tmp_path / f"{name}.pem").write_text(text)
    files = {"certificate": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}
    return tmp_path / "ca.pem", {"host": "localhost", **files}


def test_tls_with_an_authority_of_our_own(
    serve: Serve,
    folder: Path,
    certified: tuple[Path, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority, options = certified
    address = serve(folder, token="s3cret", **options).address
    assert address.startswith("https://localhost:")

    assert re.search("certificate is not trusted.*SKYWARD_STORE_CA", refused(address, "s3cret"))
    assert "needs https://" in refused(address.replace("https", "http"), "s3cret")
    monkeypatch.setenv("SKYWARD_STORE_CA", str(authority))
    store = sky.ModelStore(address, "s3cret")
    store.save_model({"x": torch.arange(3_000_000)}, "m")
    assert torch.equal(store.load_model("m")["x"], torch.arange(3_000_000))
    plain = serve(folder).address
    assert "use http://" in refused(plain.replace("http", "https"))


def test_authorities_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for name in ("empty.pem", "missing.pem"):
        monkeypatch.setenv("SKYWARD_STORE_CA", str(tmp_path / name))
        with pytest.raises(
            sky.errors.ConfigurationError, match=rf"SKYWARD_STORE_CA=.*{name}.*PEM file"
        ):
            sky.ModelStore("https://localhost:1")


def test_a_token_in_the_clear_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    HttpFiles("http://models.example:8470", "s3cret")
    assert "travels in the clear" in caplog.text
    assert "s3cret" not in caplog.text
    caplog.clear()
    HttpFiles("http://127.0.0.1:8470", "s3cret")
    HttpFiles("https://models.example", "s3cret")
    assert caplog.text == ""


def test_nobody_there_is_told_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.01,))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    told = refused(f"http://127.0.0.1:{port}")

    assert f"127.0.0.1:{port}/models" in told
    assert re.search("refused.*`sky models serve` runs there", told)


class _Other(http.server.BaseHTTPRequestHandler):
    """Some other web server, which sends everyone elsewhere."""

    seen: list[str]

    def do_GET(self) -> None:
        if self.path.startswith("/elsewhere"):
            self.seen.append(self.headers.get("Authorization", ""))
        moved = self.path.startswith("/moved")
        self.send_response(302 if moved else 200)
        if moved:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other() -> Iterator[str]:
    _Other.seen = []
    with http.server.HTTPServer(("127.0.0.1", 0), _Other) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_another_web_server_is_told_from_ours(other: str) -> None:
    assert "this is no model server: it answers 200 OK; check the address" in refused(other)


def test_a_redirect_gets_no_token(other: str) -> None:
    told = refused(f"{other}/moved", "s3cret")

    assert "leads to /elsewhere, where no token is sent" in told
    assert _Other.seen == []


class Relay:
    """Stands between the two ends, and cuts the next connections after so many bytes."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.down: list[int] = []
        """After how many bytes from the server each of the next connections is cut."""
        self.up: list[int] = []
        """The same, for bytes to the server."""
        self._threads: list[threading.Thread] = []
        self._ends: list[socket.socket] = []
        self._start(self._accept)

    def _start(self, action: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=action, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            limits = [cuts.pop(0) if cuts else 1 << 60 for cuts in (self.up, self.down)]
            self._start(self._pass, near, far, limits[0])
            self._start(self._pass, far, near, limits[1])

    def _pass(self, source: socket.socket, sink: socket.socket, left: int) -> None:
        try:
            while left > 0 and (data := source.recv(min(left, 1 << 16))):
                sink.sendall(data)
                left -= len(data)
        except OSError:
            pass
        _hang_up(source)
        _hang_up(sink)

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            _hang_up(end)
        for thread in self._threads:
            thread.join(100)
        for end in (self._listener, *self._ends):
            end.close()


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    monkeypatch.setattr(client, "PAUSES", (0.01, 0.01, 0.01))
    relay = Relay(serve(folder).address)
    yield relay
    relay.close()


def test_a_read_goes_on_where_it_broke(relay: Relay, folder: Path) -> None:
    data = os.urandom(6 << 20)
    (folder / "objects").mkdir()
    (folder / "objects" / "x").write_bytes(data)
    relay.down = [0, 1000, 3 << 20, 10, 2 << 20]
    buffer = memoryview(bytearray(len(data)))

    assert HttpFiles(relay.address, None).read_into("objects/x", 0, buffer) == len(data)
    assert bytes(buffer) == data


def test_a_read_that_breaks_for_ever_ends(relay: Relay, folder: Path) -> None:
    (folder / "objects").mkdir()
    (folder / "objects" / "x").write_bytes(bytes(100))
    relay.down = [0] * 20

    with pytest.raises(sky.errors.StoreError, match=r"objects/x: reading failed: .*server's log"):
        HttpFiles(relay.address, None).read("objects/x", 0, 100)


def test_a_write_is_repeated_when_it_breaks(relay: Relay, folder: Path) -> None:
    data = os.urandom(3 << 20)
    relay.up = [1000, 2 << 20]

    HttpFiles(relay.address, None).write("objects/x", [data])

    assert (folder / "objects" / "x").read_bytes() == data


def test_a_creation_whose_answer_got_lost_still_counts(relay: Relay) -> None:
    files = HttpFiles(relay.address, None)
    relay.down = [0]

    assert files.create("models/m/1.json", b"ours")
    relay.down = [0]
    assert not HttpFiles(relay.address, None).create("models/m/1.json", b"theirs")


def test_a_restarted_server_goes_unnoticed(serve: Serve, folder: Path) -> None:
    first = serve(folder)
    store = sky.ModelStore(first.address)
    store.save_model({"x": 1}, "m")

    first.process.terminate()
    first.process.wait()
    serve(folder, port=int(first.address.rpartition(":")[2]))

    assert store.load_model("m") == {"x": 1}


def test_a_stale_clock_makes_nothing_look_old(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = HttpFiles(served, None)
    files.write("objects/x", [b"1"])
    real = time.time
    for ahead in (1e6, -1e6):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda ahead=ahead: real() + ahead)
            (entry,) = files.list("objects")
            assert abs(time.time() - entry.modified) < 60


def forked(action: Callable[[], object]) -> int:
    """A process that does something; a fork has torch, which a new one takes seconds to import."""
    child = os.fork()
    if child:
        return child
    try:
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def test_two_processes_that_publish_the_same_name(served: str) -> None:
    gate, opened = os.pipe()

    def publish(who: str) -> None:
        os.close(opened)
        os.read(gate, 1)  # ends for both at once
        store = sky.ModelStore(served)
        for step in range(5):
            saved = store.save_model({"who": who, "x": torch.full((50,), step)}, "m")
            assert store.load_model("m", version=saved.version)["who"] == who

    children = [forked(lambda who=who: publish(who)) for who in "ab"]
    os.close(opened)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    os.close(gate)

    store = sky.ModelStore(served)
    versions = [each.version for each in store.versions("m")]
    owners = [store.load_model("m", version=number)["who"] for number in versions]
    assert versions == list(range(1, 11))
    assert sorted(owners) == ["a"] * 5 + ["b"] * 5


@pytest.mark.parametrize("victim", ["client", "server"])
def test_an_upload_that_is_killed_leaves_nothing_visible(
    serve: Serve, folder: Path, victim: str
) -> None:
    server = serve(folder)
    port = int(server.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as upload:
        upload.sendall(
            b"PUT /objects/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
        )
        upload.sendall(bytes(8_000_000))
        until(lambda: any(file.stat().st_size for file in (folder / "tmp").glob("*")))
        if victim == "server":
            server.kill()
    if victim == "client":
        until(lambda: not list((folder / "tmp").iterdir()))
    assert not (folder / "objects").exists()

    store = sky.ModelStore(serve(folder).address)
    store.save_model({"x": torch.arange(9)}, "m")
    store.gc(older_than=-60)
    assert list((folder / "tmp").iterdir()) == []
    assert torch.equal(store.load_model("m")["x"], torch.arange(9))


def until(holds: Callable[[], bool]) -> None:
    """Wait for another process."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@only_in_all
def test_a_save_that_is_killed_is_taken_up_again(served: str, served_folder: Path) -> None:
    value = {str(index): torch.full((5_000_000,), float(index)) for index in range(12)}
    saving = forked(lambda: sky.ModelStore(served).save_model(value, "m"))
    until(lambda: len(list(served_folder.glob("objects/*/*"))) >= 2)
    os.kill(saving, signal.SIGKILL)
    os.waitpid(saving, 0)
    until(lambda: not list((served_folder / "tmp").iterdir()))
    before = {file.name for file in served_folder.glob("objects/*/*")}
    assert sky.ModelStore(served).list() == ()

    sky.ModelStore(served).save_model(value, "m")

    after = {file.name for file in served_folder.glob("objects/*/*")}
    assert before <= after
    assert len(after) == 12
    loaded = sky.ModelStore(served).load_model("m")
    assert all(torch.equal(loaded[name], value[name]) for name in value)


def test_a_full_disk_on_the_server(serve: Serve, small_disk: Path) -> None:
    store = sky.ModelStore(serve(small_disk).address)
    store.save_model({"x": torch.randn(100_000)}, "m")

    with pytest.raises(sky.errors.StoreFullError, match=r"No space left.*make room on the server"):
        store.save_model({"x": torch.randn(2_000_000)}, "m")

    assert list((small_disk / "tmp").iterdir()) == []
    assert store.load_model("m")["x"].shape == (100_000,)
    store.save_model({"x": torch.randn(100_000)}, "m")


def test_a_flipped_bit_on_the_server_is_noticed(served: str, served_folder: Path) -> None:
    store = sky.ModelStore(served)
    store.save_model({"x": torch.randn(5_000_000)}, "m")
    (file,) = served_folder.glob("objects/*/*")
    with file.open("r+b") as opened:
        opened.seek(3_000_000)
        was = opened.read(1)
        opened.seek(3_000_000)
        opened.write(bytes([was[0] ^ 4]))

    with pytest.raises(sky.errors.StoreDamagedError, match=file.name):
        store.load_model("m")


@pytest.mark.parametrize(
    ("url", "one_machine"),
    [("http://localhost:8470", True), ("https://[::1]:1", True), ("http://models.lan", False)],
)
def test_a_server_on_loopback_is_one_machines_own(url: str, one_machine: bool) -> None:
    assert Address(url, None, False).of_one_machine is one_machine
