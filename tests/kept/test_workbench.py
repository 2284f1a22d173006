"""`sky exec`, `shell`, `cp`, `run`, `jobs`, `logs` and `cancel` on a kept pool, over TLS."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import skyward as sky
from skyward.cli.main import sky as command
from skyward.compute.workbench.jobs import JobOutput

from ..conftest import PATIENCE
from .conftest import QUIET

SKY = [sys.executable, "-m", "skyward"]
SLOW = 'trap "echo caught; exit 5" INT; echo ready; while :; do sleep 0.05; done'


@pytest.fixture(scope="module")
def train(home: Path) -> Iterator[str]:
    """The name of a pool of two nodes that stays."""
    with sky.Compute(
        sky.Local(transport="tcp"), nodes=2, name="train", keep=True, options=QUIET
    ) as compute:
        shout("from a task") @ compute
    yield "train"
    sky.attach("train").down(force=True)


@sky.function
def shout(text: str) -> None:
    print(f"{text} on {sky.instance_info().node}")
    print("aside", file=sys.stderr)


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(command, list(args))
    unforeseen = result.exception and not isinstance(result.exception, SystemExit)
    assert not unforeseen, repr(result.exception)
    assert result.exit_code == code, result.output
    return result


def begun(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Wait until a process has written a line."""
    assert process.stdout is not None
    assert process.stdout.readline() == line


# Commands.


def test_a_command_runs_on_the_head_or_on_all_nodes(train: str) -> None:
    assert run("exec", train, "--", "sh", "-c", "echo $0 -x; exit 3", code=3).stdout == "sh -x\n"
    shown = run("exec", train, "sh", "-c", "echo $0 $@", "-la", "--all", "--help").stdout
    assert shown == "-la --all --help\n"
    everywhere = run("exec", train, "--all", "--", "sh", "-c", "echo a; echo b; exit 2", code=2)
    assert sorted(everywhere.stdout.splitlines()) == [
        "[node 0] a",
        "[node 0] b",
        "[node 1] a",
        "[node 1] b",
    ]
    assert "node 1: exit code 2" in everywhere.stderr
    (told,) = json.loads(run("exec", train, "--node", "1", "--json", "--", "printf", "x").stdout)
    assert told == {"node": 1, "code": 0, "stdout": "x", "stderr": ""}


def test_what_is_not_there_is_named(train: str) -> None:
    assert (
        "has no node 9; its nodes are: 0, 1"
        in run("exec", train, "--node", "9", "true", code=1).stderr
    )
    assert "no program 'treu'" in run("exec", train, "treu", code=1).stderr
    assert "no pool called 'trian'" in run("exec", "trian", "true", code=1).stderr
    assert "Missing argument" in run("exec", train, code=2).stderr


