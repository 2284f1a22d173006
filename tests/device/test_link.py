"""A device whose connections are cut goes on as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import skyward as sky
from skyward.device import build
from skyward.device.core import core
from skyward.device.meeting import BACKLOGS
from skyward.errors import ProtocolError
from skyward.nodes import host
from skyward.nodes.host import Approach
from skyward.wire import native
from skyward.wire.handshake import GREETING_SECONDS, Dialer
from skyward.wire.link import backlog
from skyward.wire.link.backlog import Backlog
from skyward.wire.link.pair import Pair
from skyward.wire.messages import Hello, Welcome
from skyward.wire.native import SILENCE_SECONDS

from ..conftest import only_in_all, other_case
from .proxy import Proxy
from .test_defects import device_processes

MIB = 1 << 20
STEPS = 8
PATIENCE = 3.0


def pool(**options: float) -> sky.Compute:
    """A pool reached as over a network."""
    return sky.Compute(sky.Local(transport="tcp"), options=sky.Options(console=False, **options))


@pytest.fixture(scope="module")
def proxies() -> Iterator[list[Proxy]]:
    """One in front of each device, the latest last; the pools' own connections have none."""
    made: list[Proxy] = []

    def redirected(endpoint: str, hello: Hello, *rest: Any, **options: Any) -> Approach:
        if hello.role not in BACKLOGS:
            return Approach(endpoint, hello, *rest, **options)
        if endpoint not in [proxy.server for proxy in made]:
            made.append(Proxy(endpoint))
        proxy = next(proxy for proxy in made if proxy.server == endpoint)
        return Approach(proxy.endpoint, hello, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "Approach", redirected)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield made
    for proxy in made:
        proxy.close()


@pytest.fixture(scope="module")
def remote_and_proxy(proxies: list[Proxy], sharing) -> Iterator[tuple[torch.device, Proxy]]:
    with sharing(pool()) as compute:
        yield compute.device("cpu"), proxies[-1]


@pytest.fixture
def remote(remote_and_proxy: tuple[torch.device, Proxy]) -> torch.device:
    """A device behind a proxy."""
    return remote_and_proxy[0]


@pytest.fixture
def proxy(remote_and_proxy: tuple[torch.device, Proxy]) -> Proxy:
    """The proxy of that device."""
    return remote_and_proxy[1]


