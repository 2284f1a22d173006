"""Profiles: what they record, what they say, and PyTorch's own profilers on a sky device."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyward as sky

torch = pytest.importorskip("torch")

from skyward.device import breakdown  # noqa: E402
from skyward.device.recording import Kind, Operation, Recording, TimeSpan  # noqa: E402

from ..conftest import only_in_all  # noqa: E402
from .test_defects import device_processes  # noqa: E402

LARGE = 1 << 20


def steps(device: torch.device, count: int) -> None:
    """Upload, compute and read, `count` times: two operations each."""
    for _ in range(count):
        x = torch.ones(LARGE).to(device)
        (x * 2).sum().item()


@pytest.fixture(autouse=True)
def known_shapes(device: torch.device, other_device: torch.device) -> None:
    """The first time, an operation asks for the shape of its result."""
    steps(device, 1)
    steps(other_device, 1)


def exported(p: Any, tmp_path: Path) -> dict[str, Any]:
    p.export(tmp_path / "trace.json")
    trace: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    return trace


def tracks(trace: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The slices of a trace by the names of their process and track."""
    names: dict[tuple[str, int, int], str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"].endswith("_name"):
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            process = names["process_name", event["pid"], 0]
            found[process, names["thread_name", event["pid"], event["tid"]]].append(event)
    return found


def assert_ordered(recording: Recording) -> None:
    """Every operation was issued, then run, in the block; so were the waits."""
    error = recording.clock_error
    for o in recording.operations:
        assert recording.start <= o.issue_start <= o.issue_end <= recording.end
        assert o.issue_start - error <= o.run_start <= o.run_end <= recording.end + error
    for before, after in zip(recording.operations, recording.operations[1:], strict=False):
        assert before.run_end <= after.run_start
    for span in recording.spans:
        assert recording.start <= span.start <= span.end <= recording.end


def recording_of(p: Any) -> Recording:
    (recorded,) = p._recorded
    return recorded.recording


def test_a_trace_has_the_client_the_wire_and_the_worker_on_one_clock(
    device: torch.device, tmp_path: Path
) -> None:
    with sky.profile(device) as p:
        steps(device, 5)
    found = tracks(exported(p, tmp_path))
    worker = f"worker {device} (cpu of node 0)"
    issued = found["client", "issue (MainThread)"]
    assert [e["name"] for e in issued] == ["aten::mul.Tensor", "aten::sum"] * 5
    ran = [e for e in found[worker, "operations"] if e["name"].startswith("aten::")]
    assert [e["name"] for e in ran] == [e["name"] for e in issued]
    reads = found["client", "waits"]
    assert [e["name"] for e in reads] == ["read"] * 5 + ["wait for the end of the block"]
    uploads = found["client", "transfers"]
    assert [e["args"]["bytes"] for e in uploads] == [4 * LARGE] * 5
    assert sum(e["args"]["bytes"] for e in found["client", "wire"]) > 0
    for slices in found.values():
        assert all(event["dur"] >= 0 for event in slices)
    for (_, name), slices in found.items():
        if name != "operations":  # two lists, each in order
            assert slices == sorted(slices, key=lambda event: event["ts"])
    for issue, run, read in zip(issued[1::2], ran[1::2], reads, strict=False):
        assert issue["ts"] <= run["ts"] + 1
        assert run["ts"] + run["dur"] <= read["ts"] + read["dur"] + 1
    assert_ordered(recording_of(p))


def test_arrows_lead_from_the_issue_of_an_operation_to_its_run(
    device: torch.device, tmp_path: Path
) -> None:
    with sky.profile(device) as p:
        steps(device, 3)
    events = exported(p, tmp_path)["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == 6
    assert starts.keys() == ends.keys()
    assert all(starts[id]["pid"] != ends[id]["pid"] for id in starts)


def test_only_the_block_is_recorded(device: torch.device) -> None:
    steps(device, 3)
    with sky.profile(device) as first:
        pass
    steps(device, 3)
    with sky.profile(device) as second:
        steps(device, 1)
    assert recording_of(first).operations == []
    assert len(recording_of(second).operations) == 2


def test_a_block_ends_when_everything_issued_in_it_is_done(device: torch.device) -> None:
    x = torch.randn(500, 500, device=device)
    with sky.profile(device) as p:
        for _ in range(20):
            x = x @ x
    assert_ordered(recording_of(p))
    found = p.breakdown()
    assert found.worker_bound > found.client_bound
    assert found.reads == 0
    assert p.operations()[0].name == "aten::mm"
    assert p.operations()[0].count == 20


def test_asked_shapes_are_operations_too(device: torch.device) -> None:
    x = torch.tensor([0.0, 1.0, 2.0], device=device)
    with sky.profile(device) as p:
        assert x.nonzero().shape == (2, 1)
        x.sin()
    recording = recording_of(p)
    assert [recording.names[o.name] for o in recording.operations] == ["aten::nonzero", "aten::sin"]
    assert Kind.ASKING_SHAPE in [span.kind for span in recording.spans]
    assert_ordered(recording)


def test_two_devices_share_a_trace(
    device: torch.device, other_device: torch.device, tmp_path: Path
) -> None:
    with sky.profile(device, other_device) as p:
        steps(device, 2)
        steps(other_device, 3)
    found = tracks(exported(p, tmp_path))
    assert len(found["client", "issue (MainThread)"]) == 10
    for each, count in ((device, 4), (other_device, 6)):
        (ran,) = (s for (process, name), s in found.items() if process.startswith(f"worker {each}"))
        assert sum(e["name"].startswith("aten::") for e in ran) == count
        assert p.breakdown(each).operations == count
        assert f"{each} (cpu of node " in str(p)
    with pytest.raises(sky.errors.ConfigurationError, match=rf"breakdown\(None\).*: {device}, "):
        p.breakdown()


def test_profiles_of_two_devices_may_overlap(
    device: torch.device, other_device: torch.device
) -> None:
    with sky.profile(device) as first:
        steps(device, 1)
        with sky.profile(other_device) as second:
            steps(other_device, 2)
        steps(device, 1)
    assert (first.breakdown().operations, second.breakdown().operations) == (4, 4)


def test_threads_have_tracks_of_their_own(device: torch.device, tmp_path: Path) -> None:
    x = torch.ones(4, device=device)
    issued, ended = threading.Barrier(3), threading.Event()

    def work() -> None:
        for _ in range(50):
            x.sin()
        issued.wait()
        ended.wait()

    threads = [threading.Thread(target=work, name=f"loader {n}") for n in range(2)]
    with sky.profile(device) as p:
        for thread in threads:
            thread.start()
        for _ in range(50):
            x.cos()
        issued.wait()
    ended.set()
    for thread in threads:
        thread.join()
    found = tracks(exported(p, tmp_path))
    names = ("MainThread", "loader 0", "loader 1")
    assert [len(found["client", f"issue ({name})"]) for name in names] == [50, 50, 50]
    assert_ordered(recording_of(p))


def test_the_profile_of_a_block_that_fails_is_kept(device: torch.device) -> None:
    p = sky.profile(device)
    with pytest.raises(ZeroDivisionError), p:
        steps(device, 2)
        _ = 1 / 0
    assert p.breakdown().operations == 4


def test_an_error_of_the_worker_is_left_for_the_next_wait(device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    inside, outside = (torch.tensor([n], device=device) for n in (1, 7))
    x[inside]
    with sky.profile(device) as p:
        x[outside]
    with pytest.raises(IndexError, match="out of bounds"):
        torch.sky.synchronize(device)
    assert p.breakdown().operations > 0
    torch.sky.synchronize(device)


def test_a_device_is_profiled_once_at_a_time(device: torch.device) -> None:
    with sky.profile(device) as p:
        with pytest.raises(
            sky.errors.DeviceError, match=f"{device} is being profiled already; leave"
        ):
            sky.profile(device).__enter__()
        steps(device, 1)
    assert p.breakdown().operations == 2


def test_a_profile_is_of_one_block(device: torch.device) -> None:
    with sky.profile(device) as p:
        pass
    with pytest.raises(sky.errors.ConfigurationError, match="one profile is of one block"):
        p.__enter__()


def test_a_profile_that_has_not_ended_says_so(device: torch.device, tmp_path: Path) -> None:
    with sky.profile(device) as p:
        with pytest.raises(
            sky.errors.ConfigurationError, match="export: the profiled block has not end"
        ):
            p.export(tmp_path / "trace.json")
        with pytest.raises(
            sky.errors.ConfigurationError, match="summary: the profiled block has not en"
        ):
            p.summary()
        assert "profile object" in str(p)


@pytest.mark.parametrize("given", ["cpu", None, "no such device"])
def test_only_sky_devices_are_profiled(device: torch.device, given: Any) -> None:
    said = re.escape(f"({given!r}): give a device of")
    for asked in (sky.profile, sky.device_stats):
        with pytest.raises(sky.errors.ConfigurationError, match=f"{asked.__name__}{said}"):
            asked(given)


def test_a_summary_has_five_lines_that_add_up(device: torch.device) -> None:
    with sky.profile(device) as p:
        steps(device, 5)
    first, *rest = str(p).splitlines()
    assert re.fullmatch(rf"{device} \(cpu of node 0\): [\d.]+ m?s, 10 operations", first)
    assert [line.split()[2] for line in rest] == [
        "worker-bound",
        "transfers",
        "reads",
        "client-bound",
    ]
    assert sum(float(line.split()[0]) for line in rest) == pytest.approx(100, abs=0.3)
    assert "21.0 MB up, 20 B down" in rest[1]
    assert rest[2].endswith("; waits: 5")


def operation(run_start: int, run_end: int, kernel: tuple[int, int] = (0, 0)) -> Operation:
    return Operation(run_start - 5, run_start - 4, run_start, run_end, *kernel, 0, 1, 0, 0)


def example(**changed: Any) -> Recording:
    """A block of 100 ms; times are in milliseconds here."""
    ms = 10**6
    made = Recording(
        start=0,
        end=100 * ms,
        clock_error=0,
        operations_dropped=0,
        spans_dropped=0,
        operations=[operation(10 * ms, 30 * ms)],
        spans=[
            TimeSpan(20 * ms, 45 * ms, 4, Kind.READING, 1),
            TimeSpan(40 * ms, 60 * ms, LARGE, Kind.UPLOADING, 1),
            TimeSpan(95 * ms, 100 * ms, 0, Kind.FINISHING, 1),
        ],
        worker_spans=[TimeSpan(60 * ms, 65 * ms, LARGE, Kind.TAKING_UPLOAD, 0)],
        names=["aten::mm"],
        missing="",
    )
    return replace(made, **changed)


def test_every_moment_of_a_block_counts_once() -> None:
    found = breakdown.Breakdown.of(example())
    assert found.worker_bound == pytest.approx(0.020)
    assert found.transferring == pytest.approx(0.025)
    assert found.reading == pytest.approx(0.015)
    assert found.client_bound == pytest.approx(0.040)
    assert found.waited == pytest.approx(0.010)
    assert found.kernels is None
    assert found.reads == 1


def test_a_worker_is_busy_while_its_gpu_is() -> None:
    ms = 10**6
    recording = example(operations=[operation(10 * ms, 11 * ms, (15 * ms, 35 * ms))])
    found = breakdown.Breakdown.of(recording)
    assert found.worker_bound == pytest.approx(0.021)
    assert found.kernels == pytest.approx(0.020)
    assert "its GPU for 20.0 ms of it" in "\n".join(found.lines())


MOMENTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair)))
)


