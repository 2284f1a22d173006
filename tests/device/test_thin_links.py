"""Over a thin link: few questions to the worker, and what repeats goes as a reference."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import skyward as sky
from skyward.device import build, remembered
from skyward.device.core import core
from skyward.wire.link.pair import TLS_OVERHEAD, TLS_RECORD

from ..conftest import Eventually, only_in_all, other_case
from .comparison import moved
from .test_defects import device_processes

WORDS = 50


class Block(nn.Module):
    """A block of a transformer: causal attention, and dropout as in BERT."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        parts = self.project(self.norm1(x)).chunk(3, -1)
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts]
        seen = scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Language(nn.Module):
    """A small language model."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(512, 16)
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(2))
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x, mask)
        return cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def trainer(device: torch.device, *, dropout: float = 0.0) -> Callable[..., torch.Tensor]:
    """A training step on given words."""
    torch.manual_seed(0)
    model = Language(dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(words: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(words, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def asked(device: torch.device) -> int:
    return sky.device_stats(device).asked


# Questions.


@only_in_all
def test_two_hundred_lengths_of_a_gpt_ask_the_worker_at_most_fifty_times(
    device: torch.device,
) -> None:
    step, before = trainer(device), asked(device)
    for length in range(2, 202):
        loss = step(torch.randint(0, WORDS, (2, length)).to(device))
    assert loss.isfinite()
    assert asked(device) - before <= 50


def test_lengths_of_a_masked_model_with_dropout_hardly_ask_either(device: torch.device) -> None:
    step, before = trainer(device, dropout=0.1), asked(device)
    for length in range(2, 42):
        words = torch.randint(0, WORDS, (2, length))
        mask = (torch.arange(length) < length // 2 + 1).expand(2, 1, length, length)
        loss = step(words.to(device), mask.to(device))
    assert loss.isfinite()
    assert asked(device) - before <= 20


def test_a_step_gives_the_same_losses_as_on_the_cpu(device: torch.device) -> None:
    words = torch.randint(0, WORDS, (3, 17))
    ours, theirs = trainer(device), trainer(torch.device("cpu"))
    for _ in range(3):
        assert ours(words.to(device)).item() == pytest.approx(theirs(words).item(), rel=1e-5)


def _layers() -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    yield "linear", nn.Linear(6, 4), (3, 6)
    yield "layer norm", nn.LayerNorm(6), (2, 3, 6)
    yield "layer norm over two axes", nn.LayerNorm((3, 6)), (2, 3, 6)
    yield "layer norm without weights", nn.LayerNorm(6, elementwise_affine=False), (2, 6)
    yield "group norm", nn.GroupNorm(2, 4), (2, 4, 5)
    yield "batch norm", nn.BatchNorm1d(4), (3, 4, 5)
    yield "batch norm in use", nn.BatchNorm2d(4).eval(), (3, 4, 5, 5)
    yield "convolution", nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9, 9)
    yield "convolution along a line", nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 9)
    yield "transposed convolution", nn.ConvTranspose2d(4, 2, 2, stride=2), (2, 4, 5, 5)
    yield "pooling", nn.AvgPool2d(2), (2, 4, 6, 6)
    yield "nearest", nn.Upsample(scale_factor=2), (2, 4, 3, 3)
    yield "bilinear", nn.Upsample(scale_factor=2, mode="bilinear"), (2, 4, 3, 3)
    yield "dropout", nn.Dropout(0.5), (4, 6)


@pytest.mark.parametrize(
    ("layer", "sizes"), [pytest.param(m, s, id=name) for name, m, s in _layers()]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_layer_has_the_sizes_and_strides_that_the_worker_finds(
    layer: nn.Module, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    for permuted in (False, True):
        x = torch.randn(sizes, dtype=dtype)
        if permuted:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        results = []
        for place in (torch.device("cpu"), device):
            made = copy.deepcopy(layer).to(place, dtype)
            given = moved(x, place).requires_grad_()
            out = made(given)
            out.sum().backward()
            grads = [p.grad for p in made.parameters()]
            results.append([out, given.grad, *grads])
        for theirs, ours in zip(*results, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (
                theirs.shape,
                theirs.stride(),
                theirs.dtype,
            )
            assert ours.cpu().shape == theirs.shape  # raises what the worker found to differ


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_a_rule_is_not_sure_of_is_asked_for_until_the_worker_has_confirmed_it(
    format: torch.memory_format, device: torch.device
) -> None:
    layer = nn.ConvTranspose2d(3, 5, 2, stride=2).to(memory_format=format)
    there = copy.deepcopy(layer).to(device)
    for side in range(3, 15):
        before = asked(device)
        x = torch.randn(2, 3, side, side).contiguous(memory_format=format)
        given = moved(x, device)
        ours, theirs = there(given), layer(x)
        ours.sum().backward()
        theirs.sum().backward()
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.cpu(), theirs)
    assert asked(device) == before
    for mine, right in zip(there.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), right.grad, rtol=1e-4, atol=1e-3)


@only_in_all
def test_very_many_shapes_do_not_fill_the_memory_of_either_end(device: torch.device) -> None:
    whole = torch.arange(200.0 * 200.0).reshape(200, 200)
    there = whole.to(device)
    first = there[:3, :3] + 1
    before = asked(device)
    # More shapes than templates are kept: the numbers of old ones are given to new ones.
    for rows in range(1, 191):
        for columns in range(1, 191):
            last = there[:rows, :columns] + 1
    again = there[:3, :3] + 1
    assert torch.equal(last.cpu(), whole[:190, :190] + 1)
    assert torch.equal(again.cpu(), first.cpu())
    assert asked(device) == before


# Coding.


def encode(raw: bytes, *, anew: bool) -> bytes:
    coded, size = ctypes.c_void_p(), ctypes.c_uint64()
    core()._call(
        "sky_probe_encode",
        int(anew),
        raw,
        ctypes.c_uint64(len(raw)),
        ctypes.byref(coded),
        ctypes.byref(size),
    )
    return ctypes.string_at(coded, size.value)


def decode(coded: bytes, room: int, *, anew: bool) -> bytes:
    into, count = ctypes.create_string_buffer(room), ctypes.c_uint64()
    core()._call(
        "sky_probe_decode",
        int(anew),
        coded,
        ctypes.c_uint64(len(coded)),
        into,
        ctypes.c_uint64(room),
        ctypes.byref(count),
    )
    return into.raw[: count.value]


def decoded(coded: bytes, pieces: int, room: int) -> bytes:
    """All of it, when it arrives in pieces and is taken up to `room` bytes at a time."""
    made = [decode(b"", 0, anew=True)]
    for at in range(0, len(coded), pieces):
        made.append(decode(coded[at : at + pieces], room, anew=False))
        while made[-1]:
            made.append(decode(b"", room, anew=False))
    return b"".join(made)


PARTS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=60), st.integers(1, 20)), min_size=1, max_size=12
)


@given(parts=PARTS, pieces=st.integers(1, 100), room=st.integers(1, 300))
def test_coded_bytes_come_back_the_same(
    parts: list[tuple[bytes, int]], pieces: int, room: int
) -> None:
    flushes = [part * times for part, times in parts]
    flushes += flushes[::-1]
    coded = b"".join(encode(raw, anew=number == 0) for number, raw in enumerate(flushes))
    assert decoded(coded, pieces, room) == b"".join(flushes)


def test_long_streams_come_back_the_same_after_the_history_is_full() -> None:
    choose = torch.Generator().manual_seed(0)
    step = bytes(torch.randint(0, 256, (300_000,), generator=choose).tolist())
    decode(b"", 0, anew=True)
    for number in range(20):
        raw = step if number % 7 else step[: 50_000 * number] + bytes([number]) * 70_000
        coded = encode(raw, anew=number == 0)
        room = len(raw) + 1
        assert decode(coded, room, anew=False) == raw
        if number % 7 > 1:
            assert len(coded) < 50


def test_a_few_changed_bytes_cost_a_few_bytes() -> None:
    step = bytearray(range(256)) * 64
    encode(bytes(step), anew=True)
    encode(bytes(step), anew=False)
    step[5000:5008] = b"12345678"
    assert len(encode(bytes(step), anew=False)) < 40


@given(st.binary(max_size=200))
def test_any_bytes_are_either_decoded_or_refused(garbage: bytes) -> None:
    decode(b"\x10abcd", 10, anew=True)
    with contextlib.suppress(sky.errors.DeviceError):
        while made := decode(garbage, 1 << 16, anew=False):
            assert len(made) <= 1 << 16
            garbage = b""


@pytest.mark.parametrize(
    ("coded", "reason"),
    [
        (b"\x03", "unknown kind"),
        (b"\x00", "unknown kind or length"),
        (b"\x21\x05", "a reference to what was not sent"),
        (b"\x22", "a reference to what was not sent"),
        (b"\xff" * 8, "too many bytes"),
    ],
)
def test_what_is_no_coding_is_refused_with_the_reason(coded: bytes, reason: str) -> None:
    with pytest.raises(sky.errors.DeviceError, match=reason):
        decode(coded, 100, anew=True)


# A device over a network.


@pytest.fixture(scope="module")
def far(sharing) -> Iterator[tuple[sky.Compute, torch.device]]:
    """A device reached as over a network."""
    remote = sky.Compute(sky.Local(transport="tcp"), options=sky.Options(console=False))
    with sharing(remote) as compute:
        yield compute, compute.device("cpu")


def test_a_repeating_step_costs_at_most_150_bytes_on_the_wire(
    far: tuple[sky.Compute, torch.device], eventually: Eventually
) -> None:
    _, device = far
    step = trainer(device)
    words = torch.randint(0, WORDS, (2, 16)).to(device)

    def twenty() -> None:
        for _ in range(20):
            loss = step(words)
        loss.item()

    twenty()
    twenty()
    sent = []
    # On a busy machine the steps are slower, and what goes around them is sent more often.
    for _ in range(5):
        before = sky.device_stats(device)
        twenty()
        after = sky.device_stats(device)
        assert after.bytes_sent - before.bytes_sent > 20 * 3000
        coded = after.bytes_coded - before.bytes_coded
        assert coded < 20 * 50
        floor = before.bytes_on_wire + coded
        # A link counts a piece after it has sent it: the loss may be here before that.
        eventually(lambda floor=floor: sky.device_stats(device).bytes_on_wire > floor)
        sent.append(sky.device_stats(device).bytes_on_wire - before.bytes_on_wire)
    assert min(sent) <= 20 * 150


def test_bytes_on_the_wire_are_those_of_records_and_tensors_and_of_what_goes_around_them(
    far: tuple[sky.Compute, torch.device], device: torch.device, eventually: Eventually
) -> None:
    _, there = far
    size = 1 << 20

    def bytes_of_an_upload() -> int:
        before = sky.device_stats(there).bytes_on_wire
        torch.zeros(size, dtype=torch.uint8).to(there)
        torch.sky.synchronize(there)

        def sent() -> int:
            return sky.device_stats(there).bytes_on_wire - before

        # A link counts a piece after it has sent it: the answer may be here before that.
        eventually(lambda: sent() > size * (1 + TLS_OVERHEAD / TLS_RECORD))
        return sent()

    # The least of several: a machine that stalls for seconds resumes its links, and sends again.
    assert min(bytes_of_an_upload() for _ in range(3)) < size * 1.01
    assert sky.device_stats(device).bytes_on_wire == 0


@only_in_all
def test_the_client_runs_ahead_of_the_worker_only_so_far(
    far: tuple[sky.Compute, torch.device], eventually: Eventually
) -> None:
    compute, device = far
    x = torch.ones(4, device=device)
    (x + 1).sum().item()
    (worker,) = device_processes(compute)
    started, done = sky.device_stats(device).bytes_sent, threading.Event()

    def issue() -> None:
        y = x
        for _ in range(600_000):
            y = x + 1
        y.sum().item()
        done.set()

    def issued() -> int:
        return sky.device_stats(device).bytes_sent - started

    def rests() -> bool:
        before = issued()
        return not done.wait(1) and issued() == before

    thread = threading.Thread(target=issue, daemon=True)
    worker.send_signal(signal.SIGSTOP)
    try:
        thread.start()
        eventually(lambda: issued() > 4 << 20, 60, "4 MiB of operations")
        eventually(rests, 60, "the end of running ahead")
        assert issued() < 12 << 20
    finally:
        worker.send_signal(signal.SIGCONT)
    assert done.wait(60)
    thread.join()


# Answers on disk.


def odd(device: torch.device) -> torch.Tensor:
    """An operation whose result no rule tells."""
    x = torch.arange(12.0, device=device).reshape(3, 4)
    return torch.linalg.qr(x.T @ x[:, :3])[1]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of answers, empty."""
    monkeypatch.setattr(remembered, "folder", lambda: tmp_path / "shapes")
    return tmp_path / "shapes"


