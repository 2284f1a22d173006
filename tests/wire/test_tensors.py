"""Tensors: values, layout and aliasing arrive; what is not needed stays behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from skyward.objects import encoding

from ..conftest import other_case

Trip = Callable[..., Any]

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
sizes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bit pattern, NaNs and all."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().resolve_conj().resolve_neg().reshape(-1))
    return bytes(flat.view(torch.uint8).tolist())


def assert_same(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(got) is type(sent)
    assert (got.dtype, got.shape, got.stride()) == (sent.dtype, sent.shape, sent.stride())
    assert got.requires_grad == sent.requires_grad
    assert raw_bytes(got) == raw_bytes(sent)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(shape=sizes)
@settings(max_examples=15)
def test_every_dtype_and_shape_keeps_its_bits(
    trip: Trip, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = random_bits(dtype, shape)
    assert_same(trip(tensor), tensor)


@given(data=st.data())
@settings(max_examples=60)
def test_any_view_keeps_its_layout_and_values(trip: Trip, data: st.DataObject) -> None:
    base = torch.randn(5, 6, 7)
    view = base.permute(data.draw(st.permutations(range(3))))
    for axis in range(3):
        start = data.draw(st.integers(0, view.shape[axis]))
        step = data.draw(st.integers(1, 3))
        view = view[(slice(None),) * axis + (slice(start, None, step),)]
    assert_same(trip(view), view)


def test_zero_dimensions_zero_sizes_and_single_values(trip: Trip) -> None:
    for tensor in (
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.empty(0)[:0],
        torch.arange(10)[4],
        torch.arange(10)[10:],
    ):
        assert_same(trip(tensor), tensor)


def test_an_expanded_tensor_stays_expanded_and_travels_once(trip: Trip) -> None:
    tensor = torch.tensor([[1.0], [2.0]]).expand(2, 100_000)
    assert encoding.encode(tensor).size < 2000
    got = trip(tensor)
    assert_same(got, tensor)
    assert got.stride() == (1, 0)


def test_channels_last_stays_channels_last(trip: Trip) -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    got = trip(images)
    assert_same(got, images)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_conjugate_and_negative_views_arrive_as_their_values(trip: Trip) -> None:
    numbers = torch.randn(4, 3, dtype=torch.complex64)
    lazy = numbers.conj()
    assert lazy.is_conj()
    assert torch.equal(trip(lazy).resolve_conj(), lazy.resolve_conj())
    negative = lazy.imag
    assert negative.is_neg()
    assert torch.equal(trip(negative), negative.resolve_neg())
    plain, conjugate = trip([numbers, lazy])
    assert torch.equal(plain.conj(), conjugate)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_tensors_survive(trip: Trip) -> None:
    dense = torch.zeros(4, 5)
    dense[1, 2], dense[3, 0] = 2.5, -1.0
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        got = trip(sparse)
        assert got.layout == sparse.layout
        assert torch.equal(got.to_dense(), dense)


@given(data=st.data())
@settings(max_examples=30)
def test_shared_storage_stays_shared(trip: Trip, data: st.DataObject) -> None:
    base = torch.zeros(64)
    bounds = st.tuples(st.integers(0, 63), st.integers(1, 64)).filter(lambda b: b[0] < b[1])
    ranges = data.draw(st.lists(bounds, min_size=1, max_size=5))
    views = [base[start:end] for start, end in ranges]
    got = trip({"views": views, "whole": base})
    for number, view in enumerate(got["views"]):
        view += number + 1
    for number, view in enumerate(views):
        view += number + 1
    assert torch.equal(got["whole"], base)
    assert all(torch.equal(a, b) for a, b in zip(got["views"], views, strict=True))


def test_views_of_another_dtype_share_too(trip: Trip) -> None:
    floats = torch.zeros(8)
    got, as_ints = trip([floats[2:], floats.view(torch.int32)])
    as_ints[2] = torch.tensor(1.0).view(torch.int32)
    assert got[0] == 1.0
    longs = torch.arange(10)
    narrow, wide = trip([longs.view(torch.int32)[1:], longs[1:]])
    assert wide.tolist() == list(range(1, 10))
    narrow[1] = 50
    assert wide[0] == 50


def test_what_arrives_is_not_what_was_sent(trip: Trip) -> None:
    tensor = torch.zeros(3)
    got = trip(tensor)
    got += 1
    assert torch.equal(tensor, torch.zeros(3))


def test_only_the_covered_part_of_a_storage_travels(trip: Trip) -> None:
    big = torch.arange(1_000_000, dtype=torch.float32)
    rows = big.view(1000, 1000)
    for view in (big[500_000:500_100], big[-1], rows[3], rows[990:, :5]):
        assert encoding.encode(view).size < 50_000
        assert_same(trip(view), view)
    together = [big[1000:1100], big[3000:3100]]
    assert encoding.encode(together).size < 10_000
    assert [t.tolist() for t in trip(together)] == [t.tolist() for t in together]


def test_gradients_are_wanted_where_they_were(trip: Trip) -> None:
    leaf = torch.randn(3, requires_grad=True)
    derived = leaf * 2
    got_leaf, got_derived, got_plain = trip([leaf, derived, leaf.detach()])
    assert got_leaf.requires_grad
    assert got_derived.requires_grad
    assert not got_plain.requires_grad
    assert got_derived.is_leaf
    got_leaf.sum().backward()
    assert torch.equal(got_leaf.grad, torch.ones(3))


def test_parameters_stay_parameters(trip: Trip) -> None:
    trained, frozen = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.ones(2), False)
    got_trained, got_frozen = trip([trained, frozen])
    assert_same(got_trained, trained)
    assert_same(got_frozen, frozen)


def test_attributes_on_tensors_and_parameters_survive(trip: Trip) -> None:
    tensor, parameter = torch.zeros(2), nn.Parameter(torch.zeros(2))
    tensor.label, parameter.group = {"kind": "input"}, ["decay"]  # type: ignore[attr-defined]
    got_tensor, got_parameter = trip([tensor, parameter])
    assert got_tensor.label == {"kind": "input"}
    assert got_parameter.group == ["decay"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("top", self.embed.weight.detach()[:5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def test_a_module_arrives_whole_with_tied_weights_tied(trip: Trip) -> None:
    model = Tied().eval()
    got = trip(model)
    x = torch.arange(10)
    assert torch.equal(got(x), model(x))
    assert not got.training
    assert got.head.weight is got.embed.weight
    assert got.top.data_ptr() == got.embed.weight.data_ptr()
    assert len(list(got.parameters())) == len(list(model.parameters()))


@other_case
def test_an_optimizer_still_steps_its_own_model(trip: Trip) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    got_model, got_optimizer = trip([model, optimizer])
    for pair in ((model, optimizer), (got_model, got_optimizer)):
        pair[1].zero_grad()
        pair[0](torch.ones(3)).sum().backward()
        pair[1].step()
    assert torch.equal(got_model.weight, model.weight)


def test_a_subclass_of_tensor_is_left_to_torch(trip: Trip) -> None:
    class Marked(torch.Tensor):
        pass

    sent = torch.arange(4.0).as_subclass(Marked)
    got = trip(sent)
    assert isinstance(got, Marked)
    assert got.tolist() == [0, 1, 2, 3]


def test_a_tensor_can_be_sent_twice_and_copied_afterwards(trip: Trip) -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    again = trip(trip(tensor))
    assert_same(again, tensor)
    assert torch.equal(copy.deepcopy(again), tensor)


def test_contents_are_referred_to_and_not_copied() -> None:
    tensor = torch.zeros(100_000)
    encoded = encoding.encode({"x": tensor})
    assert encoded.pickle_length < 1000
    (buffer,) = encoded.buffers
    tensor[7] = 1.0
    assert memoryview(buffer).cast("f")[7] == 1.0
    assert encoded.storages == [(0, 400_000)]


def test_a_pickle_of_ours_cannot_be_loaded_by_accident() -> None:
    import pickle

    from skyward.errors import SerializationError

    encoded = encoding.encode(torch.zeros(3))
    with pytest.raises(SerializationError, match="outside of a Skyward payload"):
        pickle.loads(b"".join(encoded.pieces))