def moments(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(MOMENTS, MOMENTS)
def test_intervals_are_sets_of_moments(some: list[Any], others: list[Any]) -> None:
    first, second = breakdown.union(some), breakdown.union(others)
    assert moments(first) == moments(some)
    assert breakdown.seconds(first) == pytest.approx(len(moments(some)) / 1e9)
    assert moments(breakdown.overlap(first, second)) == moments(some) & moments(others)


def test_what_was_not_recorded_is_said(device: torch.device) -> None:
    with sky.profile(device) as p:
        pass
    p._recorded[0] = p._recorded[0]._replace(recording=example(operations_dropped=7))
    assert "The last 7 operations were not recorded" in str(p)
    assert "8 operations" in str(p)


@only_in_all
def test_a_device_over_a_network_is_profiled_on_the_same_clock() -> None:
    with sky.Compute(sky.Local(transport="tcp"), options=sky.Options(console=False)) as compute:
        device = compute.device("cpu")
        with sky.profile(device) as p:
            steps(device, 5)
        recording = recording_of(p)
        assert len(recording.operations) == 10
        assert recording.clock_error > 0
        assert_ordered(recording)
        with sky.profile(device) as dying:
            x = torch.ones(3, device=device)
            for process in device_processes(compute):
                process.kill()
            with pytest.raises(sky.errors.DeviceError):
                for _ in range(10_000):
                    x.sin().sum().item()
        assert "The worker's part is missing" in str(dying)
        assert "is gone: its process was killed by SIGKILL" in str(dying)
        assert "aten::sin" in {each.name for each in dying.operations()}


SKEWED = """
import ctypes, sys
import torch
import skyward as sky
from skyward.device.core import core

core()
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x80):  # CLONE_NEWTIME: for the processes started from here on
    sys.exit(77)
with open("/proc/self/timens_offsets", "w") as file:
    file.write("monotonic 123456 7890\\n")
with sky.Compute(sky.Local(transport=sys.argv[1]), options=sky.Options(console=False)) as compute:
    device = compute.device("cpu")
    x = torch.ones(1000, device=device)
    with sky.profile(device) as p:
        for _ in range(20):
            (x * 2).sum().item()
    (recorded,) = p._recorded
    recording = recorded.recording
    assert len(recording.operations) == 40
    error = recording.clock_error
    assert error < 10**8, error
    for o in recording.operations:
        assert o.issue_start - error <= o.run_start, (o, error)
        assert o.run_start <= o.run_end <= recording.end + error, (o, error)
    assert p.breakdown().worker_bound > 0
"""


@only_in_all
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_the_worker_may_have_another_clock(transport: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SKEWED, transport], capture_output=True, text=True, timeout=120
    )
    if done.returncode == 77:
        pytest.skip("this user may not make a time namespace")
    assert done.returncode == 0, done.stderr


