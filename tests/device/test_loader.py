"""A loader on the device's node gives the batches of the same DataLoader here, as sky tensors."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import skyward as sky
from skyward.device import loader as loaders
from skyward.errors import ConfigurationError, DeviceError, WorkerDiedError

from ..conftest import Eventually, only_in_all, other_case

LENGTH = 26
OPTIONS = sky.Options(console=False)


@pytest.fixture(scope="module")
def far(sharing) -> Iterator[sky.Compute]:
    """A pool that is reached as over a network."""
    with sharing(sky.Compute(sky.Local(transport="tcp"), options=OPTIONS)) as compute:
        yield compute


class Noisy(Dataset):
    """Every item draws from all three generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        return {
            "x": torch.full((3,), float(index)) + torch.rand(3),
            "y": random.random() + np.random.rand(),
            "name": f"row {index % 5}",
            "worker": -1 if info is None else info.id,
        }


class Numbers(IterableDataset):
    """Every worker has its part, as of the shards of a data set in many files."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, LENGTH, step):
            yield torch.tensor([number, int(torch.randint(1000, ())), random.randrange(1000)])


class Counted(IterableDataset):
    """It can say where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def here(value: Any) -> Any:
    """The same with its tensors here, as lists."""
    if isinstance(value, torch.Tensor):
        assert value.device.type in ("sky", "cpu")
        return value.tolist()
    if isinstance(value, dict):
        return {name: here(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [here(each) for each in value]
    return value


def seeded() -> None:
    torch.manual_seed(7)
    random.seed(8)
    np.random.seed(9)


def both(device: torch.device, dataset: Any, epochs: int = 2, **options: Any) -> list[Any]:
    """The batches of a loader, after they were found to be those of the same DataLoader here.

    So are the numbers that the program draws afterwards.
    """

    def run(loader: Any) -> tuple[list[Any], Any]:
        seeded()
        if (generator := options.get("generator")) is not None:
            generator.manual_seed(3)
        batches = [here(batch) for _ in range(epochs) for batch in loader]
        drawn = torch.rand(1).item(), random.random(), np.random.rand()
        return batches, (drawn, None if generator is None else generator.get_state().tolist())

    with sky.loader(dataset, device=device, **options) as loader:
        found, after = run(loader)
    options.pop("device", None)
    expected, expected_after = run(DataLoader(dataset, **options))
    assert found == expected
    assert after == expected_after
    return found


# Order and random numbers.


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_same_loader_here(device, workers: int) -> None:
    both(device, Noisy(), batch_size=4, shuffle=True, num_workers=workers)


def test_over_a_network_they_are_too_and_few_bytes_travel(far: sky.Compute) -> None:
    device = far.device("cpu")
    both(device, Noisy(), batch_size=4, shuffle=True, num_workers=2)
    images = TensorDataset(torch.rand(400, 3, 32, 32), torch.randint(10, (400,)))
    with sky.loader(images, device=device, batch_size=40, shuffle=True) as loader:
        for _ in range(2):
            before, stats = sum(far._open_fleet.dispatcher.traffic()), sky.device_stats(device)
            total = sum(x.mean() + y.sum() for x, y in loader)
            after = sky.device_stats(device)
        assert total.isfinite()
        assert after.bytes_uploaded == stats.bytes_uploaded
        assert after.asked == stats.asked
        # Ten batches of half a megabyte; and the states of this program's generators.
        assert sum(far._open_fleet.dispatcher.traffic()) - before < 40_000


def test_a_generator_is_used_as_here(device) -> None:
    both(device, Noisy(), batch_size=4, shuffle=True, generator=torch.Generator())
    sampler = RandomSampler(range(LENGTH), replacement=True, num_samples=40)
    both(device, Noisy(), batch_size=4, sampler=sampler, generator=torch.Generator())


@other_case
def test_samplers_and_sizes_are_the_users(device) -> None:
    generator = torch.Generator()
    weighted = WeightedRandomSampler([1.0] * 10, 12, generator=generator)
    both(device, Noisy(), batch_size=5, sampler=weighted, drop_last=True, generator=generator)
    both(device, Noisy(), batch_size=None, shuffle=True)
    both(device, Noisy(), batch_sampler=BatchSampler(range(10), 3, drop_last=False))


def test_a_sampler_of_the_users_own_is_asked_here(device) -> None:
    asked: list[int] = []

    class Halves(Sampler):
        def __iter__(self) -> Iterator[int]:
            for index in range(0, LENGTH, 2):
                asked.append(index)
                yield index

        def __len__(self) -> int:
            return LENGTH // 2

    both(device, Noisy(), batch_size=4, sampler=Halves(), num_workers=1)
    assert asked[: LENGTH // 2] == list(range(0, LENGTH, 2))


class Pair(NamedTuple):
    x: torch.Tensor
    rest: Any


@dataclass
class Bag:
    tensors: list[torch.Tensor]
    array: Any


def test_a_batch_may_be_anything(device) -> None:
    def bag(items: list[torch.Tensor]) -> Pair:
        whole = torch.stack(items)
        return Pair(whole, {"bag": Bag([whole[0], torch.empty(0)], np.ones(2)), "n": len(items)})

    rows = torch.arange(6.0).view(3, 2)
    (batch,) = sky.loader(rows, device=device, batch_size=3, collate_fn=bag)
    assert type(batch) is Pair
    assert batch.x.device == device
    assert batch.rest["n"] == 3
    assert type(batch.rest["bag"]) is Bag
    assert batch.rest["bag"].array.tolist() == [1, 1]
    batch.rest["bag"].tensors[0].zero_()
    assert batch.x.tolist() == [[0, 0], [2, 3], [4, 5]]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_is_read_by_its_workers(device, workers: int) -> None:
    both(device, Numbers(), batch_size=4, num_workers=workers)


def test_workers_that_stay_go_on_with_their_numbers(device) -> None:
    found = both(
        device,
        Noisy(),
        batch_size=13,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=lambda number: random.seed(number),
    )
    assert found[0] != found[2]


@only_in_all
def test_hugging_face_data_sets(device, tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[i, i + 1] for i in range(LENGTH)], "n": ["a"] * 26})
    rows.save_to_disk(tmp_path / "rows")
    rows = datasets.load_from_disk(tmp_path / "rows").with_format("torch")
    expected = [here(batch) for batch in DataLoader(rows, batch_size=8)]
    with sky.loader(rows, device=device, batch_size=8) as loader:
        # The node need not have the files.
        (tmp_path / "rows").rename(tmp_path / "gone")
        assert [here(batch) for batch in loader] == expected
    shards = rows.to_iterable_dataset(num_shards=2)
    (tmp_path / "gone").rename(tmp_path / "rows")
    both(device, shards, batch_size=4, num_workers=2)


@only_in_all
def test_a_trainer_takes_its_batches_from_a_loader(device, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    rows = [{"x": torch.full((4,), float(i)), "labels": torch.tensor(i % 2)} for i in range(24)]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    class NodeTrainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return sky.loader(
                self.train_dataset,
                device=self.args.device,
                batch_size=self.args.train_batch_size,
                collate_fn=self.data_collator,
                shuffle=True,
            )

    def train(**more: Any) -> list[float]:
        transformers.set_seed(0)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            save_steps=4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = NodeTrainer(Net(), arguments, train_dataset=rows)
        trainer.train(**more)
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]

    with torch.sky.device(device):
        losses = train()
        assert len(losses) == 12
        # It skips the batches of the epoch that it has had.
        assert train(resume_from_checkpoint=str(tmp_path / "checkpoint-4")) == losses
        loader = sky.loader(rows, device=device)
        assert accelerate.Accelerator().prepare(loader) is loader


# Where the data set comes from.


def test_a_function_makes_the_data_set_on_the_node(far: sky.Compute) -> None:
    def build() -> TensorDataset:
        return TensorDataset(torch.full((10,), float(os.getpid())))

    with sky.loader(build, device=far.device("cpu"), batch_size=4, shuffle=True) as loader:
        assert len(loader) == 3
        assert len(loader.dataset) == 10
        assert loader.batch_size == 4
        assert not loader.drop_last
        pids = {x for (batch,) in loader for x in batch.tolist()}
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_what_was_put_is_a_data_set(device) -> None:
    rows = sky.put(torch.arange(10))
    assert [x.tolist() for x in sky.loader(rows, device=device, batch_size=5)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


def test_mistakes_are_found_before_anything_is_sent(device) -> None:
    with pytest.raises(ConfigurationError, match="give one with __getitem__ or __iter__"):
        sky.loader(3, device=device)
    with pytest.raises(ConfigurationError, match=r"give a device of compute.device\(\)"):
        sky.loader([1], device="cpu")
    with pytest.raises(ValueError, match="mutually exclusive"):
        sky.loader([1], device=device, sampler=range(1), shuffle=True)
    with pytest.raises(ConfigurationError, match="no open pool has this device"):
        sky.loader([1], device="sky:99")


# Going on in the middle.


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        (Noisy(), 0),
        (Noisy(), 2),
        (Numbers(), 2),
        pytest.param(Numbers(), 0, marks=other_case),
        (Counted(), 0),
        pytest.param(Counted(), 2, marks=other_case),
    ],
)
def test_an_epoch_goes_on_where_it_was(device, dataset: Any, workers: int) -> None:
    shuffle = None if isinstance(dataset, IterableDataset) else True

    def make() -> Any:
        options = {"batch_size": 4, "num_workers": workers, "shuffle": shuffle}
        return sky.loader(dataset, device=device, **options)

    seeded()
    with make() as loader:
        batches = iter(loader)
        first = [here(next(batches)) for _ in range(3)]
        state = loader.state_dict()
        rest = [here(batch) for batch in batches]
    assert first
    assert rest
    torch.manual_seed(100)
    with make() as other:
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert [here(batch) for batch in other] == rest
        assert other.state_dict() == {"batches": 0}


