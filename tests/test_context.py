"""What a function sees on its node: its place in the pool, and where its output goes."""

import asyncio
import dataclasses
import gc
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import skyward as sky
from skyward.context import Peer

from .waiting import wait_for

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def compute(pool):
    return pool


@sky.function
def info():
    return sky.instance_info()


def say(text):
    """To stdout and stderr."""
    print(f"out {text}")
    print(f"err {text}", file=sys.stderr)


# instance_info.


def test_outside_a_pool_it_describes_a_single_local_node(monkeypatch):
    monkeypatch.delenv("COMPUTE_POOL", raising=False)

    here = sky.instance_info()

    assert (here.node, here.worker, here.global_worker_index) == (0, 0, 0)
    assert (here.total_nodes, here.workers_per_node, here.total_workers) == (1, 1, 1)
    assert here.is_head
    assert [peer.node for peer in here.peers] == [0]
    assert here.hostname == socket.gethostname()
    assert info.local() == here


def test_on_a_node_it_tells_its_place(compute):
    infos = info() @ compute

    assert [i.node for i in infos] == [0, 1]
    assert [i.is_head for i in infos] == [True, False]
    assert {i.total_nodes for i in infos} == {2}
    assert {i.total_workers for i in infos} == {2}
    assert {i.hostname for i in infos} == {socket.gethostname()}


def test_all_nodes_agree_on_the_head_the_job_and_their_peers(compute):
    first, second = info() @ compute

    assert first.head_addr == second.head_addr == first.peers[0].address
    assert first.head_port == second.head_port > 0
    assert first.job_id == second.job_id != "local"
    assert first.peers == second.peers
    assert [peer.node for peer in first.peers] == [0, 1]
    assert all(peer.address for peer in first.peers)


def test_the_heads_port_is_free_to_listen_on(compute):
    @sky.function
    def listen():
        here = sky.instance_info()
        with socket.create_server((here.head_addr, here.head_port)):
            return True

    assert compute.run(listen(), on="head")


def test_accelerators_are_counted(compute):
    first, _ = info() @ compute

    assert first.total_accelerators == 2 * first.accelerators
    assert (first.accelerator is None) == (first.accelerators == 0)


def test_it_is_read_from_the_compute_pool_variable(compute):
    @sky.function
    def variable():
        return os.environ["COMPUTE_POOL"]

    fields = json.loads(compute.run(variable(), on=1))

    assert fields["node"] == 1
    assert fields["total_nodes"] == 2
    assert [peer["node"] for peer in fields["peers"]] == [0, 1]


def test_subprocesses_of_a_task_know_their_place_too(compute):
    @sky.function
    def ask_a_child():
        code = "import skyward as sky; print(sky.instance_info().node)"
        return int(subprocess.check_output([sys.executable, "-c", code]))

    assert compute.run(ask_a_child(), on=1) == 1


def test_the_variable_can_be_set_by_hand(monkeypatch):
    there = sky.InstanceInfo(node=3, total_nodes=4, workers_per_node=2, worker=1, accelerators=8)
    monkeypatch.setenv("COMPUTE_POOL", there.to_json())

    assert sky.instance_info() == there
    assert (there.global_worker_index, there.total_workers) == (7, 8)
    assert there.total_accelerators == 32
    assert not there.is_head


def test_a_thousand_peers_fit_into_the_variable(monkeypatch):
    """Each of a thousand nodes gets it, and Linux takes 128 KiB at most."""
    peers = tuple(Peer(node, f"node{node:04}.cluster.example.org") for node in range(1000))
    there = sky.InstanceInfo(node=3, total_nodes=1000, peers=peers)
    monkeypatch.setenv("COMPUTE_POOL", there.to_json())

    assert sky.instance_info() == there
    assert len(there.to_json()) < 10_000


@pytest.mark.parametrize(
    "text",
    [
        '{"peers": "?"}',
        '{"peers": "AAAA"}',
        "{",
        "[]",
        '{"node": 1}',
        '{"peers": [], "colour": "red"}',
    ],
)
def test_a_variable_that_makes_no_sense_is_a_clear_error(monkeypatch, text):
    monkeypatch.setenv("COMPUTE_POOL", text)

    with pytest.raises(
        sky.errors.ConfigurationError, match="COMPUTE_POOL variable does not describe"
    ):
        sky.instance_info()


def test_an_instance_info_is_a_value(compute):
    value = compute.run(info(), on=1)

    assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.node = 5


def test_threads_of_a_task_know_their_place(compute):
    @sky.function
    def ask_a_thread():
        found = []
        thread = threading.Thread(target=lambda: found.append(sky.instance_info().node))
        thread.start()
        thread.join()
        return found

    assert ask_a_thread() @ compute == [[0], [1]]