def test_piped_input_and_ctrl_c_reach_the_command(train: str) -> None:
    done = subprocess.run(
        [*SKY, "exec", train, "--all", "--", "wc", "-c"],
        input=b"x" * 3_000_000,
        capture_output=True,
        timeout=PATIENCE,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [b"[node 0] 3000000", b"[node 1] 3000000"]

    process = subprocess.Popen(
        [*SKY, "exec", train, "--", "sh", "-c", SLOW], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    begun(process, b"ready\n")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[0] == b"caught\n"
    assert process.returncode == 5


# A terminal.


class Person:
    """Somebody at a terminal."""

    def __init__(self, *args: str) -> None:
        self.mine, theirs = pty.openpty()
        self.resize(30, 90)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [*SKY, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.mine, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.mine, keys.encode())

    def sees(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        os.set_blocking(self.mine, False)
        while text.encode() not in self._seen:
            assert time.monotonic() < deadline, self._seen
            with contextlib.suppress(BlockingIOError):
                self._seen += os.read(self.mine, 65536)
            time.sleep(0.01)
        self._seen = self._seen.partition(text.encode())[2]

    def leaves(self) -> int:
        code = self.process.wait(PATIENCE)
        assert termios.tcgetattr(self._theirs) == self.before, "the terminal is as it was"
        os.close(self.mine)
        os.close(self._theirs)
        return code


def test_a_terminal_on_a_node(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/sh")
    person = Person("shell", train, "1", "--worker-env", "--command", "PS1='ready> ' exec sh -i")
    person.sees("ready> ")
    person.type("stty size; echo $((6 * 7)) gr\u00fc\u00dfe\n")
    person.sees("\n30 90")
    person.sees("42 gr\u00fc\u00dfe")
    person.sees("ready> ")
    person.resize(25, 70)
    # The new size goes another way than the keys, and may arrive after them.
    person.type("while ! stty size | grep '25 70'; do sleep 0.05; done\n")
    person.sees("\n25 70")
    person.sees("ready> ")
    person.type("sh -c 'echo be\\gin; exec sleep 600'\n")
    person.sees("begin")
    person.type("\x03")
    person.sees("ready> ")
    person.type("python -c 'import skyward as sky; print(sky.instance_info().node + 70)'\n")
    person.sees("\n71")
    person.type("exit 7\n")
    assert person.leaves() == 7


def test_a_terminal_is_restored_when_the_command_is_ended(train: str) -> None:
    person = Person("shell", train, "--command", "echo here; exec sleep 600")
    person.sees("here")
    person.process.send_signal(signal.SIGTERM)
    assert person.leaves() == 128 + signal.SIGTERM


def test_a_shell_without_a_terminal_is_refused(train: str) -> None:
    done = subprocess.run(
        [*SKY, "shell", train],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert "a shell needs a terminal here" in done.stderr
    assert "sky exec NAME -- COMMAND" in done.stderr


# Files.


def test_files_go_to_a_node_and_come_back(train: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").write_text("a")
    (tmp_path / "here" / "a").chmod(0o750)

    done = run("cp", "-r", str(tmp_path / "here"), f"{train}:{tmp_path}/there")
    told = json.loads(run("cp", f"{train}/1:{tmp_path}/there/a", f"{tmp_path}/b", "--json").stdout)

    assert done.stderr == "1 file, 1 B\n"
    assert told == {"files": 1, "bytes": 1, "passed_over": 0}
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o750
    refused = run("cp", f"{train}:{tmp_path}/there", str(tmp_path / "c"), code=1)
    assert f"{train}/0:{tmp_path}/there is a folder; copy it with all that is in it: -r" in (
        refused.stderr
    )


# Scripts.


def test_a_script_runs_here_with_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    (tmp_path / "twice.py").write_text("FACTOR = 2")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, skyward as sky, twice\n"
        "@sky.function\n"
        "def double(x): return x * twice.FACTOR\n"
        "print('result', double(int(sys.argv[1])) >> sky, sys.argv[2:])\n"
        "if __name__ == '__main__': sys.exit(9)\n"
    )

    def started(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SKY, "run", str(script), *args], capture_output=True, text=True, timeout=PATIENCE
        )

    done = started("21", "--epochs", "3", "--nodes", "1")
    assert "result 42 ['--epochs', '3']" in done.stdout, done.stderr
    assert done.returncode == 9
    failed = started("x")
    assert failed.returncode == 1
    assert "runpy" not in failed.stderr
    assert failed.stderr.count("Traceback") == 1
    assert "ValueError: invalid literal" in failed.stderr


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "fit.py").write_text(text)
        return "fit.py"

    return write


def test_a_script_runs_on_the_pool_and_its_output_is_shown_again(
    train: str, script: Callable[[str], str]
) -> None:
    path = script(
        "import sys, skyward as sky\n"
        "@sky.function\n"
        "def add(a, b): return a + b\n"
        "with sky.attach() as compute:\n"
        "    print('sum', add(40, 2) >> compute)\n"
        "print(*sys.argv[1:])\n"
        "sys.exit(3)\n"
    )

    done = run("run", path, "--on", train, "--rate", "0.1", code=3)

    lines = [line for line in done.stdout.splitlines() if not line.startswith("skyward: ")]
    assert lines == ["sum 42", "--rate 0.1"]
    (job,) = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("job ")]
    assert f"{job} failed with exit code 3" in done.stderr
    assert run("logs", train, job).stdout == done.stdout
    assert run("logs", train, "fit", "--tail", "1").stdout == "--rate 0.1\n"
    assert run("logs", train, job, "-f", code=3).stdout == done.stdout
    told = json.loads(run("logs", train, job, "--json").stdout)
    assert (told["output"], told["state"]) == (done.stdout, "failed")
    (row,) = [line for line in run("jobs", train).stdout.splitlines() if line.startswith(job)]
    assert row.split()[1:4] == ["script", "failed", "3"]
    assert row.endswith("fit.py --rate 0.1")
    assert job in [each["id"] for each in json.loads(run("jobs", train, "--json").stdout)]


def test_the_pool_of_a_script_is_the_active_one(train: str, script: Callable[[str], str]) -> None:
    path = script(
        "import skyward as sky\n"
        "@sky.function\n"
        "def add(a, b):\n"
        "    sky.counter('added').add(1)\n"
        "    return a + b\n"
        "print('sum', add(40, 2) >> sky)\n"
        "print('both', sky.gather(add(1, 1), add(2, 2)) >> sky)\n"
        "print('added', sky.counter('added').value)\n"
    )
    lines = run("run", path, "--on", train).stdout.splitlines()
    assert [line for line in lines if not line.startswith("skyward: ")] == [
        "sum 42",
        "both [2, 4]",
        "added 3",
    ]


def test_ctrl_c_leaves_a_job_alone_and_says_how_to_go_on(
    train: str, script: Callable[[str], str]
) -> None:
    path = script("import time; print('ready', flush=True); time.sleep(600)")
    process = subprocess.Popen(
        [*SKY, "run", path, "--on", train], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    begun(process, b"ready\n")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)

    assert process.returncode == 130
    job = errors.split()[1].decode()
    assert f"{job} goes on. Follow it: sky logs train {job} -f; end it: sky cancel train {job}" in (
        errors.decode()
    )
    assert run("cancel", train, job).stdout == f"{job}: interrupted\n"
    assert f"{job} was cancelled" in run("logs", train, job, "-f", code=130).stderr
    assert run("cancel", train, job).stdout == f"{job}: has ended already (cancelled)\n"


def test_a_job_is_started_and_left(train: str, script: Callable[[str], str]) -> None:
    told = json.loads(
        run("run", script("print(1)"), "--on", train, "--detach", "--job", "x", "--json").stdout
    )
    assert told["id"].startswith("x-")
    assert run("logs", train, told["id"], "-f").stdout == "1\n"


def test_a_job_that_is_followed_is_one_document_at_its_end(
    train: str, script: Callable[[str], str]
) -> None:
    path = script("print(1); raise SystemExit(3)")
    told = json.loads(run("run", path, "--on", train, "--json", code=3).stdout)
    assert (told["output"], told["state"], told["code"]) == ("1\n", "failed", 3)
    assert json.loads(run("logs", train, told["id"], "-f", "--json", code=3).stdout) == told


def test_ctrl_c_leaves_a_document_with_what_came(
    train: str, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: JobOutput) -> Iterator[tuple[int, bytes]]:
        yield 0, b"ready\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(JobOutput, "parts", interrupted)
    path = script("import time; time.sleep(600)")
    told = json.loads(run("run", path, "--on", train, "--json", code=130).stdout)
    assert (told["state"], told["code"], told["output"]) == ("running", None, "ready\n")
    run("cancel", train, told["id"])


def test_options_that_do_not_go_together_are_refused(
    train: str, script: Callable[[str], str]
) -> None:
    path = script("")
    assert (
        "--nodes: the pool train is there already"
        in run("run", path, "--on", train, "--nodes", "2", code=2).stderr
    )
    assert "--detach is for a script on a pool" in run("run", path, "--detach", code=2).stderr
    assert "there is no script nowhere.py" in run("run", "nowhere.py", code=2).stderr
    needs = run("run", path, "--provider", "ssh", code=1).stderr
    assert "--provider ssh: it needs arguments" in needs
    assert "there is no job 'nope'" in run("logs", train, "nope", code=1).stderr


# What tasks have written.


def test_the_output_of_tasks_is_kept_by_node(train: str) -> None:
    shown = run("logs", train)
    assert shown.stdout.splitlines().count("[node 0] from a task on 0") == 1
    assert shown.stdout.splitlines().count("[node 1] from a task on 1") == 1
    assert {"[node 0] aside", "[node 1] aside"} <= set(shown.stderr.splitlines())
    one = run("logs", train, "--node", "1")
    assert "[node 1] from a task on 1" in one.stdout.splitlines()
    assert "[node 0]" not in one.stdout + one.stderr
    both = len(shown.stdout.splitlines()) + len(shown.stderr.splitlines())
    assert len(json.loads(run("logs", train, "--json").stdout)) == both


def test_the_output_of_tasks_is_followed(train: str) -> None:
    process = subprocess.Popen(
        [*SKY, "logs", train, "-f", "--tail", "0"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    with sky.attach(train) as compute:
        os.set_blocking(process.stdout.fileno(), False)
        deadline = time.monotonic() + PATIENCE
        seen = b""
        # Until the command follows, its output is not there.
        while b"again" not in seen and time.monotonic() < deadline:
            shout("again") >> compute
            time.sleep(0.1)
            seen += process.stdout.read() or b""
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert b"[node " in seen
    assert b"] again on " in seen
    assert b"from a task" not in seen
    assert process.returncode == 130
