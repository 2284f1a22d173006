"""Objects: whatever nests, refers to itself or is large arrives as it was."""

from __future__ import annotations

import builtins
import dataclasses
import datetime
import enum
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.objects import encoding, memory, payloads
from skyward.objects.exceptions import PortableException
from skyward.wire.messages import Buffer

Trip = Callable[..., Any]

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=20,
)


@given(value=plain)
@settings(max_examples=100)
def test_plain_data_arrives_equal(trip: Trip, value: Any) -> None:
    assert trip(value) == value
    assert trip([value, {"again": value}]) == [value, {"again": value}]


@given(args=st.lists(plain, max_size=3), kwargs=st.dictionaries(st.text(), plain, max_size=2))
@settings(max_examples=50)
def test_a_call_travels_as_its_arguments(
    trip: Trip, args: list[Any], kwargs: dict[str, Any]
) -> None:
    call = encoding.Arguments("f", ("a", "b"), tuple(args), kwargs)
    assert trip(call) == (tuple(args), kwargs)


def test_an_object_that_contains_itself(trip: Trip) -> None:
    value: list[Any] = [np.arange(3)]
    value.append({"self": value})
    got = trip(value)
    assert got[1]["self"] is got


@given(size=st.integers(100_000, 400_000))
@settings(max_examples=10)
def test_large_bytes_are_kept_as_they_are_and_not_copied(trip: Trip, size: int) -> None:
    large = os.urandom(size)
    for value in (large, [large], {"deep": ([large],)}):
        assert any(piece is large for piece in encoding.encode(value).pieces)
        assert trip(value) == value
    call = encoding.Arguments("f", ("a",), (large,), {})
    assert any(piece is large for piece in encoding.encode(call).pieces)


def test_a_large_bytearray_is_sent_as_it_was_when_encoded() -> None:
    data = bytearray(200_000)
    encoded = encoding.encode([data])
    data[:] = b"x" * 300_000
    (got,) = encoding.decode(b"".join(encoded.pieces))
    assert got == bytes(200_000)


def test_tensors_arrays_and_bytes_in_one_object_each_find_their_own_buffer(trip: Trip) -> None:
    value = {
        "array": np.arange(5),
        "tensor": torch.arange(5),
        "nested": [np.ones((2, 2)), {"t": torch.ones(2, 2), "b": bytearray(b"xyz")}],
        "model": torch.nn.Linear(2, 2),
        "empty": [np.empty(0), torch.empty(0), b""],
    }
    got = trip(value)
    assert got["array"].tolist() == got["tensor"].tolist() == [0, 1, 2, 3, 4]
    assert got["nested"][0].tolist() == got["nested"][1]["t"].tolist() == [[1, 1], [1, 1]]
    assert got["nested"][1]["b"] == b"xyz"
    assert torch.equal(got["model"].weight, value["model"].weight)


Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    when: datetime.datetime
    points: tuple[Point, ...]
    colour: Colour


def test_types_of_the_standard_library_and_of_users(trip: Trip) -> None:
    record = Record(datetime.datetime(2024, 1, 2), (Point(1, 2), Point(3, 4)), Colour.BLUE)
    for own in (False, True):
        got = trip(
            [record, OrderedDict(a=1), Counter("aab"), range(5), slice(1, 2)], own_modules=own
        )
        assert got[0] == record
        assert got[0].colour is Colour.BLUE
        assert got[1:] == [OrderedDict(a=1), Counter("aab"), range(5), slice(1, 2)]


def test_an_exception_keeps_its_type_arguments_and_chain(trip: Trip) -> None:
    problem = KeyError("missing", 7)
    problem.extra = [1, 2]  # type: ignore[attr-defined]
    cause = PortableException.of(ValueError("the cause"), {})
    got = trip(PortableException.of(problem, {"__cause__": cause})).rebuild()
    assert (type(got), got.args, got.extra) == (KeyError, ("missing", 7), [1, 2])
    assert repr(got.__cause__) == "ValueError('the cause')"


def test_functions_classes_and_closures_arrive_working(trip: Trip) -> None:
    factor = 3

    def scaled(x: int, *, plus: int = 1) -> int:
        return x * factor + plus

    got = trip([scaled, lambda x: x + 1, len, os.path.join, np.mean, torch.relu], own_modules=True)
    assert got[0](5) == 16
    assert got[1](1) == 2
    assert got[2:] == [len, os.path.join, np.mean, torch.relu]


