"""What tasks print: live, whole, in order, and labelled; and what the console makes of it."""

import asyncio
import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyward as sky
from skyward.console import Console
from skyward.console.plain import Plain
from skyward.wire.frames import META_LIMIT
from skyward.worker.output import PIECE, LineCutter

from .conftest import PATIENCE, only_in_all, other_case
from .waiting import wait_for

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def compute(pool):
    return pool


@sky.function
def write(text, stream="stdout", *, end="\n"):
    print(text, file=getattr(sys, stream), end=end)


@sky.function
def write_bytes(*pieces):
    for piece in pieces:
        os.write(1, piece)


@sky.function
def count_lines(n):
    for number in range(n):
        print("line", number)
    return n


@sky.function
def progress(steps, end):
    """A bar as tqdm draws it."""
    for step in range(steps + 1):
        sys.stderr.write(f"\r{100 * step // steps:3d}%|{'#' * (10 * step // steps):10}|")
        sys.stderr.flush()
    sys.stderr.write(end)


# Live, in order, to where it belongs.


@pytest.mark.parametrize("kind", ["compute", "threads"])
def test_a_line_arrives_while_the_task_still_runs(kind, request, tmp_path):
    @sky.function
    def says_when():
        print("ready")
        wait_for(tmp_path / "heard")  # touched only when the line has arrived
        return "done"

    def heard(line):
        Path(tmp_path, "heard").touch()

    with sky.redirect_output(heard):
        assert says_when() >> request.getfixturevalue(kind) == "done"


def test_c_level_output_arrives_while_the_task_still_runs(compute, tmp_path):
    @sky.function
    def says_when():
        os.write(1, b"ready\n")
        wait_for(tmp_path / "heard")

    with sky.redirect_output(lambda line: Path(tmp_path, "heard").touch()):
        says_when() >> compute


def test_lines_keep_their_order(compute, printed):
    count_lines(1000) >> compute

    assert printed == [f"line {number}" for number in range(1000)]


@pytest.mark.usefixtures("alone")
def test_stdout_goes_to_stdout_and_stderr_to_stderr_labelled_by_node(compute, capsys):
    compute.run(write("to out"), on=1)
    compute.run(write("to err", "stderr"), on=0)

    assert capsys.readouterr() == ("[node 1] to out\n", "[node 0] to err\n")


@pytest.mark.usefixtures("alone")
def test_every_node_is_labelled(compute, capsys):
    write("hello") @ compute

    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[node 0] hello", "[node 1] hello"]


@pytest.mark.usefixtures("alone")
def test_workers_of_a_node_are_told_apart(capsys):
    with sky.Compute(worker=sky.Worker(per_node=2), options=QUIET) as pool:
        write("hello") @ pool

    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[node 0.0] hello", "[node 0.1] hello"]


def test_output_has_arrived_when_the_result_is_there(compute, printed):
    for number in range(50):
        write(number) >> compute
        assert printed[-1] == str(number)
    (write("future") > compute).result(100)
    assert printed[-1] == "future"
    write("everywhere") @ compute
    assert printed[-2:] == ["everywhere"] * 2
    list(compute.map(write, ["mapped"]))
    assert printed[-1] == "mapped"
    sky.gather(write("gathered"), write("gathered")) >> compute
    assert printed[-2:] == ["gathered"] * 2


def test_output_has_arrived_when_an_awaited_result_is_there(compute, printed):
    async def main():
        await (write("awaited") > compute)

    asyncio.run(main())

    assert printed == ["awaited"]


def test_output_has_arrived_when_the_exception_is_there(compute, printed):
    @sky.function
    def broken():
        print("last words")
        raise LookupError

    for count in range(1, 20):
        with pytest.raises(LookupError):
            broken() >> compute
        assert printed == ["last words"] * count


def test_output_has_arrived_when_a_stream_is_over(compute, printed):
    @sky.function
    def numbers():
        yield 1
        print("over")

    for count in range(1, 20):
        assert list(numbers() >> compute) == [1]
        assert printed == ["over"] * count


def test_the_last_words_of_a_process_that_dies_are_heard(compute, printed, eventually):
    @sky.function
    def dies():
        print("goodbye")
        os.write(1, b"world\n")
        os._exit(3)

    with pytest.raises(sky.WorkerDiedError):
        dies() >> compute

    eventually(lambda: printed == ["goodbye", "world"])