def test_a_shuffled_order_of_the_users_generator_goes_on(device) -> None:
    generator = torch.Generator().manual_seed(1)
    with sky.loader(torch.arange(20), device=device, shuffle=True, generator=generator) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
        rest = [here(batch) for batch in batches]
        following = [here(batch) for batch in loader]
        generator.manual_seed(2)
        loader.load_state_dict(state)
        assert [here(batch) for batch in loader] == rest
        assert [here(batch) for batch in loader] == following


def test_a_state_that_cannot_be_had_or_does_not_fit_is_refused(device) -> None:
    with sky.loader(Noisy(), device=device) as loader:
        next(iter(loader))
        with pytest.raises(ConfigurationError, match="inside the loop"):
            loader.state_dict()
        with pytest.raises(ConfigurationError, match="has returned"):
            loader.load_state_dict({})
        with pytest.raises(ConfigurationError, match="give num_workers=2"):
            loader.load_state_dict({"batches": 3, "workers": [{}, {}], "num_workers": 2})


# Room.


def test_room_grows_with_the_batches(device) -> None:
    sizes = [1, 0, 5, 100_000, 7, 500_000, 3_000_000, 3]
    rows = [torch.full((size,), number) for number, size in enumerate(sizes)]
    found = list(sky.loader(rows, device=device, batch_size=None))
    assert [len(each) for each in found] == sizes
    assert all((each == number).all().item() for number, each in enumerate(found))