def test_torch_is_not_imported_to_send_plain_data() -> None:
    code = (
        "import sys; from skyward.objects import encoding, memory;"
        "encoding.decode(b''.join(encoding.encode({'a': [1, b'x']}).pieces));"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(sizes=st.lists(st.sampled_from([0, 10, 5000, memory.BLOB_MIN, 300_000]), max_size=6))
@settings(max_examples=25)
def test_large_buffers_are_placed_elsewhere_and_found_again(sizes: list[int]) -> None:
    arrays = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    elsewhere: list[bytearray] = []

    def large(buffers: list[memoryview]) -> list[Buffer]:
        elsewhere.extend(map(bytearray, buffers))
        return [Buffer(len(b), 3, b"%d" % i) for i, b in enumerate(buffers)]

    packed = payloads.pack(encoding.encode(arrays), large)
    assert [len(one) for one in elsewhere] == [s for s in sizes if s >= memory.BLOB_MIN]
    body = bytearray().join(packed.body)
    pieces = payloads.unpack(
        packed.payload, body, lambda ref: memoryview(elsewhere[int(ref.digest)])
    )
    got = encoding.decode(*pieces)
    assert all(np.array_equal(a, b) for a, b in zip(got, arrays, strict=True))


def test_what_cannot_travel_is_named_with_the_path_to_it() -> None:
    import threading

    from skyward.errors import SerializationError

    with pytest.raises(
        SerializationError, match=r"\['a'\]\[1\].*cannot be sent: <unlocked _thread"
    ):
        encoding.encode({"a": [1, threading.Lock()]})
    call = encoding.Arguments("train", ("data",), ({"x": threading.Lock()},), {})
    with pytest.raises(SerializationError, match=r"argument 'data' of train at \['x'\]"):
        encoding.encode(call)


def test_encoding_keeps_no_reference_to_the_object() -> None:
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    gc.disable()
    try:
        encoding.encode([tensor, np.ones(3)])
        del tensor
        assert gone() is None
    finally:
        gc.enable()


MADE_WITH = {
    UnicodeDecodeError: ("utf-8", b"\xff", 0, 1, "bad"),
    UnicodeEncodeError: ("ascii", "\xff", 0, 1, "bad"),
    UnicodeTranslateError: ("\xff", 0, 1, "bad"),
    SyntaxError: ("bad", ("file.py", 3, 4, "text", 5, 6)),
    OSError: (2, "not there", "/here", None, "/there"),
    BlockingIOError: (11, "later", 5),
    BaseExceptionGroup: ("several", [ValueError(1), KeyError(2)]),
}


def builtin_exceptions() -> list[type[BaseException]]:
    found = [value for value in vars(builtins).values() if isinstance(value, type)]
    return [kind for kind in found if issubclass(kind, BaseException)]


@pytest.mark.parametrize("builtin", builtin_exceptions())
def test_an_exception_arrives_as_it_was_without_a_call_of_its_class(
    trip: Trip, builtin: type[BaseException]
) -> None:
    class Slotted(builtin):  # type: ignore[misc, valid-type]
        __slots__ = ("slot",)

    class Derived(Slotted):
        def __new__(cls, *, detail: Any, given: tuple[Any, ...]) -> Any:
            return super().__new__(cls, *given)

        def __init__(self, *, detail: Any, given: tuple[Any, ...]) -> None:
            super().__init__(*given)
            self.detail, self.slot = detail, "slot"

    likely = [found for found in MADE_WITH if issubclass(builtin, found)]
    given = MADE_WITH[likely[-1]] if likely else ("why", 7)
    if issubclass(builtin, ExceptionGroup):
        given = MADE_WITH[BaseExceptionGroup]
    problem: Any = Derived(detail=[1], given=given)
    problem.add_note("a note")

    for sent in (problem, builtin(*given)):
        came = trip(sent)
        assert type(came) is type(sent)
        assert (str(came), repr(came)) == (str(sent), repr(sent))
        assert repr(came.args) == repr(sent.args)
        assert vars(came) == vars(sent)
        for name in dir(sent):
            if not name.startswith("__") and not callable(getattr(sent, name, len)):
                assert repr(getattr(came, name)) == repr(getattr(sent, name)), name


def test_an_exception_with_a_way_of_its_own_to_be_pickled_is_pickled_so(trip: Trip) -> None:
    class Careful(Exception):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code, self.lock = code, threading.Lock()

        def __reduce__(self) -> tuple[Any, ...]:
            return type(self), (self.code,)

    came = trip(Careful(7))

    assert (type(came), came.args, came.code) == (Careful, ("code 7",), 7)


def test_an_exception_may_refer_to_itself(trip: Trip) -> None:
    class Ring(Exception):
        def __init__(self) -> None:
            self.me = self

    came = trip(Ring())

    assert came.me is came