def test_pytorchs_profiler_with_events_times_the_device(device: torch.device) -> None:
    x = torch.randn(300, 300, device=device)
    with torch.sky.device(device), torch.autograd.profiler.profile(use_device="sky") as p:
        for _ in range(3):
            x = x @ x
    (mm,) = (each for each in p.key_averages() if each.key == "aten::mm")
    assert mm.count == 3
    assert mm.device_time_total > 0


OWN_WARNING = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
"""PyTorch 2.11 warns of a cycle even where there is one only."""


@OWN_WARNING
def test_pytorchs_profiler_traces_the_device(device: torch.device, tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity

    x = torch.randn(300, 300, device=device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
    with torch.profiler.profile(activities=activities) as p:
        for _ in range(3):
            x = x @ x
    rows = [each for each in p.key_averages() if each.key == "aten::mm"]
    assert {each.count for each in rows} == {3}
    assert all(each.device_time_total > 0 for each in rows)
    p.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel" and e["name"] == "aten::mm"]
    issues = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::mm"]
    assert len(kernels) == len(issues) == 3
    for issue, kernel in zip(issues, kernels, strict=True):
        assert issue["ts"] <= kernel["ts"] + 1
    # Its recording has ended.
    with sky.profile(device) as own:
        x.sin()
    assert own.breakdown().operations == 1


@OWN_WARNING
def test_a_device_that_sky_profiles_is_not_in_pytorchs_trace(device: torch.device) -> None:
    from torch.profiler import ProfilerActivity

    x = torch.randn(30, 30, device=device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
    with sky.profile(device) as own, torch.profiler.profile(activities=activities) as p:
        x.sin()
    assert own.breakdown().operations == 1
    assert all(each.device_time_total == 0 for each in p.key_averages())
