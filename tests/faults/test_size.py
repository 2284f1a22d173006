"""Values that are too large, too many, or change while they are kept: right, or refused."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import skyward as sky

from ..conftest import PATIENCE, Sharing, only_in_all, other_case

GIB = 1 << 30
QUIET = sky.Options(console=False)


@sky.function
def echo(value: int) -> int:
    return value


@sky.function
def ends(data: np.ndarray) -> tuple[int, int, int]:
    return len(data), int(data[0]), int(data[-1])


@sky.function
def total(data: np.ndarray) -> int:
    return int(data.sum(dtype=np.int64))


# Three gigabytes.


@pytest.fixture
def room() -> None:
    """Memory for three gigabytes here, on the way, and there."""
    free = psutil.virtual_memory().available
    if free < 12 * GIB:
        pytest.skip(f"needs 12 GiB of free memory, there are {free / GIB:.1f}")


@only_in_all
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_an_argument_of_three_gigabytes_arrives(room: None, transport: str) -> None:
    """Slow because it hashes, copies or encrypts that many bytes."""
    data = np.zeros(3 * GIB, np.uint8)
    data[0], data[-1] = 7, 9
    provider = sky.Local(transport=transport)  # type: ignore[arg-type]
    with sky.Compute(provider, options=QUIET) as compute:
        assert ends(data) >> compute == (3 * GIB, 7, 9)
        assert echo(1) >> compute == 1


@only_in_all
@pytest.mark.slow
def test_bytes_beyond_what_fits_in_32_bits_arrive_in_the_pickle_itself(room: None) -> None:
    """Slow because so many bytes go through a socket."""
    data = bytes(2 * GIB + 10)
    with sky.Compute(options=QUIET) as compute:
        assert sky.function(len)(data) >> compute == 2 * GIB + 10


# A full disk.


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 8 MiB where blobs are to go."""
    if os.getuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tempfile.mkdtemp(prefix="skyd-", dir="/tmp")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        os.rmdir(folder)
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    monkeypatch.setenv("SKYWARD_BLOB_DIR", folder)
    try:
        yield Path(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        os.rmdir(folder)


def test_a_full_disk_for_blobs_is_named_and_the_pool_goes_on(small_disk: Path) -> None:
    large, small = np.ones(64 << 20, np.uint8), np.ones(1 << 20, np.uint8)
    with sky.Compute(nodes=2, options=QUIET) as compute:
        assert total(small) >> compute == small.size
        for way in (
            lambda: total(large) >> compute,
            lambda: total(large) > compute,
            lambda: total(large) @ compute,
            lambda: list(compute.map(total, [large])),
        ):
            with pytest.raises(sky.errors.BlobStoreFullError) as caught:
                way()
            message = str(caught.value)
            assert f"64 MiB of arguments do not fit in {small_disk}" in message
            assert "MiB free" in message
            assert "make room there, or point SKYWARD_BLOB_DIR elsewhere" in message
            assert isinstance(caught.value, OSError)
            assert echo(1) @ compute == [1, 1]
        small[:] = 2
        assert total(small) @ compute == [2 * small.size] * 2
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_others_have_filled_can_be_freed_and_used_again(small_disk: Path) -> None:
    data = np.ones(4 << 20, np.uint8)
    with sky.Compute(options=QUIET) as compute:
        hog = small_disk / "hog"
        hog.write_bytes(bytes(6 << 20))
        with pytest.raises(sky.errors.BlobStoreFullError):
            total(data) >> compute
        hog.unlink()
        assert total(data) >> compute == data.size


def test_more_blobs_than_the_disk_holds_take_turns(small_disk: Path) -> None:
    with sky.Compute(options=QUIET) as compute:
        for number in range(24):
            data = np.full(1 << 20, number, np.uint8)
            assert total(data) >> compute == number * data.size


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SKYWARD_BLOB_DIR", "/no/such/folder", "is not a folder"),
        ("SKYWARD_BLOB_CAP", "plenty", "give a number of bytes"),
        ("SKYWARD_BLOB_CAP", "-1", "give a number of bytes"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(sky.errors.ConfigurationError) as caught:
        sky.Compute(options=QUIET)
    assert f"{name}={value!r}" in str(caught.value)
    assert words in str(caught.value)


# A cache that is always too small.


@sky.function
def look_and_spoil(arrays: list[np.ndarray]) -> list[int]:
    """What it sees, after which it writes all over it."""
    seen = [int(array.sum(dtype=np.int64)) for array in arrays]
    for array in arrays:
        array[:] = 255
    return seen


@sky.function
def make(number: int, size: int) -> np.ndarray:
    return np.full(size, number % 251, np.uint8)


def sums(arrays: list[np.ndarray]) -> list[int]:
    return [int(array.sum(dtype=np.int64)) for array in arrays]


@pytest.fixture(scope="module", params=[pytest.param("unix", marks=other_case), "tcp"])
def forgetful(request: pytest.FixtureRequest, sharing: Sharing) -> Iterator[sky.Compute]:
    """A pool that may keep 2 MiB, on both sides of either transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYWARD_BLOB_CAP", str(2 << 20))
        local = sky.Local(transport=request.param)
        with sharing(sky.Compute(local, nodes=2, options=QUIET)) as compute:
            yield compute


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=other_case)])
def test_workers_always_see_the_callers_current_contents(forgetful: sky.Compute, seed: int) -> None:
    """Arrays come again and again, changed in place by both sides, with hardly any room to keep."""
    chance = random.Random(seed)
    sizes = [300_000, 300_000, 400_000, 700_000, 1_200_000, 2_500_000]
    arrays = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    waiting: list[tuple[sky.Future[list[int]], list[int]]] = []

    def change() -> None:
        array = chance.choice(arrays)
        if chance.random() < 0.5:
            array[chance.randrange(len(array))] += 1
        else:
            array[:] = chance.randrange(250)

    for _ in range(60):
        some = chance.choices(arrays, k=chance.randint(1, 4))  # the same one may come twice
        expected = sums(some)
        match chance.randrange(5):
            case 0 | 1:
                assert look_and_spoil(some) >> forgetful == expected
            case 2:
                # Sent later than it is changed.
                waiting.append((look_and_spoil(some) > forgetful, expected))
            case 3:
                assert look_and_spoil(some) @ forgetful == [expected] * 2
            case 4:
                calls = [look_and_spoil([array]) for array in some]
                got = sky.gather(*calls) >> forgetful
                assert got == [[value] for value in expected]
        assert sums(some) == expected, "the worker's writes must not be seen here"
        for _ in range(chance.randrange(3)):
            change()
    for future, seen in waiting:
        assert future.result(PATIENCE) == seen
    stats = forgetful.stats()
    assert (stats.failed, stats.workers_died) == (0, 0)


def test_the_same_array_twice_in_a_call_stays_two_where_both_are_written(
    forgetful: sky.Compute,
) -> None:
    @sky.function
    def write(first: np.ndarray, second: np.ndarray) -> tuple[int, int]:
        first[:] = 1
        return int(first[0]), int(second[0])

    array = np.zeros(400_000, np.uint8)
    assert write(array, array.copy()) >> forgetful == (1, 0)
    assert array[0] == 0


def test_results_stay_what_they_were_however_many_follow(forgetful: sky.Compute) -> None:
    kept: list[tuple[np.ndarray, int]] = []
    for number in range(60):
        result = make(number, 300_000 + 10_000 * (number % 7)) >> forgetful
        assert result[0] == result[-1] == number % 251
        result += 1  # ours to write to
        kept.append((result, number))
        if number % 3 == 2:
            kept.pop(0)  # its memory goes back to the worker, to be used for another result
    for result, number in kept:
        assert set(np.unique(result).tolist()) == {number % 251 + 1}


def test_put_data_outlives_the_cache_that_is_too_small_for_it(forgetful: sky.Compute) -> None:
    frozen = [sky.put(np.full(1_500_000, number, np.uint8)) for number in range(4)]
    for _ in range(4):
        for number, handle in enumerate(frozen):
            noise = np.full(1_000_000, 100 + number, np.uint8)
            assert total(handle) @ forgetful == [number * 1_500_000] * 2
            assert total(noise) >> forgetful == (100 + number) * noise.size


def test_many_large_values_leave_no_descriptors_behind(forgetful: sky.Compute) -> None:
    @sky.function
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def here() -> int:
        return psutil.Process().num_fds()

    def round_trips(count: int) -> None:
        for number in range(count):
            array = np.full(300_000 + 4096 * (number % 5), number % 250, np.uint8)
            assert total(array) >> forgetful == (number % 250) * array.size
            assert len(make(number, 300_000) >> forgetful) == 300_000

    round_trips(40)
    before = here(), open_files() @ forgetful
    round_trips(150)
    assert here() <= before[0] + 10
    assert all(
        now <= then + 10 for now, then in zip(open_files() @ forgetful, before[1], strict=True)
    )
