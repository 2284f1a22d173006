"""Calls by name: they go on without their client, and any client gets what came of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.cli.main import sky as command
from skyward.compute.named import NamedCall
from skyward.wire.channel import ServiceConnection
from skyward.wire.messages import Reply

from ..conftest import PATIENCE, only_in_all
from .conftest import QUIET, said

Script = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def pool(home: Path) -> Iterator[str]:
    """The name of a pool of two nodes that stays."""
    # As ranks of a group, which is there at once: the plugin has nothing to do.
    together = sky.Plugin.create("together").with_distributed()
    local = sky.Local(transport="tcp")
    with sky.Compute(local, nodes=2, name="runs", keep=True, plugins=[together], options=QUIET):
        pass
    yield "runs"
    sky.attach("runs").down(force=True)


@pytest.fixture(scope="module")
def compute(pool: str) -> Iterator[sky.Compute]:
    with sky.attach(pool) as attached:
        yield attached


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that calls wait for."""
    return tmp_path / "gate"


class OutOfLuckError(Exception):
    pass


@sky.function
def wait_for(path: str) -> str:
    print("waiting", flush=True)
    while not os.path.exists(path):
        time.sleep(0.02)
    return "through the gate"


@sky.function
def place(factor: int = 1) -> int:
    print("here")
    return sky.instance_info().node * factor


@sky.function
def fail(text: str) -> None:
    raise OutOfLuckError(text)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def found(compute: sky.Compute, name: str) -> NamedCall:
    return next(call for call in compute.calls() if call.name == name)