# stdout, stderr, silent.


@sky.function
@sky.stdout(only="head")
def head_prints_below():
    say("hello")


@sky.stdout(only="head")
@sky.function
def head_prints_above():
    say("hello")


@pytest.mark.parametrize("call", [head_prints_below, head_prints_above])
def test_only_the_head_prints_whichever_side_the_decorator_is_on(compute, printed, call):
    call() @ compute

    assert sorted((line.node, str(line)) for line in printed) == [
        (0, "err hello"),
        (0, "out hello"),
        (1, "err hello"),
    ]


def test_stderr_can_be_restricted_likewise(compute, printed):
    @sky.function
    @sky.stderr(only="head")
    def head_complains():
        say("hello")

    head_complains() @ compute

    assert sorted(str(line) for line in printed if line.node == 1) == ["out hello"]
    assert sorted(str(line) for line in printed if line.node == 0) == ["err hello", "out hello"]


def test_a_predicate_chooses_the_nodes(compute, printed):
    @sky.function
    @sky.stdout(only=lambda here: here.node == 1)
    def second_prints():
        print("hello")

    second_prints() @ compute

    assert [(line.node, str(line)) for line in printed] == [(1, "hello")]


@pytest.mark.parametrize("only", ["tail", 0, None])
def test_a_wrong_choice_is_refused_when_decorating(only):
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"only=.*give only='head' or a function"
    ):
        sky.stdout(only=only)


@sky.function
@sky.silent
def silent_below():
    say("nothing")
    return "returned"


@sky.silent
@sky.function
def silent_above():
    say("nothing")
    return "returned"


@pytest.mark.parametrize("call", [silent_below, silent_above])
def test_silent_prints_nothing_anywhere_and_still_returns(compute, printed, call):
    assert call() @ compute == ["returned"] * 2
    assert printed == []


def test_only_that_call_is_silent(compute, printed):
    loud = sky.function(lambda: print("loud"))

    compute.run(silent_below(), on=0)
    compute.run(loud(), on=0)
    compute.run(silent_below(), on=0)

    assert printed == ["loud"]


def test_a_silent_function_that_fails_is_loud_about_it(compute, printed):
    @sky.function
    @sky.silent
    def broken():
        print("nothing")
        raise LookupError("heard")

    with pytest.raises(LookupError, match="heard"):
        broken() >> compute
    sky.function(lambda: print("again"))() @ compute
    assert printed == ["again", "again"]


def test_a_decorated_part_of_a_function_is_silent_and_the_rest_is_not(compute, printed):
    @sky.silent
    def noisy_library():
        say("noise")

    @sky.function
    def mine():
        print("before")
        noisy_library()
        print("after")

    mine() >> compute

    assert printed == ["before", "after"]


def test_what_c_code_and_subprocesses_write_is_silent_too(compute, printed):
    def write_below_python(text):
        os.write(1, f"write {text}\n".encode())
        os.write(2, f"write {text}\n".encode())
        subprocess.run(["echo", f"echo {text}"], check=True)
        subprocess.run(["sh", "-c", f"echo sh {text} >&2"], check=True)

    @sky.function
    @sky.silent
    def quiet():
        write_below_python("unheard")

    @sky.function
    def loud():
        write_below_python("heard")

    compute.run(quiet(), on=0)
    compute.run(loud(), on=0)

    assert sorted(printed) == ["echo heard", "sh heard", "write heard", "write heard"]


def test_threads_of_a_silent_call_are_silent_too(compute, printed):
    @sky.function
    @sky.silent
    def quiet():
        thread = threading.Thread(target=say, args=("unheard",))
        thread.start()
        thread.join()

    quiet() >> compute

    assert printed == []


def test_a_silent_generator_streams_silently(compute, printed):
    @sky.function
    @sky.silent
    def numbers():
        for number in range(3):
            print("making", number)
            yield number

    assert list(numbers() >> compute) == [0, 1, 2]
    assert printed == []


def test_a_silent_async_function_and_generator_are_silent(compute, printed):
    @sky.function
    @sky.silent
    async def later():
        print("unheard")
        await asyncio.sleep(0)
        print("unheard")
        return 1

    @sky.function
    @sky.silent
    async def ticks():
        for number in range(3):
            print("unheard")
            yield number

    assert later() >> compute == 1
    assert list(ticks() >> compute) == [0, 1, 2]
    assert printed == []