@pytest.mark.parametrize("kind", ["compute", pytest.param("threads", marks=other_case)])
def test_a_hundred_thousand_lines_arrive_whole_and_in_order(kind, request, printed):
    assert count_lines(100_000) >> request.getfixturevalue(kind) == 100_000

    assert printed == [f"line {number}" for number in range(100_000)]


def test_the_output_of_many_small_calls_is_not_lost(compute, printed):
    sky.gather(*[write(number) for number in range(500)]) >> compute

    assert sorted(map(int, printed)) == list(range(500))


def test_threads_do_not_mix_their_lines(threads, printed, tmp_path):
    @sky.function
    def chatter(mine):
        for number in range(200):
            print("call", mine, "says", number)

    sky.gather(*[chatter(mine) for mine in range(4)]) >> threads

    for mine in range(4):
        own = [line for line in printed if line.startswith(f"call {mine} ")]
        assert own == [f"call {mine} says {number}" for number in range(200)]
    assert len(printed) == 800


# Whatever writes.


def test_everything_that_writes_is_heard(compute, printed):
    @sky.function
    def all_sorts():
        print("print")
        sys.stdout.write("write\n")
        sys.stdout.writelines(["lines\n"])
        sys.stdout.buffer.write(b"buffer\n")
        sys.stdout.buffer.flush()
        os.write(1, b"descriptor\n")
        os.system("echo system")
        subprocess.run(["echo", "subprocess"], check=True)
        subprocess.run(["echo", "given"], check=True, stdout=sys.stdout)

    all_sorts() >> compute

    assert printed == [
        *("print", "write", "lines", "buffer"),
        *("descriptor", "system", "subprocess", "given"),
    ]


def test_c_code_that_buffers_is_heard_too(compute, printed):
    @sky.function
    def through_libc():
        import ctypes

        ctypes.CDLL(None).printf(b"from %s\n", b"libc")

    through_libc() >> compute

    assert printed == ["from libc"]


def test_c_code_that_holds_the_interpreter_may_write_more_than_a_pipe_holds(
    compute, printed, eventually
):
    """The executor's own reader cannot run meanwhile: the agent reads in its place."""

    @sky.function
    def write_all(text):
        import ctypes

        return ctypes.PyDLL(None).write(1, text, len(text))

    text = (b"x" * 79 + b"\n") * 40_000
    assert write_all(text) >> compute == len(text)
    eventually(lambda: sum(line.count("x") for line in printed) == 79 * 40_000)


def test_logging_and_warnings_are_heard_on_stderr(compute, printed):
    @sky.function
    def complains():
        logging.getLogger("mine").warning("logged")
        warnings.warn("warned", stacklevel=1)

    complains() >> compute

    assert [line.stream for line in printed] == ["stderr"] * len(printed)
    assert any("logged" in line for line in printed)
    assert any("UserWarning: warned" in line for line in printed)


def test_threads_that_a_task_starts_are_heard(compute, printed):
    @sky.function
    def delegates():
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()

    delegates() >> compute

    assert printed == ["from a thread"]


@pytest.mark.parametrize("kind", ["compute", "threads"])
def test_the_streams_of_a_task_look_like_streams(kind, request, printed):
    @sky.function
    def probe():
        sys.stdout.reconfigure(line_buffering=True)
        return [
            (stream.isatty(), stream.writable(), stream.encoding, stream.fileno())
            for stream in (sys.stdout, sys.stderr)
        ]

    assert probe() >> request.getfixturevalue(kind) == [
        (False, True, "utf-8", 1),
        (False, True, "utf-8", 2),
    ]


def test_reading_from_stdin_finds_its_end(compute):
    assert sky.function(lambda: sys.stdin.read())() >> compute == ""


# Lines.


def test_a_last_line_without_its_newline_arrives(compute, printed):
    compute.run(write("unfinished", end=""), on=0)
    compute.run(write("next"), on=0)

    assert printed == ["unfinished", "next"]


def test_empty_lines_arrive(compute, printed):
    write("one\n\nthree\n") >> compute

    assert printed == ["one", "", "three", ""]