def test_memory_of_batches_is_freed_and_is_the_batch_alone(device) -> None:
    def in_use() -> int:
        gc.collect()
        return torch.sky.memory_allocated(device)

    before = in_use()
    loader = sky.loader(TensorDataset(torch.rand(100, 1000), torch.arange(100)), device=device)
    labels = [y for _, y in loader]
    assert in_use() - before < loaders.BATCHES_MOST * 8192 + 200_000
    assert [y.item() for y in labels] == list(range(100))
    loader.close()
    labels.clear()
    del loader
    assert in_use() - before < 1000


def test_without_shared_memory_batches_come_all_the_same(device, monkeypatch) -> None:
    made = loaders.BatchRoom.__init__

    def closed(self: Any, *args: Any) -> None:
        made(self, *args)
        self.description = b""

    monkeypatch.setattr(loaders.BatchRoom, "__init__", closed)
    both(device, Noisy(), batch_size=4, shuffle=True)


@given(st.lists(st.integers(1, 500), max_size=60), st.data())
def test_places_of_a_ring_never_overlap(sizes: list[int], data: Any) -> None:
    ring = loaders.Ring(torch.zeros(loaders.ALIGNMENT + 1000, dtype=torch.uint8), 1)
    there: dict[int, tuple[int, int]] = {1: (0, 1000)}
    for number, size in enumerate(sizes, 2):
        while (start := ring.claim(number, size)) is None:
            oldest = min(there)
            del there[oldest]
            ring.release(oldest)
        assert 0 <= start <= 1000 - size
        assert all(end <= start or start + size <= first for first, end in there.values())
        there[number] = start, start + size
        if data.draw(st.booleans()):
            taken = data.draw(st.sampled_from(sorted(there)))
            ring.release(max(taken, int(ring._taken)))
            there = {each: place for each, place in there.items() if each > taken}


