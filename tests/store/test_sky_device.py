"""A model goes between the store and a sky device without passing through the client."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import skyward as sky
from skyward.store import node
from skyward.store.address import open_files

from ..conftest import other_case

# Tests read values all the time; the advice against it is not for them.
pytestmark = pytest.mark.filterwarnings("ignore:this loop waits:UserWarning")

LARGE = 8 << 20
"""Elements of four bytes: 32 MiB."""
LITTLE = 8 << 10
"""What may travel for a model of any size: calls, descriptions, answers."""


@pytest.fixture(scope="module")
def compute(
    sharing: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sky.Compute]:
    """A node that reaches the S3 server, where there is one, and works in a folder of its own."""
    with contextlib.suppress(pytest.skip.Exception):
        request.getfixturevalue("s3")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("of the nodes"))
        with sharing(sky.Compute(options=sky.Options(console=False))) as compute:
            yield compute


@pytest.fixture(scope="module")
def other(sharing: Any) -> Iterator[sky.Compute]:
    """Another pool, whose device is killed in the end."""
    with sharing(sky.Compute(options=sky.Options(console=False))) as compute:
        yield compute


@pytest.fixture(scope="module")
def device(compute: sky.Compute) -> torch.device:
    """A CPU of the first node."""
    from skyward.device import build

    build.libraries()
    return compute.device("cpu")


@pytest.fixture
def moved(compute: sky.Compute, device: torch.device) -> Callable[[], int]:
    """Bytes that came or went since the last time it was asked: to the device and to functions."""
    counted = [0]

    def count() -> int:
        on_device, stats = sky.device_stats(device), compute.stats()
        now = on_device.bytes_uploaded + on_device.bytes_fetched
        now += (
            stats.bytes_sent
            + stats.bytes_received
            + compute._open_fleet.dispatcher.packer.store._size
        )
        before, counted[0] = counted[0], now
        return now - before

    count()
    return count


@pytest.fixture(params=["folder", pytest.param("s3", marks=other_case)])
def anywhere(request: pytest.FixtureRequest, folder: Path) -> sky.ModelStore:
    """An empty store that client and node both reach."""
    if request.param == "folder":
        return sky.ModelStore(folder)
    return sky.ModelStore(f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}")


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and more bytes than a pack."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(width, width), nn.Linear(width, width)
        self.decode.weight = self.encode.weight
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.norm(torch.tanh(self.encode(x))))


def here(value: Any) -> Any:
    return {name: each.cpu() for name, each in value.items()}


# Loading.


def test_the_node_fetches_and_the_client_moves_nothing(anywhere, device, moved) -> None:
    right = {"large": torch.randn(LARGE), "bias": torch.randn(100), "half": torch.ones(9).half()}
    anywhere.save_model(right, "m")
    moved()

    state = anywhere.load_model("m", device=device)

    assert moved() < LITTLE
    assert {tensor.device for tensor in state.values()} == {device}
    assert all(torch.equal(tensor, right[name]) for name, tensor in here(state).items())


def test_a_state_is_the_same_as_on_the_cpu(store, device, same) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    store.save_model(
        {
            "base": base,
            "row": base[2],
            "turned": base.t(),
            "every other": base[:, ::2],
            "bf16": torch.randn(40, 3).bfloat16(),
            "complex": torch.randn(3, dtype=torch.complex64),
            "flags": torch.tensor([True, False]),
            "number": torch.tensor(7),
            "nothing": torch.empty(0, 3),
            "alike": [torch.ones(5), torch.ones(5)],
            "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "large": torch.randn(1 << 19),
            "plain": (1, "two", {3: None}),
        },
        "m",
    )

    near, far = store.load_model("m"), store.load_model("m", device=device)

    assert list(near) == list(far)
    assert far["plain"] == near["plain"]
    twins = list(zip(near["alike"], far["alike"], strict=True))
    for left, right in [(near[k], far[k]) for k in near if k not in ("plain", "alike")] + twins:
        assert right.device == device
        assert (left.stride(), left.storage_offset()) == (right.stride(), right.storage_offset())
        assert same(left.contiguous(), right.cpu().contiguous())
    far["base"][2, 0] = 77.0
    assert far["row"][0].item() == far["turned"][0, 2].item() == 77.0
    far["alike"][0] += 1
    assert far["alike"][1].tolist() == [1.0] * 5


def test_an_older_version_comes_when_it_is_asked_for(store, device) -> None:
    store.save_model({"x": torch.ones(3)}, "m")
    store.save_model({"x": torch.zeros(3)}, "m")

    assert store.load_model("m", version=1, device=str(device))["x"].tolist() == [1.0] * 3


@pytest.mark.parametrize("made", ["on the device", "on the meta device"])
def test_a_model_is_filled_and_trains(store, device, moved, made: str) -> None:
    torch.manual_seed(0)
    right, x = Tied(), torch.randn(8, 64)
    store.save_model(right, "m")
    with device if made == "on the device" else torch.device("meta"):
        model = Tied()
    torch.sky.synchronize(device)
    moved()

    back = store.load_model("m", into=model, device=device)

    assert moved() < LITTLE
    assert back is model
    assert model.encode.weight is model.decode.weight
    assert {tensor.device for tensor in model.state_dict().values()} == {device}
    assert all(torch.equal(v, right.state_dict()[k]) for k, v in here(model.state_dict()).items())
    for each, batch in ((model, x.to(device)), (right, x)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        each(batch).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model.encode.weight.cpu(), right.encode.weight)


def test_a_model_on_several_devices_is_filled_where_it_is(store, other, device) -> None:
    right = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    store.save_model(right, "m")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].to(device)
    model[1].to(other.device("cpu"))

    store.load_model("m", into=model)

    assert all(torch.equal(v, right.state_dict()[k]) for k, v in here(model.state_dict()).items())
    assert [layer.weight.device.type for layer in model] == ["sky", "sky", "cpu"]


def test_dtypes_are_converted_on_the_device(store, device) -> None:
    store.save_model(nn.Linear(3, 2).double(), "m")
    model = nn.Linear(3, 2).to(device)

    store.load_model("m", into=model, strict=False)

    right = store.load_model("m")["weight"].float()
    assert torch.equal(model.weight.detach().cpu(), right)


def test_what_does_not_fit_is_told_before_anything_moves(store, device, moved) -> None:
    store.save_model(Tied(), "m")
    model = Tied(32).to(device)
    before = here(model.state_dict())
    moved()

    with pytest.raises(sky.errors.ModelMismatchError, match=r"encode\.weight  stored \[64, 64\]"):
        store.load_model("m", into=model)

    assert moved() == 0
    assert all(torch.equal(v, before[k]) for k, v in here(model.state_dict()).items())


def test_damage_is_found_by_the_node(anywhere, device) -> None:
    anywhere.save_model({"x": torch.randn(100), "y": torch.randn(50)}, "m")
    place = open_files(anywhere._address.url, None, durable=False)
    (entry,) = place.list("objects")
    whole = place.read(entry.path, 0, entry.size)
    anywhere.load_model("m", device=device)
    model = nn.Module()
    for name, size in (("x", 100), ("y", 50)):
        model.register_buffer(name, torch.zeros(size, device=device))

    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1]):
        place.write(entry.path, [damaged])
        with pytest.raises(
            sky.errors.StoreDamagedError, match=r"objects/.* part of 'm' version 1"
        ) as far:
            anywhere.load_model("m", device=device)
        with pytest.raises(sky.errors.StoreDamagedError) as near:
            anywhere.load_model("m")
        assert str(far.value) == str(near.value)
        assert any("node 0" in note for note in far.value.__notes__)
        with pytest.raises(sky.errors.StoreDamagedError):
            anywhere.load_model("m", into=model)
        assert model.x.abs().sum().item() == model.y.abs().sum().item() == 0


def test_a_busy_node_loads_when_it_is_free_and_says_that_it_waits(
    store, compute, device, tmp_path: Path, eventually, caplog: pytest.LogCaptureFixture
) -> None:
    @sky.function
    def hold(flag: str) -> None:
        import time

        while not os.path.exists(flag):
            time.sleep(0.01)

    store.save_model({"x": torch.ones(3)}, "m")
    held = hold(str(tmp_path / "flag")) > compute
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setattr("skyward.compute.home.NOTICE_SECONDS", 0.05)
        loading = thread.submit(store.load_model, "m", device=device)
        eventually(lambda: "waits for a free worker" in caplog.text)
        assert not loading.done()
        (tmp_path / "flag").touch()
        assert loading.result(100)["x"].tolist() == [1.0] * 3
    held.result(100)
    assert f"load_model waits for a free worker on node 0 of {compute.name}" in caplog.text
    assert "hold" in caplog.text


# Saving.


def test_the_node_saves_and_the_client_moves_nothing(anywhere, device, moved) -> None:
    state = {
        "large": torch.randn(LARGE, device=device),
        "bias": torch.randn(100, device=device),
        "step": torch.tensor(3.0),
    }
    moved()

    first = anywhere.save_model(state, "m", metadata={"epoch": 1})
    assert moved() < LITTLE
    state["bias"] += 1
    second = anywhere.save_model(state, "m")
    assert moved() < LITTLE

    assert (first.version, second.version) == (1, 2)
    assert (first.added, second.added) == (4 * (LARGE + 101), 400)
    assert dict(anywhere.versions("m")[0].metadata) == {"epoch": 1}
    back = anywhere.load_model("m")
    assert all(torch.equal(back[k], v) for k, v in here(state).items())
    assert open_files(anywhere._address.url, None, durable=False).list("tmp") == []


def test_a_version_is_the_same_wherever_it_was_saved(store, device, same) -> None:
    torch.manual_seed(0)
    model = Tied(300)
    base = torch.randn(6, 10)
    extra = [base, base[2], base.t(), base[:, 3], torch.randn(3).bfloat16(), torch.empty(0, 2)]
    extra += [torch.randn(2, dtype=torch.complex64).conj(), torch.randn(1 << 18)[100:-100]]
    storage = {}

    def there(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor.untyped_storage()
        if base._cdata not in storage:
            storage[base._cdata] = torch.empty(0, dtype=torch.uint8).set_(base).to(device)
        far = torch.empty(0, dtype=tensor.dtype, device=device)
        far.set_(
            storage[base._cdata].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        return far.conj() if tensor.is_conj() else far

    near = store.save_model([model.state_dict(), extra], "near")
    model_there = Tied(300)
    model_there.load_state_dict(model.state_dict())
    far_value = [model_there.to(device).state_dict(), [there(tensor) for tensor in extra]]
    far = store.save_model(far_value, "far")

    assert (far.size, far.tensors, far.added) == (near.size, near.tensors, 0)
    assert same(store.load_model("near"), store.load_model("far"))
    manifests = [store._catalog.read(name, 1) for name in ("near", "far")]
    assert manifests[0].tensors == manifests[1].tensors
    assert manifests[0].regions == manifests[1].regions
    assert manifests[0].tree == manifests[1].tree


def test_a_trained_model_and_its_optimizer_come_back(store, device) -> None:
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8, device=device)).sum().backward()
    optimizer.step()

    store.save_model({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run")
    saved = store.load_model("run")

    assert torch.equal(saved["model"]["weight"], model.weight.detach().cpu())
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(saved["optimizer"]["state"][0]["exp_avg"], moment.cpu())
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(store.load_model("run", device=device)["optimizer"])
    assert again.state_dict()["state"][0]["step"].item() == 1


def test_large_tensors_alone_are_saved_by_the_node(store, device, moved) -> None:
    x = torch.arange(1 << 20, device=device)
    moved()

    assert store.save_model(x, "m").added == 8 << 20

    assert moved() < LITTLE
    assert torch.equal(store.load_model("m"), torch.arange(1 << 20))


def test_many_tensors_of_this_machine_are_saved_from_here(store, device) -> None:
    value = {"far": torch.ones(3, device=device), "near": torch.arange(3 << 20)}
    store.save_model(value, "m")

    assert torch.equal(store.load_model("m")["near"], value["near"])
    assert store.load_model("m")["far"].tolist() == [1.0] * 3


def test_tensors_of_two_nodes_are_saved_from_here(store, other, device) -> None:
    far = torch.zeros(2, device=other.device("cpu"))
    store.save_model([torch.ones(3, device=device), far], "m")

    assert [each.tolist() for each in store.load_model("m")] == [[1.0] * 3, [0.0] * 2]


# Stores that the node does not see.


@pytest.fixture
def unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sky.ModelStore:
    """A folder whose path leads elsewhere in the nodes' processes."""
    monkeypatch.chdir(tmp_path)
    return sky.ModelStore("/proc/self/cwd/store")