def test_a_very_long_line_stays_one_line(compute, printed):
    write("x" * 1_000_000) >> compute

    assert printed == ["x" * 1_000_000]


def test_windows_line_ends_are_line_ends(compute, printed):
    write_bytes(b"one\r\ntwo\r\n") >> compute

    assert printed == ["one", "two"]


@pytest.mark.parametrize("way", ["descriptor", "buffer"])
def test_a_character_split_between_two_writes_arrives_whole(compute, printed, way):
    @sky.function
    def bytewise(text):
        for byte in text.encode():
            if way == "descriptor":
                os.write(1, bytes([byte]))
            else:
                sys.stdout.buffer.write(bytes([byte]))

    bytewise("naïve 日本 🚀\n") >> compute

    assert printed == ["naïve 日本 🚀"]


def test_bytes_that_are_no_text_arrive_as_replacement_characters(compute, printed):
    compute.run(write_bytes(b"bad \xff byte\n", b"half \xe2\x82"), on=0)
    compute.run(write_bytes("€\n".encode()), on=0)

    assert printed == ["bad � byte", "half �", "€"]


@given(st.text(st.characters(exclude_characters="\r", codec="utf-8")), st.data())
def test_lines_do_not_depend_on_how_the_bytes_are_cut(text, data):
    encoded = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(encoded)), max_size=8).map(sorted))
    cutter, cut = LineCutter(), ""
    for start, stop in zip([0, *cuts], [*cuts, len(encoded)], strict=True):
        lines, bar = cutter.feed(encoded[start:stop])
        assert bar == ""
        assert lines == "" or lines.endswith("\n")
        cut += lines

    cut += cutter.finish()

    assert cut == (text if text.endswith("\n") or not text else text + "\n")