def test_decorators_add_up(compute, printed):
    @sky.function
    @sky.stdout(only="head")
    @sky.stderr(only=lambda here: here.node == 1)
    def split():
        say("hello")

    @sky.function
    @sky.stdout(only="head")
    @sky.stderr(only=lambda here: here.node == 1)
    def split_stream():
        say("hello")
        yield 1

    split() @ compute
    assert sorted((line.node, str(line)) for line in printed) == [
        (0, "out hello"),
        (1, "err hello"),
    ]
    printed.clear()

    assert [list(values) for values in split_stream() @ compute] == [[1], [1]]
    assert sorted((line.node, str(line)) for line in printed) == [
        (0, "out hello"),
        (1, "err hello"),
    ]


class Trainer:
    @sky.function
    @sky.silent
    def train(self):
        """Train."""
        print("unheard")
        return 1

    @sky.silent
    def step(self):
        print("unheard")
        return 2


def test_methods_can_be_silent(compute, printed, capsys):
    assert Trainer().train() >> compute == 1
    assert Trainer().step() == 2
    assert printed == []
    assert capsys.readouterr().out == ""
    assert Trainer.train.__doc__ == "Train."


def test_decorators_keep_the_functions_options_and_name():
    @sky.silent
    @sky.function(timeout=5, retries=2, name="mine")
    def decorated(x: int) -> int:
        """Documented."""
        return x

    assert (decorated.timeout, decorated.retries, decorated.name) == (5, 2, "mine")
    assert decorated.__doc__ == "Documented."
    assert decorated.__name__ == "decorated"


def test_locally_only_that_call_is_silent(capsys):
    print("before")
    silent_below.local()
    print("after")

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("before\nafter\n", "")


def test_locally_only_the_head_means_here(capsys):
    head_prints_below.local()

    assert capsys.readouterr().out == "out hello\n"


def test_a_silent_local_generator_leaves_its_consumer_its_voice(capsys):
    @sky.silent
    def numbers():
        for number in range(3):
            print("unheard")
            yield number
        print("unheard")

    for number in numbers():
        print("got", number)

    assert capsys.readouterr().out == "got 0\ngot 1\ngot 2\n"


def test_other_threads_print_while_a_local_call_is_silent(capsys):
    go, gone = threading.Event(), threading.Event()

    def speak():
        go.wait(100)
        print("from another thread")
        gone.set()

    @sky.silent
    def quiet():
        go.set()
        gone.wait(100)
        print("unheard")

    thread = threading.Thread(target=speak)
    thread.start()
    quiet()
    thread.join()

    assert capsys.readouterr().out == "from another thread\n"


def test_with_threads_only_that_call_is_silent(threads, printed, tmp_path):
    """The silent call begins first and ends last; the others print meanwhile."""

    @sky.function
    @sky.silent
    def quiet(folder):
        Path(folder, "quiet").touch()
        for number in range(3):
            wait_for(Path(folder, str(number)))
            say("unheard")

    @sky.function
    def loud(folder, number):
        wait_for(Path(folder, "quiet"))
        say(f"heard {number}")
        Path(folder, str(number)).touch()

    sky.gather(quiet(tmp_path), *[loud(tmp_path, number) for number in range(3)]) >> threads

    expected = [f"{stream} heard {number}" for stream in ("err", "out") for number in range(3)]
    assert sorted(printed) == expected


# redirect_output.