# Endings.


class BrokenRowError(Exception):
    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"row {index}: {reason}")
        self.index = index


class Broken(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise BrokenRowError(index, "unreadable")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_set_comes_with_its_class_and_lines(device, workers: int) -> None:
    loader = sky.loader(Broken(), device=device, batch_size=2, num_workers=workers)
    batches = iter(loader)
    assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(BrokenRowError, match="row 5: unreadable") as caught:
        next(batches)
    assert caught.value.index == 5
    assert "raise BrokenRowError" in "\n".join(caught.value.__notes__)
    assert list(batches) == []


def test_an_error_before_the_first_batch_is_told(device) -> None:
    def fail(number: int) -> None:
        raise BrokenRowError(number, "no worker")

    def build() -> None:
        raise BrokenRowError(0, "no data")

    with pytest.raises(BrokenRowError, match="no worker"):
        next(iter(sky.loader([1], device=device, num_workers=1, worker_init_fn=fail)))
    with pytest.raises(BrokenRowError, match="no data"):
        sky.loader(build, device=device)


def readers() -> set[int]:
    """The processes of data loaders."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "pt_data_worker" in process.name():
                found.add(process.pid)
    return found


def test_leaving_an_epoch_ends_its_workers(device, eventually: Eventually) -> None:
    eventually(lambda: not readers())
    # Longer than what is ready ahead.
    for _ in sky.loader(torch.arange(10_000), device=device, num_workers=2):
        assert readers()
        break
    eventually(lambda: not readers())
    loader = sky.loader(Noisy(), device=device, num_workers=2)
    assert len(list(loader)) == LENGTH
    eventually(lambda: not readers())
    kept = sky.loader(Noisy(), device=device, num_workers=1, persistent_workers=True)
    for _ in range(2):
        next(iter(kept))
        assert len(readers()) == 1
    kept.close()
    eventually(lambda: not readers())


def test_two_loaders_and_two_epochs_of_one_run_side_by_side(device) -> None:
    one = sky.loader(torch.arange(20), device=device, batch_size=4)
    other = sky.loader(torch.arange(20), device=device, batch_size=4, num_workers=1)
    for a, b, c in itertools.zip_longest(one, one, other):
        assert a.tolist() == b.tolist() == c.tolist()


def test_other_calls_run_meanwhile(compute: sky.Compute, device) -> None:
    for x in sky.loader(torch.arange(3), device=device):
        assert compute.run(sky.function(lambda x: x.item() + 1)(x), on=0) == x.item() + 1


@only_in_all
def test_a_loader_ends_with_its_worker_its_device_or_its_pool(eventually: Eventually) -> None:
    with sky.Compute(options=OPTIONS) as compute:
        device = compute.device("cpu")
        pid = compute.run(sky.function(os.getpid)())
        loader = sky.loader(Noisy(), device=device, num_workers=1)
        batches = iter(loader)
        next(batches)
        os.kill(pid, 9)
        with pytest.raises((WorkerDiedError, sky.errors.InstanceLostError)):
            for _ in batches:
                pass
        assert len(list(loader)) == LENGTH  # made again
        batches = iter(loader)
        next(batches)
        compute._open_fleet.devices.node_lost(0, "pulled")
        with pytest.raises(DeviceError):
            list(batches)
        left = iter(sky.loader(Noisy(), device=compute.device("cpu"), num_workers=1))
        next(left)
    with pytest.raises(sky.SkywardError):
        list(left)
    eventually(lambda: not readers())