def test_a_second_session_over_a_network_asks_nothing_that_the_first_has_asked(
    answers: Path,
) -> None:
    counts, results = [], []
    for _ in range(2):
        remote = sky.Compute(sky.Local(transport="tcp"), options=sky.Options(console=False))
        with remote as compute:
            device = compute.device("cpu")
            results.append(odd(device).cpu())
            trainer(device)(torch.randint(0, WORDS, (2, 8)).to(device)).item()
            counts.append(asked(device))
    assert counts[0] >= 2
    assert counts[1] == 0
    assert torch.equal(*results)


@contextlib.contextmanager
def far_device() -> Iterator[torch.device]:
    """A new session over a network."""
    remote = sky.Compute(sky.Local(transport="tcp"), options=sky.Options(console=False))
    with remote as compute:
        yield compute.device("cpu")


@pytest.mark.parametrize("later", [pytest.param(False, marks=other_case), True])
def test_an_answer_that_is_not_right_is_an_error_once_and_then_the_worker_is_asked(
    answers: Path, later: bool
) -> None:
    with far_device() as device:
        right = odd(device).cpu()
        questions = asked(device)
    (file,) = answers.iterdir()
    three, two = (number.to_bytes(8, "little") for number in (3, 2))
    lies = b"".join(
        key + written[len(key) :].replace(three, two)
        for key, written in remembered._entries(remembered.read(file))
    )
    file.write_bytes(remembered._sealed(lies))
    with far_device() as device:
        with pytest.raises(
            sky.errors.DeviceError, match="another size than it had before"
        ) as caught:
            wrong = odd(device)
            if later:  # the error comes with the bytes
                wrong = wrong.to("cpu", non_blocking=True)
                torch.sky.synchronize(device)
            wrong.cpu()
        assert "asks the worker from now on: make the tensor again" in str(caught.value)
        for _ in range(2):
            assert torch.equal(odd(device).cpu(), right)
        assert asked(device) == questions
    assert not file.exists()