def train(device: torch.device) -> tuple[list[float], list[torch.Tensor]]:
    """A few steps with batches large enough to go over the connection for bulk."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(400, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    batches = [(torch.randn(64, 400), torch.randint(10, (64,))) for _ in range(STEPS)]
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(6)
    losses = []
    for step, (x, y) in enumerate(batches):
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 3 == 0:
            loss.item()
    return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("seed", range(3))
def test_losses_are_the_same_however_often_the_connection_is_cut(
    remote: torch.device, proxy: Proxy, seed: int
) -> None:
    choose = random.Random(seed)
    cuts = proxy.cuts
    # A reconnection is some 12 KB itself, and may be cut as well.
    proxy.cut_after(choose.randrange(2_000, 150_000) for _ in range(8))
    losses, parameters = train(remote)
    proxy.cut_after([])
    assert proxy.cuts - cuts >= 4
    right_losses, right_parameters = train(remote)
    assert losses == right_losses
    assert all(map(torch.equal, parameters, right_parameters))


@pytest.mark.parametrize("seed", range(3))
def test_large_copies_go_on_where_they_were_cut(
    remote: torch.device, proxy: Proxy, seed: int
) -> None:
    choose = random.Random(seed)
    host = torch.randn(32 * MIB // 4)

    def cutting(copy: Callable[[], torch.Tensor]) -> torch.Tensor:
        cuts = proxy.cuts
        proxy.cut_after([choose.randrange(30 * MIB), choose.randrange(MIB)])
        copied = copy()
        torch.sky.synchronize(remote)
        proxy.cut_after([])
        assert proxy.cuts > cuts
        return copied

    there = cutting(lambda: (host.pin_memory() if seed else host).to(remote, non_blocking=seed > 0))
    assert torch.equal(cutting(there.cpu), host)


def test_pinned_memory_is_not_given_out_again_while_it_is_sent(
    remote: torch.device, proxy: Proxy
) -> None:
    host = torch.arange(3 * MIB // 8)
    pinned = host.pin_memory()
    place = pinned.data_ptr()
    with proxy.hold(after=MIB // 2) as holds:
        there = pinned.to(remote, non_blocking=True)
        holds.wait()
        del pinned
        others = [torch.zeros_like(host).pin_memory() for _ in range(2)]
        assert place not in [other.data_ptr() for other in others]
    assert torch.equal(there.cpu(), host)


def test_ctrl_c_ends_a_download_halfway(remote: torch.device, proxy: Proxy) -> None:
    host = torch.arange(32 * MIB // 8)
    there = host.to(remote)
    torch.sky.synchronize(remote)

    def press(holds: threading.Event) -> None:
        holds.wait()
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(KeyboardInterrupt), proxy.hold(after=8 * MIB) as holds:
            thread.submit(press, holds)
            there.cpu()
    assert there[9].item() == 9
    assert torch.equal(there.cpu(), host)


def test_without_openssl_python_encrypts_for_the_cores(
    remote: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_core", native.LinkCore(build.library(build.LINK), []))
    with pool() as compute:
        device = compute.device("cpu")
        large = torch.arange(4 * MIB // 8)
        assert torch.equal(large.to(device).cpu(), large)
        assert train(device)[0] == train(remote)[0]
        relays = [each.name for each in threading.enumerate() if each.name == "skyward-tls"]
        assert len(relays) == 2 * len(BACKLOGS)


@only_in_all
def test_large_copies_in_both_directions_at_once_do_not_wait_for_each_other(
    remote: torch.device,
) -> None:
    # Each is more than a link sends ahead: the worker takes in one while it sends the other.
    size = 2 * sum(window for role, window in BACKLOGS.items() if "bulk" in role)
    first, second = (torch.randint(256, (size,), dtype=torch.uint8) for _ in range(2))
    there = first.to(remote)
    torch.sky.synchronize(remote)
    with ThreadPoolExecutor(1) as threads:

        def exchange() -> tuple[torch.Tensor, torch.Tensor]:
            down = there.to("cpu", non_blocking=True)
            up = second.to(remote, non_blocking=True)
            torch.sky.synchronize(remote)
            return down, up

        down, up = threads.submit(exchange).result(120)
    assert torch.equal(down, first)
    assert torch.equal(up.cpu(), second)


def test_a_link_that_falls_silent_is_made_anew(
    remote: torch.device, proxy: Proxy, eventually
) -> None:
    """Slow: the silence must outlast a few heartbeats of a second each."""
    x = torch.arange(8.0, device=remote) + 1
    assert x.sum().item() == 36.0
    connections = proxy.connections
    with proxy.hold():
        for _ in range(200):
            x = x + 1
        eventually(lambda: proxy.connections > connections, 30, "another connection")
    assert x.sum().item() == 36.0 + 8 * 200


@only_in_all
def test_nothing_is_made_anew_while_the_worker_only_takes_its_time(
    remote: torch.device, proxy: Proxy
) -> None:
    """Slow: the worker must be busy for longer than a silence may be."""
    x = torch.randn(600, 600, device=remote)

    def once() -> float:
        started = time.monotonic()
        torch.linalg.qr(x)
        torch.sky.synchronize(remote)
        return time.monotonic() - started

    each = min(once() for _ in range(4))
    connections, started = proxy.connections, time.monotonic()
    for _ in range(int(1.5 * SILENCE_SECONDS / each)):
        torch.linalg.qr(x)
    # More than all that lies in between holds: the pumps of both ends have to wait.
    host = torch.randn(100 * MIB // 4)
    assert host.to(remote)[-1].item() == host[-1].item()
    assert time.monotonic() - started > SILENCE_SECONDS
    assert proxy.connections == connections


def test_a_stranger_with_the_pools_credentials_is_turned_away(
    remote: torch.device, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, eventually
) -> None:
    x = torch.ones(4, device=remote)
    dialers: list[Dialer] = []
    plain = Dialer._connect

    def overheard(dialer: Dialer, received: int, seconds: float) -> tuple[Pair, Welcome]:
        dialers.append(dialer)
        return plain(dialer, received, seconds)

    monkeypatch.setattr(Dialer, "_connect", overheard)
    proxy.cut()
    assert x.sum().item() == 4.0
    stranger = copy.copy(dialers[0])
    stranger._gone = "turned away"
    stranger._hello = msgspec.structs.replace(stranger._hello, session="another", attempt=0)
    with contextlib.closing(stranger.open()[0]) as channel:
        # Its connection is closed, and no other one is made for a session that has ended.
        eventually(lambda: channel.native_link.ended)
    assert (x + 1).sum().item() == 8.0


def use_until_gone(x: torch.Tensor) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{x.device}.* is gone"):
        while time.monotonic() - started < 60:
            for _ in range(100):
                x = x + 1
            x.sum().item()


def test_a_killed_process_is_noticed_within_seconds(
    proxies: list[Proxy], nothing_left: None
) -> None:
    with pool() as compute:
        device = compute.device("cpu")
        x = torch.ones(4, device=device)
        torch.sky.synchronize(device)
        (process,) = device_processes(compute)
        process.kill()
        use_until_gone(x)
        assert torch.ones(4, device=compute.device("cpu")).sum().item() == 4.0


@other_case
def test_a_killed_node_is_noticed_within_seconds(proxies: list[Proxy], nothing_left: None) -> None:
    with pool() as compute:
        device = compute.device("cpu")
        x = torch.ones(4, device=device)
        torch.sky.synchronize(device)
        psutil.Process(compute._open_fleet.nodes[0].host.agent_pid).kill()
        use_until_gone(x)


def test_a_node_killed_while_it_opens_a_device_is_noticed_within_seconds(
    eventually, nothing_left: None
) -> None:
    with pool() as compute, ThreadPoolExecutor(1) as threads:
        opening = threads.submit(compute.device, "cpu")
        eventually(lambda: compute._open_fleet.devices._waiting)
        psutil.Process(compute._open_fleet.nodes[0].host.agent_pid).kill()
        with pytest.raises(sky.SkywardError, match="node 0 was lost: its agent is gone"):
            opening.result(100)


@only_in_all
def test_giving_up_wakes_who_waits_and_says_why(
    proxies: list[Proxy], eventually, nothing_left: None
) -> None:
    """Slow: the client must lose its patience first, which agents share and so is no less."""
    with pool(orphan_timeout=PATIENCE) as compute:
        device = compute.device("cpu")
        x = torch.ones(4, device=device)
        torch.sky.synchronize(device)
        (process,) = device_processes(compute)
        why = rf"{device} .*is gone: .*lost.* within {PATIENCE:g} s"
        proxies[-1].refusing = True
        try:
            proxies[-1].cut()
            started = time.monotonic()
            with pytest.raises(RuntimeError, match=why):
                x.sum().item()
            assert time.monotonic() - started > PATIENCE - 1
            eventually(lambda: device.index not in core().open_devices, 30, "its end")
        finally:
            proxies[-1].refusing = False
        with pytest.raises(RuntimeError, match=why):
            x + 1
        eventually(lambda: not process.is_running(), 30, "the end of its process")
        assert torch.ones(4, device=compute.device("cpu")).sum().item() == 4.0


@only_in_all
def test_a_process_whose_client_stays_away_ends(
    proxies: list[Proxy], eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: the worker must lose its patience."""
    with pool(orphan_timeout=PATIENCE) as compute:
        torch.sky.synchronize(compute.device("cpu"))
        (process,) = device_processes(compute)
        waiting, plain = threading.Event(), Dialer._connect

        def late(dialer: Dialer, received: int, seconds: float) -> tuple[Pair, Welcome]:
            waiting.wait()
            return plain(dialer, received, seconds)

        monkeypatch.setattr(Dialer, "_connect", late)
        proxies[-1].cut()
        eventually(lambda: not process.is_running(), 30, "its end")
        waiting.set()