def test_a_folder_that_the_node_does_not_see_is_read_here(
    unseen, compute, device, moved, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(1 << 20)
    unseen.save_model({"x": x}, "m")
    model = nn.Module()
    model.register_buffer("x", torch.zeros(1 << 20, device=device))
    moved()

    with caplog.at_level(logging.WARNING, "skyward.store"):
        loaded = unseen.load_model("m", device=device)

    assert f"node 0 of {compute.name}" in caplog.text
    assert "does not see the store /proc/self/cwd/store" in caplog.text
    assert loaded["x"].device == device
    assert torch.equal(loaded["x"].cpu(), x)
    assert moved() > 4 << 20
    assert torch.equal(unseen.load_model("m", into=model).x.cpu(), x)


def test_a_folder_that_the_node_does_not_see_is_written_here(
    unseen, device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "skyward.store"):
        unseen.save_model({"x": torch.ones(5, device=device)}, "m")

    assert "does not see the store" in caplog.text
    assert unseen.load_model("m")["x"].tolist() == [1.0] * 5
    assert not list((tmp_path / "store" / "tmp").iterdir())


def test_another_store_at_the_same_path_is_not_mistaken_for_it(
    unseen, compute, device, caplog: pytest.LogCaptureFixture
) -> None:
    @sky.function
    def save(value: float) -> str:
        sky.ModelStore("/proc/self/cwd/store").save_model({"x": torch.full((5,), value)}, "m")
        return os.getcwd()

    assert save(1.0) >> compute != os.getcwd()
    unseen.save_model({"x": torch.full((5,), 2.0)}, "m")

    with caplog.at_level(logging.WARNING, "skyward.store"):
        assert unseen.load_model("m", device=device)["x"].tolist() == [2.0] * 5
    assert "its 'm' version 1 is another one" in caplog.text


def test_a_remote_place_that_the_node_cannot_open_is_an_error(
    compute, device, tmp_path: Path
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    local = fsspec.get_filesystem_class("file")

    class OnlyHere(local):  # type: ignore[misc, valid-type]
        protocol = ("onlyhere",)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.removeprefix("onlyhere://")))

    fsspec.register_implementation("onlyhere", OnlyHere, clobber=True)
    store = sky.ModelStore(f"onlyhere://{tmp_path}/store")
    store.save_model({"x": torch.ones(3)}, "m")

    told = rf"node 0 of {compute.name} cannot use onlyhere://.*Protocol not known.*sky\.Image\("
    with pytest.raises(sky.errors.StoreError, match=told):
        store.load_model("m", device=device)
    with pytest.raises(sky.errors.StoreError, match=told):
        store.save_model({"x": torch.ones(3, device=device)}, "m")