def test_the_tests_keep_their_answers_apart_from_the_users() -> None:
    assert not remembered.folder().is_relative_to(build.cache())


def test_answers_are_kept_apart_by_what_decides_which_kernels_run() -> None:
    usual = {"type": "cpu", "name": "one", "torch_version": "2.13"}
    others = (
        {"cuda_version": "13.0"},
        {"cudnn_version": 91000},
        {"instructions": "AVX512"},
        {"torch_version": "2.12"},
    )
    files = {remembered.file_for({**usual, **other}) for other in ({}, *others)}
    assert len(files) == 1 + len(others)


@pytest.mark.parametrize("content", [b"", b"garbage", remembered.MAGIC + bytes(100)])
def test_a_broken_file_of_answers_counts_as_empty_and_is_replaced(
    content: bytes, tmp_path: Path, answers: Path
) -> None:
    file = tmp_path / "shapes" / "one"
    file.parent.mkdir()
    file.write_bytes(content)
    assert remembered.read(file) == b""
    remembered.add(file, entry(b"key", b"answer"), True)
    assert remembered.read(file) == entry(b"key", b"answer")
    assert [path.name for path in answers.iterdir()] == ["one"]


def entry(key: bytes, answer: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in (key, answer))


def test_new_answers_replace_those_of_the_same_key_and_wrong_ones_remove_the_file(
    answers: Path,
) -> None:
    file = answers / "one"
    remembered.add(file, entry(b"a", b"1") + entry(b"b", b"2"), True)
    remembered.add(file, entry(b"a", b"3"), True)
    assert remembered.read(file) == entry(b"a", b"3") + entry(b"b", b"2")
    remembered.add(file, entry(b"c", b"4"), False)
    assert not file.exists()


def test_a_file_of_answers_is_bounded_and_keeps_the_newest(
    answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "BYTES_MAX", 1000)
    file = answers / "one"
    for number in range(100):
        remembered.add(file, entry(b"key %d" % number, bytes(20)), True)
    assert 800 < len(remembered.read(file)) <= 1000
    assert b"key 99" in remembered.read(file)
    assert b"key 1\x14" not in remembered.read(file)
