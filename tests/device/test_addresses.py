"""No arithmetic on a storage's data pointer reaches the memory of another tensor."""

from __future__ import annotations

import io
import itertools
import pickle

import pytest
import torch
from torch.utils import dlpack

import skyward as sky

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")

COUNT = 16


@pytest.fixture
def ts(device: torch.device) -> list[torch.Tensor]:
    """Tensors in neighbouring slots, each filled with its own number."""
    return [torch.full((16,), number, dtype=torch.uint8, device=device) for number in range(COUNT)]


def _changed(ts: list[torch.Tensor]) -> dict[int, list[int]]:
    """What no longer holds only its own number."""
    values = {number: t.tolist() for number, t in enumerate(ts)}
    return {number: found for number, found in values.items() if found != [number] * 16}


def _over(storage: torch.UntypedStorage, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def test_a_slice_of_a_storage_reads_its_own_memory(ts: list[torch.Tensor]) -> None:
    ts[5].copy_(torch.arange(16, dtype=torch.uint8))
    for start, end in ((0, 16), (1, 2), (8, 9), (3, 11), (16, 16)):
        assert ts[5].untyped_storage()[start:end].tolist() == list(range(start, end))


def test_writing_a_slice_writes_its_own_memory(ts: list[torch.Tensor]) -> None:
    ts[5].untyped_storage()[8:9].fill_(77)
    ts[7].untyped_storage()[1:2].fill_(78)
    assert _changed(ts) == {5: [5] * 8 + [77] + [5] * 7, 7: [7, 78] + [7] * 14}


def test_a_slice_of_a_slice_and_an_item_of_one(ts: list[torch.Tensor]) -> None:
    inner = ts[3].untyped_storage()[4:12][2:6]
    inner[1] = 99
    assert inner.tolist() == [3, 99, 3, 3]
    assert inner[1] == 99
    assert _changed(ts) == {3: [3] * 7 + [99] + [3] * 8}


def test_a_storage_copies_into_and_out_of_a_slice(ts: list[torch.Tensor]) -> None:
    ts[2].untyped_storage()[4:8].copy_(ts[9].untyped_storage()[0:4])
    assert _changed(ts) == {2: [2] * 4 + [9] * 4 + [2] * 8}
    assert ts[2].untyped_storage()[3:6].cpu().tolist() == [2, 9, 9]
    assert ts[2].untyped_storage()[3:6].clone().tolist() == [2, 9, 9]


def test_a_tensor_over_a_slice_is_a_view_of_the_memory(ts: list[torch.Tensor]) -> None:
    over = _over(ts[4].untyped_storage()[8:16], torch.int32)
    over.fill_(0x01020304)
    over[1:].add_(1)
    assert over.tolist() == [0x01020304, 0x01020305]
    assert (over * 2).tolist() == [0x02040608, 0x0204060A]
    expected = [4] * 8 + [4, 3, 2, 1] + [5, 3, 2, 1]
    assert _changed(ts) == {4: expected}
    over.copy_(torch.tensor([7, 8], dtype=torch.int32))
    assert over.cpu().tolist() == [7, 8]


def test_a_tensor_over_a_slice_has_its_own_offset_too(ts: list[torch.Tensor]) -> None:
    ts[4].copy_(torch.arange(16, dtype=torch.uint8))
    sliced = ts[4].untyped_storage()[4:12]
    over = torch.empty(0, dtype=torch.uint8, device=sliced.device).set_(sliced, 2, (3,), (2,))
    assert over.tolist() == [6, 8, 10]
    assert over.storage_offset() == 2


def test_an_odd_slice_holds_no_larger_elements(ts: list[torch.Tensor]) -> None:
    over = _over(ts[4].untyped_storage()[1:9], torch.int32)
    with pytest.raises(sky.errors.DeviceError, match="no multiple of its 4 bytes"):
        over.fill_(1)
    assert not _changed(ts)


def test_a_slice_is_never_resized(ts: list[torch.Tensor]) -> None:
    sliced = ts[4].untyped_storage()[4:8]
    for grow in (
        lambda: sliced.resize_(400),
        lambda: _over(sliced).resize_(400),
        lambda: torch.empty(0, dtype=torch.uint8, device=sliced.device).set_(sliced, 0, (400,)),
        lambda: torch.cat([ts[1], ts[2]], out=_over(sliced)),
    ):
        with pytest.raises(RuntimeError, match="resiz"):
            grow()
    assert not _changed(ts)


def test_a_slice_keeps_its_memory_when_the_tensor_is_gone(device: torch.device) -> None:
    sliced = torch.full((16,), 3, dtype=torch.uint8, device=device).untyped_storage()[4:8]
    others = [torch.full((16,), 9, dtype=torch.uint8, device=device) for _ in range(4)]
    assert sliced.tolist() == [3] * 4
    sliced.fill_(1)
    assert not any((other != 9).any() for other in others)


def test_a_slice_survives_that_its_storage_grows(ts: list[torch.Tensor]) -> None:
    sliced = ts[6].untyped_storage()[4:8]
    ts[6].resize_(1 << 20)
    sliced.fill_(60)
    assert ts[6][:16].tolist() == [6] * 4 + [60] * 4 + [6] * 8


def test_typed_storages_stay_in_their_memory(ts: list[torch.Tensor]) -> None:
    typed = ts[5].storage()
    typed[3] = 50
    typed[8:10] = 51
    assert typed[3] == 50
    assert _changed(ts) == {5: [5, 5, 5, 50, 5, 5, 5, 5, 51, 51] + [5] * 6}


def test_addresses_of_tensors_are_far_apart_and_keep_their_offset(ts: list[torch.Tensor]) -> None:
    bases = sorted(t.data_ptr() for t in ts)
    assert min(b - a for a, b in itertools.pairwise(bases)) >= 1 << 32
    assert ts[3][5:].data_ptr() == ts[3].data_ptr() + 5
    # No processor takes it for memory of this process.
    assert min(bases) >= 1 << 48


def test_a_storage_made_from_an_address_alone_is_refused(ts: list[torch.Tensor]) -> None:
    for address in (ts[5].data_ptr(), ts[5].data_ptr() + 8, ts[5].data_ptr() + (1 << 32), 4096):
        storage = torch._C._construct_storage_from_data_pointer(address, ts[5].device, 8)
        for use in (
            lambda s=storage: s.fill_(1),
            lambda s=storage: s[0],
            lambda s=storage: s[1:2].fill_(1),
        ):
            with pytest.raises(sky.errors.DeviceError, match=r"address"):
                use()
    assert not _changed(ts)


def test_dlpack_gives_back_a_view_of_the_same_memory(ts: list[torch.Tensor]) -> None:
    back = dlpack.from_dlpack(dlpack.to_dlpack(ts[8][4:]))
    back[0] = 80
    assert back.device == ts[8].device
    assert _changed(ts) == {8: [8] * 4 + [80] + [8] * 11}


def test_a_lazy_clone_shares_memory_until_one_is_written_to(ts: list[torch.Tensor]) -> None:
    copy = torch._lazy_clone(ts[5])
    assert torch._C._data_address(copy) == ts[5].const_data_ptr()
    assert (copy + ts[5]).tolist() == [10] * 16
    assert torch._C._is_cow_tensor(copy)
    copy.fill_(0)
    assert copy.tolist() == [0] * 16
    assert not _changed(ts)


def test_every_way_to_write_to_a_lazy_clone_leaves_the_other_alone(
    ts: list[torch.Tensor], other_device: torch.device
) -> None:
    ways = (
        lambda t: t.add_(1),
        lambda t: t[3:5].copy_(torch.zeros(2, dtype=torch.uint8)),
        lambda t: torch.add(t, 1, out=t),
        lambda t: torch._foreach_add_([t], 1),
        lambda t: t.resize_(32),
        lambda t: t.untyped_storage().resize_(32),
        lambda t: t.untyped_storage()[2:5].fill_(9),
        lambda t: t[torch.ones(16, dtype=torch.bool)].zero_(),
    )
    for way in ways:
        for is_original in (False, True):
            copy = torch._lazy_clone(ts[5])
            written, kept = (ts[5], copy) if is_original else (copy, ts[5])
            # The memory of the clone is where the tensor is, whatever the current device is.
            with torch.sky.device(other_device):
                way(written)
            assert kept.tolist() == [5] * 16
            ts[5] = torch.full((16,), 5, dtype=torch.uint8, device=kept.device)
    assert not _changed(ts)


def test_bytes_are_swapped_in_their_own_memory(ts: list[torch.Tensor]) -> None:
    ts[5].copy_(torch.arange(16, dtype=torch.uint8))
    ts[5].untyped_storage()[4:9].byteswap(torch.int32)
    assert _changed(ts) == {5: [0, 1, 2, 3, 7, 6, 5, 4, *range(8, 16)]}
    here = torch.arange(4, dtype=torch.uint8)
    here.untyped_storage().byteswap(torch.int16)
    assert here.tolist() == [1, 0, 3, 2]


def test_what_needs_the_memory_here_is_refused(ts: list[torch.Tensor]) -> None:
    storage = ts[5].untyped_storage()
    for use in (
        lambda: ts[5].numpy(),
        lambda: ts[5].__array_interface__,
        lambda: storage._share_filename_cpu_(),
        lambda: storage._share_fd_cpu_(),
    ):
        with pytest.raises((RuntimeError, TypeError, AttributeError, NotImplementedError)):
            use()
    assert storage.share_memory_() is storage
    assert not _changed(ts)


def test_slices_are_saved_with_their_own_bytes(ts: list[torch.Tensor]) -> None:
    ts[5].copy_(torch.arange(16, dtype=torch.uint8))
    file = io.BytesIO()
    torch.save(_over(ts[5].untyped_storage()[4:8]), file)
    file.seek(0)
    assert torch.load(file, map_location="cpu").tolist() == [4, 5, 6, 7]
    assert pickle.loads(pickle.dumps(_over(ts[5].untyped_storage()[4:8]).cpu())).tolist() == [
        4,
        5,
        6,
        7,
    ]


def test_a_slice_goes_through_a_file(ts: list[torch.Tensor], tmp_path) -> None:
    path = tmp_path / "bytes"
    ts[5].copy_(torch.arange(16, dtype=torch.uint8))
    with path.open("wb") as file:
        ts[5].untyped_storage()[4:8]._write_file(file, True, True, 1)
    with path.open("rb") as file:
        ts[9].untyped_storage()[8:12]._set_from_file(file, None, True, 1)
    assert ts[9].tolist() == [9] * 8 + [4, 5, 6, 7] + [9] * 4


def test_a_slice_may_be_used_on_a_stream(ts: list[torch.Tensor]) -> None:
    side = torch.Stream(ts[5].device)
    over = _over(ts[5].untyped_storage()[4:8])
    over.record_stream(side)
    torch.accelerator.synchronize(ts[5].device.index)
    assert over.tolist() == [5] * 4


def test_a_slice_goes_into_a_call_as_its_bytes(
    ts: list[torch.Tensor], compute: sky.Compute
) -> None:
    ts[5].copy_(torch.arange(16, dtype=torch.uint8))
    over = _over(ts[5].untyped_storage()[4:8])
    assert (_doubled(over) >> compute).tolist() == [8, 10, 12, 14]


@sky.function
def _doubled(t: torch.Tensor) -> torch.Tensor:
    return (t * 2).cpu()


@pytest.mark.parametrize("offset", [-1, -(1 << 40), 1 << 62])
def test_offsets_beyond_a_storage_reach_nothing(ts: list[torch.Tensor], offset: int) -> None:
    with pytest.raises(RuntimeError):
        torch.as_strided(ts[5], (4,), (1,), offset).fill_(0)
    with pytest.raises(RuntimeError):
        empty = torch.empty(0, dtype=torch.uint8, device=ts[5].device)
        empty.set_(ts[5].untyped_storage(), offset, (4,), (1,))
        torch.accelerator.synchronize(ts[5].device.index)
    assert not _changed(ts)


def test_storages_beyond_what_addresses_can_name_are_refused(device: torch.device) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="a tensor may have 2 TiB"):
        torch.empty(1 << 42, dtype=torch.uint8, device=device)