def test_memory_that_cannot_be_shared_is_gone_around(
    store, device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from skyward.device.core import Core

    real = Core.export
    store.save_model({"x": torch.ones(3)}, "m")
    ways: list[Callable[..., list[bytes]]] = [
        lambda *given: [b"" for _ in real(*given)],
        lambda *given: [each[:8] + bytes(32) + each[40:] for each in real(*given)],
    ]
    for way in ways:
        caplog.clear()
        monkeypatch.setattr(Core, "export", way)
        with caplog.at_level(logging.WARNING, "skyward.store"):
            x = store.load_model("m", device=device)["x"]
            store.save_model({"x": x + 1}, "saved")
        assert caplog.text.count("cannot open its device's memory") == 2
        assert x.tolist() == [1.0] * 3
        assert store.load_model("saved")["x"].tolist() == [2.0] * 3


# Deaths, and what travels.


def test_a_dead_device_is_told_of_at_once(store, other) -> None:
    store.save_model({"x": torch.ones(1 << 20)}, "m")
    device = other.device("cpu")
    x = torch.ones(3, device=device)
    _kill_after_export(other)
    for attempt in (
        lambda: store.load_model("m", device=device),
        lambda: store.load_model("m", device=device),
        lambda: store.save_model({"x": x}, "n"),
    ):
        with pytest.raises(RuntimeError, match=r"sky:\d+ .*is gone"):
            attempt()


def _kill_after_export(compute: sky.Compute) -> None:
    """The device's process dies while the node reads."""
    import psutil

    from skyward.device.core import Core

    agent = psutil.Process(compute._open_fleet.nodes[0].host.agent_pid)
    (process,) = [
        child
        for child in agent.children()
        if any("skyward.device.worker" in part for part in child.cmdline())
    ]
    real = Core.export

    def export(*given: Any) -> list[bytes]:
        Core.export = real  # type: ignore[method-assign]
        descriptions = real(*given)
        process.kill()
        process.wait(100)
        return descriptions

    Core.export = export  # type: ignore[method-assign]


def test_a_store_can_be_sent_to_a_function(store, folder: Path, compute) -> None:
    @sky.function
    def mean(store: sky.ModelStore) -> tuple[str, float]:
        return repr(store), store.load_model("m")["x"].mean().item()

    store.save_model({"x": torch.ones(3)}, "m")

    assert mean(store) >> compute == (f"ModelStore({str(folder)!r})", 1.0)


def test_a_store_travels_as_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = pickle.dumps(sky.ModelStore("here", durable=True))
    monkeypatch.chdir("/")

    again = pickle.loads(relative)

    assert repr(again) == f"ModelStore({str(tmp_path / 'here')!r})"
    assert again._address.durable


def test_a_token_is_shown_nowhere() -> None:
    from skyward.store.address import Address

    address = Address("https://user:hidden@host/models", "hidden", durable=False)
    assert "hidden" not in repr(address)


# On a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_the_node_loads_and_saves_too(store, compute) -> None:
    device = compute.device("cuda")
    torch.manual_seed(0)
    right = {"large": torch.randn(LARGE), "turned": torch.randn(30, 50).t(), "one": torch.ones(())}
    store.save_model(right, "m")
    model = nn.Linear(64, 64).to(device)
    store.save_model(nn.Linear(64, 64), "linear")
    before = sky.device_stats(device)

    state = store.load_model("m", device=device)
    store.load_model("linear", into=model)
    again = store.save_model(state, "again")
    after = sky.device_stats(device)

    assert (after.bytes_uploaded, after.bytes_fetched) == (
        before.bytes_uploaded,
        before.bytes_fetched,
    )
    assert again.added == 0
    assert {tensor.device for tensor in state.values()} == {device}
    assert state["turned"].stride() == (1, 50)
    assert all(torch.equal(tensor, right[name]) for name, tensor in here(state).items())
    assert torch.equal(model.weight.detach().cpu(), store.load_model("linear")["weight"])
    model(torch.ones(2, 64, device=device)).sum().backward()


@sky.function
def loads_kept() -> list[node.LoadRequest]:
    return list(node._loads._open)


def test_a_node_keeps_nothing_of_a_load_that_is_over(
    store: sky.ModelStore, compute: sky.Compute, device: torch.device
) -> None:
    store.save_model({"x": torch.ones(1 << 20)}, "kept")

    store.load_model("kept", device=device)
    store.load_model("kept", into=nn.ParameterDict({"x": torch.empty(1 << 20)}).to(device))

    kept = loads_kept() >> compute
    assert [order for order in kept if order.name == "kept"] == []


def test_a_load_whose_client_is_gone_is_forgotten_after_a_while(
    store: sky.ModelStore, folder: Path
) -> None:
    store.save_model({"x": 1}, "m")
    manifest = store._manifest("m", 1)
    order = node.LoadRequest("id", store._address, "m", 1, node._identity(manifest))
    kept = node.OpenLoads(seconds=0.2)

    first = kept.get(order)

    assert kept.get(order) is first
    assert len(kept) == 1
    kept._timers[order].join()
    assert len(kept) == 0
