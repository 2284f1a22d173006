"""Arrays: every dtype, order and view arrives with its values, beside the pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from skyward.objects import encoding, payloads

Trip = Callable[..., Any]

dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(endianness="="),
    hnp.timedelta64_dtypes(endianness="="),
    hnp.byte_string_dtypes(max_len=5),
    hnp.unicode_string_dtypes(max_len=5),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


def same(got: np.ndarray[Any, Any], sent: np.ndarray[Any, Any]) -> bool:
    return got.dtype == sent.dtype and got.shape == sent.shape and got.tobytes() == sent.tobytes()


@given(array=hnp.arrays(dtypes, shapes))
@settings(max_examples=100)
def test_every_dtype_and_shape_keeps_its_values(trip: Trip, array: np.ndarray[Any, Any]) -> None:
    got = trip(array)
    assert same(got, array)
    assert got.flags.writeable


@given(array=hnp.arrays(np.int32, hnp.array_shapes(min_dims=2, max_dims=3, max_side=5)))
@settings(max_examples=25)
def test_the_order_in_memory_is_kept(trip: Trip, array: np.ndarray[Any, Any]) -> None:
    fortran = trip(np.asfortranarray(array))
    assert same(fortran, array)
    assert fortran.flags.f_contiguous
    assert trip(array).flags.c_contiguous


@given(array=hnp.arrays(np.float64, (6, 7, 3)), data=st.data())
@settings(max_examples=50)
def test_a_view_arrives_with_its_own_values(
    trip: Trip, array: np.ndarray[Any, Any], data: st.DataObject
) -> None:
    index = data.draw(hnp.basic_indices(array.shape, allow_newaxis=True))
    axes = data.draw(st.permutations(range(3)))
    for view in (array[index], array.transpose(axes), array[::-1, ::2], array[:, :0]):
        assert same(np.asarray(trip(view)), np.asarray(view))


def test_a_broadcast_view_arrives_whole(trip: Trip) -> None:
    assert same(trip(np.broadcast_to(np.float32(3), (4, 5))), np.full((4, 5), 3, np.float32))


def test_a_read_only_array_stays_read_only(trip: Trip) -> None:
    array = np.arange(10)
    array.flags.writeable = False
    got = trip(array)
    assert same(got, array)
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 1


def test_records_objects_and_masks_survive(trip: Trip) -> None:
    records = np.array([(1, 2.5, "a"), (2, 3.5, "b")], dtype="i4,f8,U3")
    assert same(trip(records), records)
    assert trip(np.array([{"a": 1}, None, [2]], dtype=object)).tolist() == [{"a": 1}, None, [2]]
    masked = np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])
    assert trip(masked).tolist() == [1, None, 3]


def test_an_array_met_twice_is_one_array(trip: Trip) -> None:
    array = np.arange(5)
    first, second = trip([array, array])
    assert first is second


def test_contents_are_referred_to_and_not_copied() -> None:
    array = np.zeros(100_000)
    encoded = encoding.encode({"x": array})
    assert encoded.pickle_length < 1000
    (buffer,) = encoded.buffers
    array[7] = 1.5
    assert np.frombuffer(buffer)[7] == 1.5


@given(lengths=st.lists(st.integers(0, 300), max_size=8))
@settings(max_examples=30)
def test_arrays_are_aligned_in_the_body(lengths: list[int]) -> None:

    arrays = [np.arange(length, dtype=np.uint8) for length in lengths]
    packed = payloads.pack(encoding.encode(arrays), None)
    assert all(ref.offset % 64 == 0 for ref in packed.payload.buffers)
    assert packed.payload.inline == sum(map(len, packed.body))
