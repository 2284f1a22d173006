"""The model store against safetensors on a disk, and against curl and sockets over the network."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import interleave, timed
from report import Row, absent, compared, run_suite
from safetensors.torch import load_file, save_file

import skyward as sky

MIB = 1 << 20
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    blocks: int


FULL = Size(rounds=9, blocks=18)
QUICK = Size(rounds=2, blocks=2)


def transformer(blocks: int) -> Weights:
    """The state dict of a transformer; with 18 blocks it has 254 tensors and close to 1 GiB."""
    weights = {"embedding": torch.randn(32, MIB)}
    for block in range(blocks):
        for name in ("query", "key", "value", "output"):
            weights[f"{block}.{name}.weight"] = torch.randn(1024, 1024)
            weights[f"{block}.{name}.bias"] = torch.randn(1024)
        weights[f"{block}.up.weight"] = torch.randn(4096, 1024)
        weights[f"{block}.up.bias"] = torch.randn(4096)
        weights[f"{block}.down.weight"] = torch.randn(1024, 4096)
        weights[f"{block}.down.bias"] = torch.randn(1024)
        for name in ("first", "second"):
            weights[f"{block}.{name}.norm"] = torch.randn(1024)
    return weights


def use(weights: Weights) -> None:
    """Read every value: what is mapped lazily is there in the end."""
    for tensor in weights.values():
        tensor.sum()


def forget(files: Iterable[Path]) -> None:
    """Have the system drop what it keeps of these files in memory."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def change(weights: Weights, value: float) -> Weights:
    """Write to 1 % of the tensors."""
    for name in itertools.islice(weights, 1, None, 100):
        weights[name] = weights[name].fill_(value)
    return weights


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A place on the disk, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="skyward-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def on_disk(size: Size) -> Sequence[Row]:
    """Saving and loading everything."""
    weights = transformer(size.blocks)

    def save() -> float:
        with folder() as place:
            return timed(lambda: sky.ModelStore(place).save_model(weights, "m"))

    def save_file_of_it() -> float:
        with folder() as place:
            return timed(lambda: save_file(weights, place / "m.safetensors"))

    with folder() as place:
        store, file = sky.ModelStore(place), place / "m.safetensors"
        store.save_model(weights, "m")
        save_file(weights, file)

        def load_cold() -> float:
            forget(place.glob("objects/*/*"))
            return timed(lambda: use(store.load_model("m")))

        def load_file_cold() -> float:
            forget([file])
            return timed(lambda: use(load_file(file)))

        samples = interleave(
            {
                "save": save,
                "save_file": save_file_of_it,
                "load": lambda: timed(lambda: use(store.load_model("m"))),
                "load_file": lambda: timed(lambda: use(load_file(file))),
                "load cold": load_cold,
                "load_file cold": load_file_cold,
            },
            rounds=size.rounds,
        )
    total = sum(tensor.nbytes for tensor in weights.values())
    rate = {name: sample.per(total, "B/s") for name, sample in samples.items()}
    label = f"{total / MIB:,.0f} MiB of weights"
    return [
        compared(f"save {label}", rate["save"], "save_file", rate["save_file"], ">= 0.9x"),
        compared(
            f"load {label}, verified, and read them",
            rate["load"],
            "load_file, and read them",
            rate["load_file"],
            ">= 0.9x",
        ),
        compared(
            "the same from a disk that has to be read",
            rate["load cold"],
            "load_file, and read them",
            rate["load_file cold"],
            ">= 0.9x",
        ),
    ]


def small_changes(size: Size) -> Sequence[Row]:
    """Saving a version in which 1 % of the tensors changed."""
    weights = transformer(size.blocks)
    counter = itertools.count(1.0)
    with folder() as place:
        store = sky.ModelStore(place / "kept")
        store.save_model(weights, "m")

        def first() -> float:
            with folder() as other:
                return timed(lambda: sky.ModelStore(other).save_model(weights, "m"))

        def after() -> float:
            changed = change(weights, next(counter))
            return timed(lambda: store.save_model(changed, "m"))

        samples = interleave(
            {
                "first": first,
                "changed": after,
            },
            rounds=size.rounds,
        )
    total = sum(tensor.nbytes for tensor in weights.values())
    rate = {name: sample.per(total, "B/s") for name, sample in samples.items()}
    what = "save with 1 % of the tensors changed"
    return [compared(what, rate["changed"], "first", rate["first"], ">= 20x")]


def over_the_network(size: Size) -> Sequence[Row]:
    """Loading from the file server on loopback."""
    weights = transformer(size.blocks)
    total = sum(tensor.nbytes for tensor in weights.values())
    with folder() as place, served(place / "store") as url, torch_save_server(weights) as port:
        sky.ModelStore(place / "store").save_model(weights, "m")
        store, file = sky.ModelStore(url), place / "m.safetensors"
        contenders = {
            "sky": lambda: timed(lambda: use(store.load_model("m"))),
            "sockets": lambda: timed(lambda: use(received(port))),
        }
        if shutil.which("curl"):
            command = ["curl", "-sSf", "-o", str(file), f"{url}/download/m.safetensors"]

            def curl() -> None:
                file.unlink(missing_ok=True)
                subprocess.run(command, check=True)
                use(load_file(file))

            contenders["curl"] = lambda: timed(curl)
        samples = interleave(contenders, rounds=size.rounds)
    rate = {name: sample.per(total, "B/s") for name, sample in samples.items()}
    what = "load from the file server, verified"
    against_curl = (
        compared(what, rate["sky"], "curl to a file, then load_file", rate["curl"], ">= 0.8x")
        if "curl" in rate
        else absent(what, "curl to a file, then load_file", "curl", rate["sky"])
    )
    sockets = "torch.save over a socket"
    return [against_curl, compared(what, rate["sky"], sockets, rate["sockets"], ">= 1.0x")]


@contextlib.contextmanager
def served(place: Path) -> Iterator[str]:
    """The file server for a folder, in a process of its own."""
    place.mkdir()
    command = [sys.executable, "-m", "skyward", "models", "serve", place, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


@contextlib.contextmanager
def torch_save_server(weights: Weights) -> Iterator[int]:
    """A process that sends a state dict to whoever connects, as `torch.save` writes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = multiprocessing.get_context("fork").Process(target=send, args=(listener, weights))
    sender.start()
    try:
        yield listener.getsockname()[1]
    finally:
        sender.kill()
        sender.join()
        listener.close()


def send(listener: socket.socket, weights: Weights) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            buffer = io.BytesIO()
            torch.save(weights, buffer)
            connection.sendall(buffer.getbuffer().nbytes.to_bytes(8, "little"))
            connection.sendall(buffer.getbuffer())


def received(port: int) -> Weights:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
        data = bytearray(size)
        view = memoryview(data)
        while view:
            view = view[connection.recv_into(view) :]
    weights: Weights = torch.load(io.BytesIO(data), weights_only=True)
    return weights


if __name__ == "__main__":
    run_suite("the model store", [on_disk, small_changes, over_the_network], full=FULL, quick=QUICK)