@pytest.mark.parametrize("broken", [False, True])
def test_closing_a_pool_leaves_no_link(proxies: list[Proxy], eventually, broken: bool) -> None:
    before = set(native.living())

    def left() -> set[int]:
        return set(native.living()) - before

    with pool() as compute:
        device = compute.device("cpu")
        assert torch.ones(4, device=device).sum().item() == 4.0
        assert left()
        proxies[-1].refusing = broken
        if broken:
            proxies[-1].cut()
        started = time.monotonic()
    proxies[-1].refusing = False
    assert time.monotonic() - started < 60
    eventually(lambda: not left(), 4 * GREETING_SECONDS, f"the end of {left()}")


@given(st.integers(0, 1 << 32))
def test_a_backlog_gives_back_what_was_not_acknowledged(seed: int) -> None:
    choose = random.Random(seed)
    stream = choose.randbytes(5000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backlog, "CHUNK", 64)
        kept, taken, acknowledged, arrived = Backlog(), 0, 0, b""
        while len(arrived) < len(stream):
            if kept.held < 1000 and taken < len(stream):
                room = kept.room()[: len(stream) - taken]
                count = choose.randint(1, len(room))
                room[:count] = stream[taken : taken + count]
                kept.filled(count)
                taken += count
            match choose.choice(["send", "send", "send", "count", "break"]):
                case "send":
                    part = kept.unsent()
                    part = part[: choose.randint(0, len(part))]
                    arrived += part
                    kept.sent(len(part))
                case "count":
                    acknowledged = choose.randint(acknowledged, len(arrived))
                    kept.acknowledge(acknowledged)
                case "break":
                    # What was on its way is lost.
                    acknowledged = choose.randint(acknowledged, len(arrived))
                    arrived = arrived[:acknowledged]
                    kept.resume(acknowledged)
            assert taken - acknowledged < 1000 + 64
        assert arrived == stream


def test_what_is_counted_before_its_write_returned_is_kept_until_then() -> None:
    kept = Backlog()
    kept.add(b"written")
    kept.acknowledge(7)
    assert kept.unsent() == b"written"
    assert kept.held == 7
    kept.sent(7)
    kept.acknowledge(7)
    assert kept.held == 0


def test_a_count_that_cannot_be_is_refused() -> None:
    kept = Backlog()
    kept.filled(len(kept.room()[:10]))
    kept.sent(10)
    kept.acknowledge(5)
    for impossible in (4, 11):
        with pytest.raises(ProtocolError, match=f"has {impossible} bytes"):
            kept.acknowledge(impossible)