def test_a_storage_of_more_than_4_gib_is_sliced_as_any_other(device: torch.device) -> None:
    # Only the pages that are touched take memory.
    large = torch.empty((4 << 30) + 64, dtype=torch.uint8, device=device)
    other = torch.zeros(64, dtype=torch.uint8, device=device)
    end = large.untyped_storage()[4 << 30 :]
    end.fill_(7)
    assert large[4 << 30 :].tolist() == [7] * 64
    assert not other.any()
    assert large.data_ptr() != other.data_ptr()
    grown = torch.zeros(8, dtype=torch.uint8, device=device)
    grown.untyped_storage()[2:3].fill_(9)
    assert grown.tolist() == [0, 0, 9, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("size", [16, 1 << 20])
def test_a_slice_beyond_a_storage_that_shrank_is_an_error(device: torch.device, size: int) -> None:
    whole = torch.zeros(2 * size, dtype=torch.uint8, device=device)
    other = torch.zeros(2 * size, dtype=torch.uint8, device=device)
    over = _over(whole.untyped_storage()[size:])
    whole.untyped_storage().resize_(size)
    for use in (
        lambda: over.copy_(torch.ones(size, dtype=torch.uint8)),
        lambda: over.fill_(1),
        lambda: over.tolist(),
    ):
        with pytest.raises(sky.errors.DeviceError, match="storage of"):
            use()
            torch.accelerator.synchronize(device.index)
    assert not other.any()