def test_redirect_output_takes_what_is_printed_here(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[sky.Output] = []

    with sky.redirect_output(lines.append):
        print("out")
        print("err", file=sys.stderr)
        sys.stdout.buffer.write("bytes \N{SNOWMAN}\n".encode())
        print("unfinished", end="")
    print("after")

    assert [(line.stream, str(line)) for line in lines] == [
        ("stdout", "out"),
        ("stderr", "err"),
        ("stdout", "bytes \N{SNOWMAN}"),
        ("stdout", "unfinished"),
    ]
    assert capsys.readouterr() == ("after\n", "")


def test_redirect_output_leaves_what_other_threads_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[str] = []

    with sky.redirect_output(lines.append):
        other = threading.Thread(target=print, args=("other",))
        other.start()
        other.join()

    assert lines == []
    assert capsys.readouterr().out == "other\n"


def test_redirect_output_leaves_what_other_tasks_of_the_loop_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[str] = []

    async def listening(turn: asyncio.Event, over: asyncio.Event) -> None:
        with sky.redirect_output(lines.append):
            turn.set()
            await over.wait()
            print("mine")

    async def main() -> None:
        turn, over = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(listening(turn, over))
        await turn.wait()
        print("other")
        over.set()
        await task

    asyncio.run(main())

    assert lines == ["mine"]
    assert capsys.readouterr().out == "other\n"


def test_what_the_callback_prints_goes_where_output_went_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outer: list[str] = []

    with sky.redirect_output(lambda line: print("heard", line)):
        print("one")
    with sky.redirect_output(outer.append), sky.redirect_output(lambda line: print("heard", line)):
        print("two")

    assert capsys.readouterr().out == "heard one\n"
    assert outer == ["heard two"]


def test_on_a_worker_too_the_callback_may_print(pool: sky.Compute) -> None:
    @sky.function
    def talk() -> None:
        with sky.redirect_output(lambda line: print("heard", line)):
            print("one")

    lines: list[str] = []
    with sky.redirect_output(lines.append):
        talk() >> pool

    assert lines == ["heard one"]


def test_around_calls_it_takes_what_the_pool_forwards(compute, capsys):
    lines = []

    with sky.redirect_output(lines.append):
        compute.run(sky.function(say)("one"), on=1)

    assert sorted(lines) == ["err one", "out one"]
    by_stream = {line.stream: line for line in lines}
    assert set(by_stream) == {"stdout", "stderr"}
    assert {(line.node, line.worker, line.task) for line in lines} == {(1, 0, "say")}
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("alone")
def test_after_the_block_output_is_shown_again(compute, capsys):
    lines = []
    with sky.redirect_output(lines.append):
        pass

    compute.run(sky.function(print)("hello"), on=1)

    assert lines == []
    assert capsys.readouterr().out == "[node 1] hello\n"


def test_the_innermost_block_gets_the_output(compute):
    outer, inner = [], []

    with sky.redirect_output(outer.append):
        with sky.redirect_output(inner.append):
            sky.function(print)("inner") >> compute
        sky.function(print)("outer") >> compute

    assert (outer, inner) == (["outer"], ["inner"])


def test_inside_a_function_it_takes_that_calls_output(compute, printed):
    @sky.function
    def collects():
        lines = []
        print("before")
        with sky.redirect_output(lines.append):
            say("inside")
            print("unfinished", end="")
        print("after")
        return [(line.stream, str(line)) for line in lines]

    assert collects() >> compute == [
        ("stdout", "out inside"),
        ("stderr", "err inside"),
        ("stdout", "unfinished"),
    ]
    assert printed == ["before", "after"]


def test_inside_a_local_call_it_takes_that_calls_output(capsys):
    lines = []

    @sky.function
    def collects():
        with sky.redirect_output(lines.append):
            print("inside")
        print("outside")

    collects.local()

    assert lines == ["inside"]
    assert capsys.readouterr().out == "outside\n"


def test_with_threads_each_call_collects_its_own_lines(threads, printed, tmp_path):
    @sky.function
    def collects(folder, mine):
        lines = []
        with sky.redirect_output(lines.append):
            for number in range(50):
                print("call", mine, "line", number)
            Path(folder, str(mine)).touch()
            print("half a ", end="")
            for other in range(4):
                wait_for(Path(folder, str(other)))
            print("line of", mine)
        return lines

    results = sky.gather(*[collects(tmp_path, mine) for mine in range(4)]) >> threads

    for mine, lines in enumerate(results):
        assert lines == [
            *(f"call {mine} line {number}" for number in range(50)),
            f"half a line of {mine}",
        ]
    assert printed == []


def test_a_callback_must_be_callable():
    with pytest.raises(sky.errors.ConfigurationError, match="give a function of one line"):
        with sky.redirect_output("file.txt"):
            pass


def test_a_callback_that_fails_does_not_break_the_pool(compute):
    def broken(line):
        raise LookupError("in the callback")

    with sky.redirect_output(broken):
        assert sky.function(lambda: print("hello") or 1)() >> compute == 1

    assert sky.function(lambda: 2)() >> compute == 2


def test_garbage_of_tasks_is_collected(compute):
    assert sky.function(gc.isenabled)() >> compute


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("error", [LookupError, SystemExit])
def test_a_callback_that_fails_is_reported_once_and_its_lines_are_shown(compute, capsys, error):
    taken = []

    def picky(line):
        if "bad" in line:
            raise error("in the callback")
        taken.append(str(line))

    with sky.redirect_output(picky):
        compute.run(sky.function(print)("good\nbad 1\nbad 2\ngood too"), on=1)
        compute.run(sky.function(print)("bad 3"), on=1)

    said = capsys.readouterr()
    assert taken == ["good", "good too"]
    assert said.out == "".join(f"[node 1] bad {number}\n" for number in (1, 2, 3))
    complaint = f"redirect_output: the callback failed at 'bad 1': {error('in the callback')!r}, in"
    assert said.err.count("the callback failed") == 1
    assert f"{complaint} {__file__}:" in said.err