def test_a_call_goes_on_when_its_client_is_killed(
    pool: str, compute: sky.Compute, script: Script, gate: Path
) -> None:
    client = script(
        f"""
        @sky.function
        def wait_for(path):
            import time
            while not os.path.exists(path):
                time.sleep(0.02)
            return "after its client"
        compute = sky.attach({pool!r})
        future = compute.submit(wait_for({str(gate)!r}), name="orphan")
        while not future.running():
            pass
        print("runs", flush=True)
        sys.stdin.read()
        """
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "runs\n", client.communicate()
    client.kill()
    client.communicate()
    assert found(compute, "orphan").state == "running"
    with pytest.raises(TimeoutError, match=r"orphan is running, 0 s later; it goes on"):
        compute.result("orphan", timeout=0)
    gate.touch()
    assert compute.result("orphan") == compute.result("orphan") == "after its client"
    assert found(compute, "orphan").state == "done"


def test_the_clients_future_has_the_result_too(compute: sky.Compute) -> None:
    big = sky.put(list(range(100)))

    @sky.function
    def total(numbers: list[int], more: Iterator[int]) -> int:
        return sum(numbers) + next(more) + sum(more)

    assert compute.submit(total(big, (n for n in (1, 2, 3))), name="total").result() == 4956


def test_a_call_by_name_runs_on_the_node_that_was_chosen(compute: sky.Compute) -> None:
    futures = [compute.submit(place(10), on=node, name=f"on-{node}") for node in (0, 1)]
    assert [future.result() for future in futures] == [0, 10]


def test_a_broadcast_by_name_is_not_waited_for(pool: str, compute: sky.Compute) -> None:
    assert compute.broadcast(place(), name="all").result() == [0, 1]
    printed = sky_says("logs", pool, "all").splitlines(keepends=True)
    assert "[node 0] here\n[node 1] here\n" in "".join(sorted(printed))
    with pytest.raises(sky.BroadcastError, match=r"fail \(none\) failed on 2 of 2") as caught:
        compute.broadcast(fail("out of luck"), name="none").result()
    assert [str(error) for error in caught.value.exceptions] == ["out of luck"] * 2
    assert {outcome.node for outcome in caught.value.outcomes} == {0, 1}


def test_a_rank_that_fails_ends_a_broadcast_by_name(compute: sky.Compute) -> None:
    @sky.function
    def one_fails() -> None:
        if sky.instance_info().node == 1:
            raise ValueError("boom")
        threading.Event().wait()

    future = compute.broadcast(one_fails(), name="one", fail_fast=True)
    with pytest.raises(sky.BroadcastError, match=r"rank 1 .* failed first: ValueError") as caught:
        future.result()
    assert isinstance(caught.value.exceptions[0], ValueError)
    assert isinstance(caught.value.exceptions[1], sky.errors.TaskCancelledError)


def test_a_generator_that_fails_ends_those_of_the_other_ranks(
    compute: sky.Compute, gate: Path
) -> None:
    @sky.function(fail_fast=True)
    def epochs() -> Iterator[int]:
        yield 1
        if sky.instance_info().node == 1:
            wait_for.local(str(gate))
            raise ValueError("boom")
        threading.Event().wait()

    first, second = compute.broadcast(epochs(), name="epochs").result()
    assert (next(first), next(second)) == (1, 1)
    gate.touch()
    with pytest.raises(sky.errors.TaskCancelledError, match=r"because rank 1 \(node 1\) failed"):
        next(first)
    with pytest.raises(ValueError, match="boom"):
        next(second)


def test_a_broadcast_by_name_is_retried_as_a_whole(compute: sky.Compute, tmp_path: Path) -> None:
    @sky.function(retries=1)
    def dies_once() -> int:
        node = sky.instance_info().node
        with (tmp_path / str(node)).open("a") as log:
            log.write("x")
        if node == 1 and (tmp_path / "1").stat().st_size == 1:
            os._exit(3)
        return node

    assert compute.broadcast(dies_once(), name="whole").result() == [0, 1]
    assert [(tmp_path / node).read_text() for node in "01"] == ["xx", "xx"]


def test_the_tasks_own_exception_is_raised_with_its_notes(compute: sky.Compute) -> None:
    compute.submit(fail("no luck"), name="fails", on=1)
    for _ in range(2):
        with pytest.raises(OutOfLuckError, match="no luck") as caught:
            compute.result("fails")
        assert "raised by fail (fails) on node 1; remote traceback" in caught.value.__notes__[0]
    assert found(compute, "fails").state == "failed"
    assert found(compute, "fails").problem.endswith("OutOfLuckError: no luck")


SHAPES = """
import enum
class Colour(enum.Enum):
    RED = 1
class Point:
    def __init__(self, x): self.x = x
class NoPoint(Exception): pass
def points():
    yield Point(7)
    yield Colour.RED
    raise NoPoint("no more")
"""


def test_results_are_objects_of_the_classes_that_the_client_has_imported(
    pool: str,
    compute: sky.Compute,
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "shapes.py").write_text(SHAPES)
    client = script(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import shapes
        with sky.attach({pool!r}) as compute:
            compute.submit(sky.function(shapes.points)(), name="points")
        """
    )
    said(client)
    monkeypatch.syspath_prepend(str(tmp_path))
    import shapes  # type: ignore[import-not-found]

    items = compute.result("points")
    point = next(items)
    assert (type(point), point.x) == (shapes.Point, 7)
    assert next(items) is shapes.Colour.RED
    with pytest.raises(shapes.NoPoint, match="no more"):
        next(items)


def test_the_items_of_a_generator_are_kept(compute: sky.Compute) -> None:
    @sky.function
    def count(end: int) -> Iterator[int]:
        yield from range(end)
        raise OutOfLuckError("after the last")

    compute.submit(count(40), name="counted")
    for _ in range(2):
        items = compute.result("counted")
        assert [next(items) for _ in range(40)] == list(range(40))
        with pytest.raises(OutOfLuckError, match="after the last"):
            next(items)


@sky.function
def two_items(path: str) -> Iterator[str]:
    yield "first"
    while not os.path.exists(path):
        time.sleep(0.02)
    yield "second"


def test_items_come_while_their_generator_goes_on(
    pool: str, compute: sky.Compute, gate: Path
) -> None:
    mine = compute.submit(two_items(str(gate)), name="going").result()
    assert next(mine) == "first"
    with sky.attach(pool) as other:
        theirs = other.result("going")
        assert next(theirs) == "first"
        assert found(other, "going").state == "running"
    gate.touch()
    assert list(theirs) == ["second"], "though their client has left"
    assert list(mine) == ["second"]
    assert list(compute.result("going")) == ["first", "second"]
    until(lambda: found(compute, "going").state == "done")


def test_a_script_may_end_amid_the_items(pool: str, compute: sky.Compute, script: Script) -> None:
    """Native code may keep its module, as PyTorch does, until those of Skyward are torn down."""
    compute.submit(two_items(os.devnull), name="amid")
    client = script(
        f"""
        import ctypes
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules["__main__"]))
        with sky.attach({pool!r}) as compute:
            items = compute.result("amid")
            print(next(items))
        """
    )
    assert client.communicate(timeout=PATIENCE) == ("first\n", "")


def test_generators_of_a_broadcast_have_items_of_their_own(
    compute: sky.Compute, gate: Path
) -> None:
    @sky.function
    def where(path: str) -> Iterator[int]:
        yield sky.instance_info().node
        yield from range(3)
        while not os.path.exists(path):
            time.sleep(0.02)

    zero, one = compute.broadcast(where(str(gate)), name="everywhere").result()
    assert [next(one) for _ in range(4)] == [1, 0, 1, 2]
    assert next(zero) == 0
    gate.touch()
    assert (list(zero), list(one)) == ([0, 1, 2], [])


def test_a_connection_that_breaks_between_items_is_made_again(
    compute: sky.Compute, gate: Path
) -> None:
    items = compute.submit(two_items(str(gate)), name="broken").result()
    assert next(items) == "first"
    (connection,) = compute._calls._connections
    connection.channel.abort()
    gate.touch()
    assert list(items) == ["second"]


def test_a_stream_without_an_end_says_why(compute: sky.Compute, gate: Path) -> None:
    items = compute.submit(two_items(str(gate)), name="endless").result()
    assert next(items) == "first"
    gate.touch()
    assert next(items) == "second"
    until(lambda: found(compute, "endless").state == "done")
    stream = Path(compute._calls.look("endless").folder, "stream-0", "0" * 18)
    os.truncate(stream, 0)
    with pytest.raises(sky.errors.PoolError, match="endless has no result: ") as caught:
        next(compute.result("endless"))
    assert caught.type is sky.errors.PoolError


def test_retries_and_timeouts_are_those_of_any_call(compute: sky.Compute, tmp_path: Path) -> None:
    @sky.function(retries=1)
    def die_once(mark: str) -> str:
        if not os.path.exists(mark):
            Path(mark).touch()
            os._exit(1)
        return "alive"

    assert compute.submit(die_once(str(tmp_path / "mark")), name="twice").result() == "alive"
    slow = compute.submit(wait_for("/nowhere").with_timeout(0.2), name="slow")
    with pytest.raises(sky.TaskTimeoutError):
        slow.result()


def test_calls_wait_for_their_turn_and_can_be_cancelled(compute: sky.Compute, gate: Path) -> None:
    first = compute.submit(wait_for(str(gate)), name="first", on=1)
    until(lambda: found(compute, "first").state == "running")
    second = compute.submit(wait_for(str(gate)), name="second", on=1)
    third = compute.submit(place(), name="third", on=1)
    assert found(compute, "second").state == "queued"
    compute.cancel("second")
    with pytest.raises(sky.errors.TaskCancelledError):
        second.result()
    assert first.cancel()
    until(lambda: found(compute, "first").state == "cancelled")
    assert third.result() == 1
    compute.cancel("third")
    assert found(compute, "third").state == "done"


def test_a_name_in_use_is_refused_with_what_to_do(compute: sky.Compute, gate: Path) -> None:
    compute.submit(wait_for(str(gate)), name="taken")
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"cancel\('taken'\) ends it; give another"
    ):
        compute.submit(place(), name="taken")
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"'taken' has not ended; compute.cancel"
    ):
        compute.forget("taken")
    gate.touch()
    assert compute.result("taken") == "through the gate"
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"done: .* compute.forget\('taken'\) frees"
    ):
        compute.submit(place(), name="taken")
    compute.forget("taken")
    assert compute.submit(place(3), name="taken", on=1).result() == 3


def test_what_cannot_be_kept_by_name_is_refused(compute: sky.Compute) -> None:
    with pytest.raises(sky.errors.SerializationError, match="argument 'path' of wait_for"):
        compute.submit(wait_for(threading.Lock()), name="lock")  # type: ignore[arg-type]
    with pytest.raises(sky.errors.ConfigurationError, match="there is no call named 'lock'"):
        compute.result("lock")
    with pytest.raises(sky.errors.ConfigurationError, match="a call cannot be named 'a b'"):
        compute.submit(place(), name="a b")
    with pytest.raises(sky.errors.ConfigurationError, match="give a name, such as 'run-7'"):
        compute.submit(place(), name="")
    for method in (compute.forget, compute.kept):
        with pytest.raises(
            sky.errors.ConfigurationError, match=rf"^{method.__name__}\(''\): give a name"
        ):
            method("")
    with pytest.raises(sky.errors.ConfigurationError, match="name the plain function"):
        compute.submit(sky.remote(place)(), name="remote")
    with sky.Compute(options=QUIET) as short:
        with pytest.raises(sky.errors.ConfigurationError, match=r"make it with .*keep=True"):
            short.submit(place(), name="short")


def test_an_earlier_end_does_not_settle_a_later_call_of_the_same_name(
    compute: sky.Compute, gate: Path
) -> None:
    assert compute.submit(place(), name="again", on=0).result() == 0
    compute.forget("again")
    future = compute.submit(wait_for(str(gate)), name="again")
    compute._calls._settle("again")
    assert not future.done()
    gate.touch()
    assert future.result() == "through the gate"


def test_a_call_whose_connection_is_cut_while_it_is_submitted_runs_once(
    compute: sky.Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"

    @sky.function
    def mark() -> None:
        with marks.open("a") as file:
            file.write("ran ")

    next_reply = ServiceConnection.next_reply
    cuts = [ConnectionResetError("cut"), EOFError("cut")]

    def cut_twice(connection: ServiceConnection) -> Reply:
        reply = next_reply(connection)
        if reply.value == "resent" and cuts:
            raise cuts.pop()
        return reply

    monkeypatch.setattr(ServiceConnection, "next_reply", cut_twice)
    compute.submit(mark(), name="resent").result()
    assert not cuts
    assert marks.read_text() == "ran "
    with pytest.raises(sky.errors.ConfigurationError, match="a call named 'resent' is there"):
        compute.submit(mark(), name="resent")


@pytest.mark.parametrize("problem", [sky.NodeLostError("cut"), KeyError("since")])
def test_a_result_that_cannot_be_fetched_is_fetched_again_or_told(
    compute: sky.Compute, gate: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    calls, problems = compute._calls, [problem]
    read = calls._read

    def fail_once(name: str) -> object:
        if problems:
            raise problems.pop()
        return read(name)

    monkeypatch.setattr(calls, "_read", fail_once)
    name = f"cut-{type(problem).__name__}"
    future = compute.submit(wait_for(str(gate)), name=name)
    gate.touch()
    if isinstance(problem, KeyError):
        with pytest.raises(KeyError, match="since"):
            future.result(PATIENCE)
    else:
        assert future.result(PATIENCE) == "through the gate"
    assert compute.result(name, PATIENCE) == "through the gate"


@only_in_all
def test_device_tensors_of_a_call_travel_with_it(compute: sky.Compute) -> None:
    torch = pytest.importorskip("torch")

    @sky.function
    def twice(values: object) -> object:
        return 2 * values  # type: ignore[operator]

    tensor = torch.ones(3, device=compute.device("cpu", node=1))
    result = compute.submit(twice(tensor), name="tensors").result()
    assert torch.equal(result, torch.full((3,), 2.0))


def test_calls_that_have_not_begun_outlive_the_process_that_runs_them(
    compute: sky.Compute, gate: Path
) -> None:
    begun = compute.submit(wait_for(str(gate)), name="begun", on=0)
    until(lambda: found(compute, "begun").state == "running")
    queued = compute.submit(place(5), name="queued", on=0)
    items = compute.submit(two_items(str(gate)), name="cut-off", on=1).result()
    assert next(items) == "first"
    with compute._open_fleet.service(0, "about") as about:
        agent = psutil.Process(about.ask("facts")["pid"])
    module = "skyward.compute.runner"
    (runner,) = (each for each in agent.children(recursive=True) if module in each.cmdline())
    runner.kill()
    with pytest.raises(sky.WorkerDiedError, match=r"begun is lost: .*killed; forget it, and"):
        begun.result()
    assert queued.result() == 0
    assert found(compute, "begun").state == "lost"
    with pytest.raises(sky.WorkerDiedError, match=r"cut-off is lost"):
        next(items)
    again = compute.result("cut-off")
    assert next(again) == "first"
    with pytest.raises(sky.WorkerDiedError, match=r"cut-off is lost"):
        next(again)


def test_a_client_that_leaves_says_that_the_call_goes_on(pool: str, gate: Path) -> None:
    with sky.attach(pool) as leaving:
        future = leaving.submit(wait_for(str(gate)), name="left")
    with pytest.raises(
        sky.errors.PoolClosedError, match=r"left goes on, .*compute.result\('left'\)"
    ):
        future.result()
    gate.touch()
    with sky.attach(pool) as coming:
        assert coming.result("left") == "through the gate"


def sky_says(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(command, list(args))
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_command_line_lists_follows_and_cancels_calls(
    pool: str, compute: sky.Compute, gate: Path
) -> None:
    compute.keep("settings", 1)
    compute.submit(wait_for(str(gate)), name="shown")
    follower = subprocess.Popen(
        [sys.executable, "-m", "skyward", "logs", pool, "shown", "-f"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    assert follower.stdout.readline() == "waiting\n"
    assert "shown" in sky_says("jobs", pool)
    document = json.loads(sky_says("ps", pool, "--json"))
    assert [each["node"] for each in document["nodes"] if each["answers"]] == [0, 1]
    assert str(os.getpid()) in {each["pid"] for each in document["clients"]}
    assert not any(each["command"].startswith("job ") for each in document["clients"])
    (shown,) = (each for each in document["calls"] if each["id"] == "shown")
    assert (shown["state"], shown["command"]) == ("running", ["wait_for"])
    assert "settings" in [each["name"] for each in document["values"]]
    plain = sky_says("ps", pool)
    assert "\njobs\n" in plain
    assert "out of reach" not in plain
    assert "shown: interrupted" in sky_says("cancel", pool, "shown")
    _, problems = follower.communicate(timeout=PATIENCE)
    assert follower.returncode == 1
    assert "shown was cancelled" in problems


@only_in_all
def test_a_lost_head_is_an_error_and_not_a_hang(home: Path, gate: Path) -> None:
    with sky.Compute(name="lone", keep=True, options=QUIET) as lone:
        future = lone.submit(wait_for(str(gate)), name="run")
        until(lambda: found(lone, "run").state == "running")
        with lone._open_fleet.service(0, "about") as about:
            os.kill(about.ask("facts")["pid"], signal.SIGKILL)
        with pytest.raises(sky.NodeLostError, match="the head, which has the pool's calls"):
            future.result()
        lone.down(force=True)