@given(st.lists(st.text(st.sampled_from("a\nŵ"))))
def test_a_long_line_is_cut_into_pieces_that_make_the_line_again(texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyward.worker.output.PIECE", 3)
        cutter, cut, text = LineCutter(), "", "".join(texts)
        for each in texts:
            cut += cutter.feed(each.encode())[0]
        assert cutter.unfinished == (bool(text) and not text.endswith("\n"))
        cut += cutter.finish()

    assert cut == (text if text.endswith("\n") or not text else text + "\n")


@pytest.mark.parametrize("kind", ["compute", "threads"])
def test_a_line_that_is_longer_than_a_frame_arrives_whole(kind, request, printed):
    @sky.function
    def write_long():
        print("first\nfrom here", "x" * META_LIMIT, "to here")
        print(("y" * (META_LIMIT // 16) + "\n") * 20, end="")
        print("z" * META_LIMIT, end="")

    write_long() >> request.getfixturevalue(kind)

    expected = ["first", f"from here {'x' * META_LIMIT} to here", *["y" * (META_LIMIT // 16)] * 20]
    # Not in an assert of pytest's, which would show the difference.
    assert (printed == [*expected, "z" * META_LIMIT]) is True, [line[:20] for line in printed]


def test_the_beginning_of_a_long_line_is_not_lost_when_its_process_dies(pool, printed, eventually):
    @sky.function
    def die():
        sys.stdout.write("x" * 3_000_000)
        sys.stdout.flush()
        os._exit(3)

    with pytest.raises(sky.WorkerDiedError):
        die() >> pool

    # The process may have read a last piece, and not sent it.
    eventually(lambda: sum(map(len, printed)) >= 3_000_000 - 2 * PIECE)
    assert set("".join(printed)) == {"x"}


# Progress bars.


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("kind", ["compute", "threads"])
def test_a_progress_bar_arrives_as_its_final_state_not_as_hundreds_of_lines(
    kind, end, request, printed
):
    progress(500, end) >> request.getfixturevalue(kind)

    assert printed == ["100%|##########|"]


def test_a_bar_between_lines_leaves_the_lines_whole(compute, printed):
    @sky.function
    def mixed():
        print("before")
        for step in range(100):
            print(f"\r{step}", end="")
        print("\nafter")

    mixed() >> compute

    assert printed == ["before", "99", "after"]


def test_a_bar_that_wipes_itself_out_leaves_nothing(compute, printed):
    progress(100, "\r" + " " * 20 + "\r") >> compute

    assert printed == []


# The console of a script.

PREAMBLE = """
import os, sys, time
import skyward as sky

@sky.function
def hello():
    print("hello from", sky.instance_info().node)
    print("complaint", file=sys.stderr)

@sky.function
def bar(steps, end="\\n", seconds=0.0):
    for step in range(steps + 1):
        sys.stderr.write(f"\\r{100 * step // steps:3d}% done")
        sys.stderr.flush()
        time.sleep(seconds / steps)
    sys.stderr.write(end)

@sky.function
def fail():
    raise ValueError("on purpose")

def options(console=None):
    return sky.Options(console=console)
"""


def script(body):
    return [sys.executable, "-c", PREAMBLE + textwrap.dedent(body)]


def run(body, **environment):
    """A script with its output in pipes."""
    return subprocess.run(
        script(body),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **environment},
    )


@only_in_all
def test_what_a_block_prints_comes_after_the_line_that_it_is_ready():
    done = run("""
        for _ in range(3):
            with sky.Compute(name="pool"):
                print("begun", file=sys.stderr)
    """)
    told = re.findall(r"ready in|begun|pool: closed|calls", done.stderr)
    assert told == ["ready in", "begun", "pool: closed"] * 3, "nothing of calls: there were none"


def test_a_pool_that_did_not_start_has_no_summary():
    done = run("""
        with sky.Compute(image=sky.Image(pip=["no-such-package-here==1.0"])):
            pass
    """)
    assert "no-such-package-here" in done.stderr
    assert "calls succeeded" not in done.stderr


def test_in_a_pipe_the_console_is_plain_lines_on_stderr():
    done = run("""
        with sky.Compute(nodes=2, name="plain [1/2]") as compute:
            hello() @ compute
            try:
                fail() >> compute
            except ValueError:
                print("failed as expected")
            bar(300) >> compute
    """)

    ours = [line for line in done.stderr.splitlines() if line.startswith("skyward: ")]
    theirs = [line for line in done.stderr.splitlines() if line not in ours]
    assert ours[0] == "skyward: plain [1/2]: starting 2 nodes (local)"
    for node in (0, 1):
        assert any(re.match(rf"skyward: node {node}: ready \(\d+\.\d s\)", line) for line in ours)
    assert any(re.match(r"skyward: plain \[1/2\]: 2 nodes ready in \d+\.\d s", o) for o in ours)
    assert re.fullmatch(
        r"skyward: plain \[1/2\]: 3 of 4 calls succeeded, 1 failed in \d+\.\d s", ours[-1]
    )
    assert sorted(theirs[:2]) == ["[node 0] complaint", "[node 1] complaint"]
    assert re.fullmatch(r"\[node \d\] 100% done", theirs[2])
    assert len(theirs) == 3
    assert sorted(done.stdout.splitlines()) == [
        "[node 0] hello from 0",
        "[node 1] hello from 1",
        "failed as expected",
    ]


@only_in_all
def test_lines_keep_their_order_for_a_client_that_stands_still():
    """They wait in the executor's pipe, which is none of the agent's business then."""
    done = run("""
        import signal, subprocess

        WAKES = '''
        import array, fcntl, os, signal, sys, termios, time
        waiting, since, began = -1, 0.0, time.monotonic()
        # Full for longer than the agent takes to empty a pipe that nobody reads.
        while waiting < 65536 or time.monotonic() - since < 2:
            now = array.array("i", [0])
            fcntl.ioctl(1, termios.FIONREAD, now)
            if now[0] != waiting:
                waiting, since = now[0], time.monotonic()
            if time.monotonic() - began > 60:
                print("the pipe was never full", file=sys.stderr)
                break
            time.sleep(0.01)
        os.kill(int(sys.argv[1]), signal.SIGCONT)
        '''

        @sky.function
        def many(client):
            os.kill(client, signal.SIGSTOP)
            subprocess.Popen([sys.executable, "-c", WAKES, str(client)])
            for number in range(60_000):
                print(f"line {number:44}")

        lines = []
        with sky.Compute(options=options(console=False)) as compute:
            with sky.redirect_output(lines.append):
                many(os.getpid()) >> compute
        wrong = [(at, line) for at, line in enumerate(lines) if line != f"line {at:44}"]
        print(len(lines), wrong[:3])
    """)

    assert done.stdout == "60000 []\n", done.stderr


def test_a_quiet_console_shows_what_tasks_print_and_nothing_else():
    done = run("""
        with sky.Compute(nodes=2, options=options(console=False)) as compute:
            hello() @ compute
    """)

    assert sorted(done.stdout.splitlines()) == ["[node 0] hello from 0", "[node 1] hello from 1"]
    assert sorted(done.stderr.splitlines()) == ["[node 0] complaint", "[node 1] complaint"]


@other_case
def test_a_stream_without_the_characters_still_gets_the_line():
    done = run(
        """
        with sky.Compute(options=options(console=False)) as compute:
            sky.function(print)("naïve") >> compute
        """,
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )

    assert done.stdout == "[node 0] na\\xefve\n"


def test_a_reader_that_goes_away_does_not_break_the_script():
    body = """
        with sky.Compute(options=options(console=False)) as compute:
            for number in range(50):
                sky.function(print)("line", number) >> compute
            result = sky.function(lambda: 42)() >> compute
        os.write(2, f"result {result}".encode())
        os._exit(0)
    """
    with subprocess.Popen(
        script(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "[node 0] line 0\n"
        process.stdout.close()
        complaints = process.stderr.read()

    assert complaints.endswith("result 42")
    assert complaints.count("output could not be shown") == 1


# The console on a terminal.


class Screen:
    """What a terminal shows of the bytes it is sent; enough of one for what rich sends."""

    PIECES = re.compile(r"\r|\n|\x1b\[[\d;?]*[A-Za-z]|[^\r\n\x1b]+")

    def __init__(self):
        self.rows = [""]
        self.row = self.column = 0
        self.seen = []

    def feed(self, text):
        for piece in self.PIECES.findall(text):
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self.row += 1
                if self.row == len(self.rows):
                    self.rows.append("")
            elif piece.startswith("\x1b["):
                number = piece[2:-1]
                self._obey(piece[-1], int(number) if number.isdigit() else 0)
            else:
                row = self.rows[self.row].ljust(self.column)
                end = self.column + len(piece)
                self.rows[self.row] = row[: self.column] + piece + row[end:]
                self.column = end

    def _obey(self, letter, number):
        if letter == "A":
            self.row = max(0, self.row - max(1, number))
        elif letter == "K":
            self.seen.append(self.rows[self.row])
            self.rows[self.row] = "" if number == 2 else self.rows[self.row][: self.column]
        else:
            assert letter in "hlm", f"an unexpected code: {letter}"

    @property
    def lines(self):
        return [row.rstrip() for row in self.rows if row.strip()]


def on_terminal(body, *, stdout=None):
    """What a terminal of 100 columns shows of a script."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        script(body),
        stdin=theirs,
        stdout=theirs if stdout is None else stdout,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    received = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        received += data
    os.close(ours)
    assert process.wait(PATIENCE) == 0, received.decode(errors="replace")
    screen = Screen()
    screen.feed(received.decode())
    return screen


@pytest.fixture(scope="module")
def screen():
    return on_terminal("""
        with sky.Compute(nodes=2, name="shown [1/2]") as compute:
            hello() @ compute
            print(sky.function(sum)([1, 2]) >> compute)
            bar(60, seconds=3.0) @ compute
            compute.run(bar(60, end="\\r             \\r", seconds=0.3), on=1)
            compute.run(sky.function(print)("\\x1b[31mred\\x1b[0m"), on=0)
        print("bye")
    """)


def test_on_a_terminal_what_is_left_are_results_not_progress(screen):
    ready, *middle, summary, bye = screen.lines

    assert re.fullmatch(r"✓ shown \[1/2\]: 2 nodes ready in \d+\.\d s", ready)
    assert re.fullmatch(r"shown \[1/2\]: 7 of 7 calls succeeded in \d+\.\d s", summary)
    assert bye == "bye"
    assert sorted(middle) == sorted(
        [
            "[node 0] hello from 0",
            "[node 1] hello from 1",
            "[node 0] complaint",
            "[node 1] complaint",
            "3",
            "[node 0] 100% done",
            "[node 1] 100% done",
            "[node 0] red",
        ]
    )


def test_on_a_terminal_nodes_are_seen_coming_up(screen):
    seen = "\n".join(screen.seen)

    assert "shown [1/2]: starting 2 nodes (local)" in seen
    for node in (0, 1):
        assert f"node {node} starting" in seen
        assert f"✓ node {node} ready" in seen


def test_on_a_terminal_a_bar_moves_in_place(screen):
    for node in (0, 1):
        states = {row.strip() for row in screen.seen if row.startswith(f"[node {node}]")}
        assert len({state for state in states if "% done" in state}) >= 3


@pytest.mark.parametrize(
    "bar",
    [
        "__import__('tqdm').tqdm(range(3), 'mine', mininterval=0)",
        "__import__('rich.progress').progress.track(range(3), 'mine')",
    ],
    ids=["tqdm", "rich"],
)
def test_a_bar_of_the_client_stays_below_what_tasks_print(bar):
    screen = on_terminal(f"""
        coloured = sky.function(print)
        with sky.Compute(name="outer") as compute:
            for number in {bar}:
                # As a compile of the torch device does.
                compute._open_fleet.console.own_line("compiling", False)
                hello() >> compute
                coloured(f"\\x1b[31mred\\x1b[0m {{number}}") >> compute
            bar(5) >> compute
    """)

    ready, *lines, mine, done, summary = screen.lines
    assert ready.startswith("✓ outer")
    assert re.match("mine.* 100%", mine)
    assert done == "[node 0] 100% done"
    assert summary.startswith("outer: ")
    assert sorted(lines) == sorted(
        ["[client] compiling", "[node 0] hello from 0", "[node 0] complaint"] * 3
        + [f"[node 0] red {number}" for number in range(3)]
    )


@other_case
def test_output_sent_elsewhere_is_plain_while_progress_is_on_the_terminal(tmp_path):
    with open(tmp_path / "out", "w") as out:
        screen = on_terminal(
            """
            with sky.Compute(name="shown") as compute:
                hello() >> compute
            """,
            stdout=out,
        )

    assert (tmp_path / "out").read_text() == "[node 0] hello from 0\n"
    assert "[node 0] complaint" in screen.lines
    assert not any("hello from" in line for line in screen.lines)


@only_in_all
def test_on_a_terminal_many_lines_are_shown_before_the_result():
    """Drawing must keep up: 30,000 lines, and then the result."""
    screen = on_terminal("""
        @sky.function
        def many(n):
            for number in range(n):
                print("line", number)

        with sky.Compute() as compute:
            many(30_000) >> compute
            print("result")
    """)

    assert screen.lines[1:-1] == [*(f"[node 0] line {n}" for n in range(30_000)), "result"]


@other_case
def test_a_quiet_console_is_quiet_on_a_terminal_too():
    screen = on_terminal("""
        with sky.Compute(options=options(console=False)) as compute:
            hello() >> compute
    """)

    assert sorted(screen.lines) == ["[node 0] complaint", "[node 0] hello from 0"]


def test_a_line_that_does_not_end_is_shown_in_parts(compute, printed, monkeypatch):
    monkeypatch.setattr("skyward.calls.dispatch.UNFINISHED_MAX", 4 << 20)

    @sky.function
    def write_endlessly():
        for _ in range(10):
            sys.stdout.write("x" * (1 << 20))
            sys.stdout.flush()
        print()

    compute.run(write_endlessly(), on=0)

    assert sum(map(len, printed)) == 10 << 20
    assert all(len(line) <= 8 << 20 for line in printed)


@pytest.mark.usefixtures("alone")
def test_each_console_names_its_pool_while_several_run(capsys):
    first = Console(Plain(), several_workers=False, pool="train")
    first.output("alone\n", "stdout", 0, 0, "f", False)
    first.drain()
    second = Console(Plain(), several_workers=True, pool="serve")
    for console in (first, second):
        console.output("both\n", "stdout", 1, 0, "f", False)
        console.phase(1, "lost")
        console.drain()
    second.close("")
    first.output("alone again\n", "stdout", 0, 0, "f", False)
    first.close("")
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "[node 0] alone",
        "[train node 1] both",
        "[serve node 1.0] both",
        "[node 0] alone again",
    ]
    told = [line.partition(" (")[0] for line in shown.err.splitlines()]
    assert told == ["skyward: train node 1: lost", "skyward: serve node 1: lost"]
