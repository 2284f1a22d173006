"""Jobs of a node: what goes on without a client, with its output, its end and its result kept.

Most jobs are commands, each in the care of a `program`. A call by name is a job, too: the runner, a
client of the pool on its head node and a job itself, runs it. Each job has a folder. `job.json` is
the job as it was last, `given` what came with it (files, or the encoded call), `work` the files,
`output` the log of what it has written, `result` what came of a call, once the agent was told that
it can be read, and `stream-0` the items of a generator. A job lives as long as its agent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from skyward import context
from skyward.errors import PoolError
from skyward.wire.channel import Channel
from skyward.wire.messages import Reply
from skyward.worker import output_log
from skyward.worker.changes import Changes
from skyward.worker.config import AgentConfig
from skyward.worker.program import ProgramConfig, RunningProgram
from skyward.worker.supervision import nth_card

KEPT = 50
"""How many ended jobs of a kind keep their folders; calls keep theirs until they are forgotten."""
OUTPUT_KEPT = 64 << 20
"""How many bytes of a job's output are kept."""
CANCEL_SECONDS = 10.0
"""How long a job has to end after an interrupt before everything of it is ended."""
FOLDER = "SKYWARD_JOB_FOLDER"
"""The environment variable with the job's folder."""
JOB = "SKYWARD_JOB"
"""The environment variable with the job's name."""
RUNNER = "named-calls"
"""The name of the jobs that run calls by name."""
TRIES = 2
"""How many runners are given a call that does not begin: a third one would end as the others."""
GIVEN, OUTPUT, RESULT = "given", "output", "result"

JobState = Literal["queued", "running", "done", "failed", "cancelled", "lost"]
LIVE = ("queued", "running")
"""The states of a job that has not ended."""
Kind = Literal["script", "call", "runner", "page", "daemon"]
OWN = ("script", "call")
"""The kinds that users have started; the others serve them."""
LISTED = (*OWN, "page", "daemon")
"""The kinds that users are shown; the calls stand for the job that runs them."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_RECORD = "job.json"
_AGENT_ENDED = "it ended with the node's agent, which was killed or stopped"
_TOLD = 4000
"""How many bytes of a job's output, the last ones, an error tells."""


class Job(msgspec.Struct):
    """A job as its users see it."""

    id: str
    kind: Kind
    command: list[str]
    """Of a call, its function."""
    began: float
    folder: str
    by: str = ""
    """Who has started it: user, host."""
    state: JobState = "running"
    took: float = 0.0
    code: int | None = None
    problem: str = ""
    """Why it has failed, or is lost."""
    streams: bool = False
    """Of a call that runs: whether its items come already."""
    submission: str = ""
    """Of a call: what its client has named the submission, to know it again."""


@dataclass(slots=True, eq=False)
class _Live:
    """What the agent has of a job that has not ended."""

    program: RunningProgram | None = None
    """None for a call, and for a job that is being sent or started."""
    watcher: threading.Thread | None = None
    is_sent: bool = False
    """Whether all of it is here: then others see it."""
    is_cancelled: bool = False
    ender: threading.Timer | None = None
    """Once it was interrupted: ends what does not end by itself."""
    given: int = 0
    """How many runners were given the call."""


class Jobs:
    """Owns the jobs of one node; any thread may call it."""

    def __init__(self, config: AgentConfig, changes: Changes | None = None) -> None:
        self._config, self._changes = config, changes
        self._folder = Path(config.folder, "jobs")
        self.version = 0
        """Another number for other jobs, or other states of them."""
        self._changed = threading.Condition(threading.RLock())
        self._jobs: dict[str, Job] = {}
        self._live: dict[str, _Live] = {}
        self._runner = ""
        """The job that runs calls, or starts to."""
        self._orders: Channel | None = None
        """Its connection."""
        self._start_runner: Callable[[Job], object] | None = None
        """Starts a job that runs calls, as the last client that made a call has asked for."""
        self._closed = False
        self._find_earlier()

    def _find_earlier(self) -> None:
        """Take the jobs over that an earlier agent has left; those that had not ended are lost."""
        lost: list[Job] = []
        folders = self._folder.iterdir() if self._folder.is_dir() else ()
        for folder in folders:
            try:
                job = msgspec.json.decode((folder / _RECORD).read_bytes(), type=Job)
            except (OSError, msgspec.DecodeError):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            self._jobs[job.id] = job
            if job.state in LIVE:
                lost.append(job)
        # All of them with the agent: the last of them to write knows best when that was.
        ended = max((_last_change(Path(job.folder)) for job in lost), default=0.0)
        for job in lost:
            job.state, job.problem, job.streams = "lost", _AGENT_ENDED, False
            job.took = max(0.0, ended - job.began)
            with contextlib.suppress(OSError):
                self._write(job)

    # Who looks.

    @property
    def working(self) -> bool:
        """Whether a job of the users' waits or runs, or is being sent."""
        with self._changed:
            return any(self._jobs[each].kind in (*OWN, "runner") for each in self._live)

    @property
    def scripts(self) -> int:
        """How many scripts run now."""
        with self._changed:
            return sum(self._jobs[each].kind == "script" for each in self._live)

    def all(self, kinds: tuple[str, ...] = LISTED) -> list[Job]:
        """The jobs of these kinds, in the order in which they were made."""
        with self._changed:
            found = [job for job in self._jobs.values() if job.kind in kinds and self.is_there(job)]
            return sorted(map(self._view, found), key=lambda job: job.began)

    def get(self, name: str, kind: str = "") -> Job:
        """The job of that id, or the latest of that name; with a kind, the one of that kind."""
        with self._changed:
            # The id first: another job may have it for its name.
            job = self._jobs.get(name)
            if job is not None and self.is_there(job) and kind in ("", job.kind):
                return self._view(job)
            if kind:
                known = ", ".join(each.id for each in self.all((kind,))) or "none"
                raise PoolError(
                    f"there is no {kind} named {name!r}; the pool's named {kind}s are: {known}"
                )
            there = self.all()
            found = [each for each in there if each.kind != "call" and _name_of(each.id) == name]
            if found:
                return found[-1]
            known = ", ".join(each.id for each in there) or "none"
            raise PoolError(f"there is no job {name!r}; the pool's jobs are: {known}")

    def is_there(self, job: Job) -> bool:
        """Whether all of a job has come, so that others see it."""
        live = self._live.get(job.id)
        return live is None or live.is_sent

    def _view(self, job: Job) -> Job:
        took = time.time() - job.began if job.id in self._live else job.took
        return msgspec.structs.replace(job, took=max(0.0, took))

    def last_words(self, job: Job) -> str:
        """The end of what a job has written, for an error."""
        log = Path(job.folder, OUTPUT)
        at = max(0, output_log.bounds(log)[1] - _TOLD)
        return output_log.read(log, at, _TOLD)[1].decode("utf-8", "replace").strip()

    def calls(self) -> dict[str, tuple[float, bool]]:
        """When each call was made, and whether what came of it can be read."""
        with self._changed:
            calls = [job for job in self._jobs.values() if job.kind == "call"]
            return {
                job.id: (job.began, job.streams or job.id not in self._live)
                for job in calls
                if self.is_there(job)
            }

    # A job begins.

    def begin(self, name: str, kind: Kind = "script", submission: str = "") -> Job:
        """Take a name for a job that is being sent; nobody sees it before it starts.

        The id of a call is its name; that of others is the name and a number. A call of the same
        submission that `is_there` is returned as it is: its client, whose connection was cut, sends
        it again.
        """
        if not _NAME.fullmatch(name):
            told = "call cannot be named" if kind == "call" else "job cannot be called"
            raise PoolError(
                f"a {told} {name!r}: give letters, digits, '_', '-' and '.', at most 64 of them"
            )
        with self._changed:
            own = name
            if kind == "call":
                while submission and (job := self._submitted(name, submission)):
                    if self.is_there(job):
                        return job
                    # The connection that it came over is lost, or is about to bring its rest.
                    self._changed.wait()
                self._check_free(name)
            else:
                alike = [_number_of(each.id) for each in self._jobs.values() if each.kind == kind]
                number = max(alike, default=0) + 1
                while (own := f"{name}-{number}") in self._jobs:
                    number += 1
            folder = self._folder / own
            folder.mkdir(parents=True, mode=0o700)
            # Only now: without a folder there is no job, and nobody gives it up.
            job = self._jobs[own] = Job(
                own, kind, [], time.time(), str(folder), submission=submission
            )
            self._live[own] = _Live()
        return job

    def _submitted(self, name: str, submission: str) -> Job | None:
        job = self._jobs.get(name)
        return job if job is not None and job.submission == submission else None

    def _check_free(self, name: str) -> None:
        job = self._jobs.get(name)
        if job is None:
            return
        if job.kind != "call":
            raise PoolError(f"a job is called {name!r}, see `sky jobs`; give another name")
        if name in self._live:
            state = job.state if self.is_there(job) else "being submitted"
            raise PoolError(
                f"a call named {name!r} is {state}: compute.result({name!r}) waits for it and "
                f"compute.cancel({name!r}) ends it; give another name"
            )
        raise PoolError(
            f"a call named {name!r} is there, {job.state}: compute.result({name!r}) gets what came "
            f"of it, and compute.forget({name!r}) frees the name"
        )

    def give_up(self, job: Job, problem: BaseException | None = None) -> None:
        """Discard a job that was not sent completely, or could not be started."""
        with self._changed:
            # Once: a call may have taken its name meanwhile.
            if self._jobs.get(job.id) is job:
                self._live.pop(job.id, None)
                self._discard(job)
            if job.id == self._runner:
                self._runner = ""
                self._end_calls(f"the process that runs calls could not be started: {problem}")
            self._changed.notify_all()

    def start(
        self,
        job: Job,
        command: list[str],
        *,
        own: Mapping[str, str] | None = None,
        private: Mapping[str, str] | None = None,
        by: str = "",
        function: str = "",
    ) -> Job:
        """Start a job that is complete, or give it up; what came with it is in its folder.

        For a script that is a compressed tar or nothing, unpacked in the folder `work`, in which
        Python looks for modules. In the command, `{work}` stands for that folder, and a first word
        `{python}` for the node's interpreter. `own` are variables of this job alone, in which
        `{folder}` stands for the job's folder; `private` are texts that only the user may read, by
        their places in that folder. For a call, all this is the runner's; `function` is its own.
        """
        try:
            job.by, job.began = by, time.time()
            if job.kind == "call":
                job.command, job.state = [function], "queued"
                self._queue(
                    job,
                    functools.partial(self.start, command=command, own=own, private=private, by=by),
                )
            else:
                self._launch(job, command, own or {}, private or {})
        except BaseException as problem:
            self.give_up(job, problem)
            raise
        self._note_change()
        return job

    def find_or_start(
        self,
        name: str,
        kind: Kind,
        command: list[str],
        *,
        own: Mapping[str, str] | None = None,
        private: Mapping[str, str] | None = None,
    ) -> tuple[Job, bool]:
        """The one job of a kind, started if none runs; whether it was there.

        If it was, it finds these private texts in place of the earlier ones.
        """
        with self._changed:
            while there := [each for each in self._live if self._jobs[each].kind == kind]:
                job = self._jobs[there[0]]
                if self.is_there(job):
                    self._write_private(job, private or {})
                    return self._view(job), True
                # Another caller starts it.
                self._changed.wait()
            job = self.begin(name, kind)
        return self.start(job, command, own=own, private=private), False

    def _launch(
        self, job: Job, command: list[str], own: Mapping[str, str], private: Mapping[str, str]
    ) -> None:
        """Have a program run the command, and wait until it does."""
        if not command:
            raise PoolError("a job needs a command")
        folder = Path(job.folder)
        work = folder / "work"
        work.mkdir()
        _unpack(folder / GIVEN, work)
        self._write_private(job, private)
        first, *arguments = (part.replace("{work}", str(work)) for part in command)
        job.command = [sys.executable if first == "{python}" else first, *arguments]
        environment = environment_of(self._config)
        if job.kind == "daemon":
            # As the agent's own: what it starts is used by all tasks, and is no client's job.
            environment = dict(os.environ)
        else:
            path = f"{work}:{environment.get('PYTHONPATH', '')}".rstrip(":")
            environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
            environment |= {key: each.replace("{folder}", job.folder) for key, each in own.items()}
            environment |= {JOB: job.id, FOLDER: job.folder}
        config = ProgramConfig(
            job.command,
            self._config.working_directory,
            environment,
            log=str(folder / OUTPUT),
            keep=OUTPUT_KEPT,
            stays=job.kind == "daemon",
        )
        self._write(job)
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            program = RunningProgram(config, (nothing, nothing, nothing))
        finally:
            os.close(nothing)
        status = program.next_status()
        if status is None or status.problem:
            program.close()
            program.forget()
            killed = "the job's process was killed"
            raise PoolError(status.problem if status is not None else killed)
        with self._changed:
            live = self._live[job.id]
            live.program, live.is_sent = program, True
            live.watcher = threading.Thread(
                target=self._watch, args=(job, live, program), name="skyward-job", daemon=True
            )
            live.watcher.start()
            self._changed.notify_all()
            if self._closed and job.kind != "daemon":
                program.end()

    def _watch(self, job: Job, live: _Live, program: RunningProgram) -> None:
        """Wait for the end of a job's program."""
        status = program.next_status()
        if job.kind == "daemon" and status is not None and status.code == 0:
            with self._changed:
                job.code = 0
                self._changed.notify_all()
            status = program.next_status()
        program.wait()
        program.forget()
        program.end()
        code = status.code if status is not None else None
        state: JobState = "lost" if code is None else "failed" if code else "done"
        if code != 0 and live.is_cancelled:
            state = "cancelled"
        with self._changed:
            job.code = code
            self._end(job, state, _AGENT_ENDED if state == "lost" else "")
            runner = self._next_runner(job) if job.id == self._runner else None
        if runner is not None and self._start_runner is not None:
            # The calls that wait for it are told.
            with contextlib.suppress(OSError, PoolError):
                self._start_runner(runner)

    def _write_private(self, job: Job, private: Mapping[str, str]) -> None:
        """Write texts that only the user may read; a process that reads one gets all or none."""
        for place, text in private.items():
            path = Path(job.folder, place)
            if not place or ".." in path.parts or Path(place).is_absolute():
                raise PoolError(f"{place!r} is no place in a job's folder; give a relative path")
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new = path.with_name(f".{path.name}.new")
            new.unlink(missing_ok=True)
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
            new.replace(path)

    # A job ends.

    def cancel(self, name: str, kind: str = "") -> Job:
        """Interrupt a job as Ctrl-C does; what does not end by itself is ended soon after.

        Returns the job as it was.
        """
        with self._changed:
            found = self.get(name, kind)
            live = self._live.get(found.id)
            if live is None or live.is_cancelled:
                return found
            if found.kind == "daemon":
                raise PoolError(f"{found.id} is a plugin's, which needs it: it ends with its node")
            live.is_cancelled = True
            if found.kind == "call":
                if self._orders is not None:
                    self._order({"cancel": found.id})
                else:
                    self._end(self._jobs[found.id], "cancelled")
            elif live.program is not None:
                live.ender = threading.Timer(CANCEL_SECONDS, live.program.end)
                live.ender.daemon = True
                live.ender.start()
                live.program.signal(signal.SIGINT)
        return found

    def end(self, *names: str) -> None:
        """End jobs at once, with all that they have started, and wait until they have ended."""
        with self._changed:
            ending = [self._live[name] for name in names if name in self._live]
        for live in ending:
            if live.program is not None:
                live.program.end()
        for live in ending:
            if live.program is not None and live.watcher is not None:
                live.program.close()
                live.watcher.join()

    def is_running(self, name: str) -> bool:
        """Whether the command of a job runs: not only what it has left behind."""
        with self._changed:
            return name in self._live and self._jobs[name].code is None

    def ran(self, name: str) -> Job:
        """Wait until the command of a job has ended; what it has left behind may go on."""
        with self._changed:
            job = self._jobs[name]
            self._changed.wait_for(lambda: job.code is not None or name not in self._live)
            return self._view(job)

    def forget(self, name: str) -> bool:
        """Discard the result of a call that has ended, and free its name; whether there is one."""
        with self._changed:
            job = self._jobs.get(name)
            if job is None or job.kind != "call":
                return False
            if name in self._live:
                raise PoolError(
                    f"the call {name!r} has not ended; compute.cancel({name!r}) ends it"
                )
            shutil.rmtree(job.folder)
            self._discard(job)
        return True

    def _end(self, job: Job, state: JobState, problem: str = "") -> None:
        """Note the end of a job; the lock is held."""
        job.state, job.problem, job.streams = state, problem, False
        job.took = max(0.0, time.time() - job.began)
        live = self._live.pop(job.id)
        if live.ender is not None:
            live.ender.cancel()
        # On a full disk, only this agent knows of it.
        with contextlib.suppress(OSError):
            self._write(job)
        if job.kind == "call":
            with contextlib.suppress(OSError):
                # Only its result is of use from now on.
                Path(job.folder, GIVEN).unlink()
        else:
            ended = [each for each in self.all((job.kind,)) if each.state not in LIVE]
            for each in ended[:-KEPT]:
                self._discard(each)
        self._changed.notify_all()
        self._note_change()

    def _discard(self, job: Job) -> None:
        self._jobs.pop(job.id, None)
        shutil.rmtree(job.folder, ignore_errors=True)
        self._note_change()

    def _write(self, job: Job) -> None:
        new = Path(job.folder, f"{_RECORD}.new")
        new.write_bytes(msgspec.json.encode(job))
        new.rename(Path(job.folder, _RECORD))

    def _note_change(self) -> None:
        self.version += 1
        if self._changes is not None:
            self._changes.tell()

    def close(self) -> None:
        """End all jobs but the plugins' daemons, and wait until they have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            ending = [name for name in self._live if self._jobs[name].kind != "daemon"]
        self.end(*ending)

    # Calls, and the job that runs them.

    def _queue(self, job: Job, start_runner: Callable[[Job], object]) -> None:
        """Have a call run that is complete."""
        with self._changed:
            self._write(job)
            self._live[job.id].is_sent = True
            self._changed.notify_all()
            self._start_runner = start_runner
            runner = None
            if self._orders is not None:
                self._give(job.id)
            elif not self._runner:
                runner = self._begin_runner()
        # Not with the lock, which the agent's loop takes: a process takes its time to start.
        if runner is not None:
            start_runner(runner)

    def _begin_runner(self) -> Job:
        runner = self.begin(RUNNER, "runner")
        self._runner = runner.id
        return runner

    def serve(self, orders: Channel, runner: str) -> bool:
        """Let a runner run the calls; whether it may: there is one at a time."""
        with self._changed:
            if self._orders is not None or self._closed or runner != self._runner:
                return False
            self._orders = orders
            for job in self._calls():
                self._give(job.id)
            return True

    def report(self, name: str, state: JobState, problem: str, *, streams: bool) -> None:
        """Note what has become of a call: a worker has it, its items come, or it has ended."""
        with self._changed:
            if name not in self._live:
                return
            job = self._jobs[name]
            if streams or state not in LIVE:
                try:
                    _publish(Path(job.folder))
                except OSError as failure:
                    state, problem = "failed", f"its result could not be written: {failure}"
            if state not in LIVE:
                self._end(job, state, problem)
                return
            job.state, job.streams = state, job.streams or streams
            self._note_change()

    def let_go(self, orders: Channel) -> bool:
        """Whether the runner may leave: there is nothing to do."""
        with self._changed:
            if self._calls() or self._orders is not orders:
                return False
            self._runner, self._orders = "", None
            return True

    def _next_runner(self, ended: Job) -> Job | None:
        """The runner that is to be started after one has ended, if there are calls for it.

        Those are the calls that have not begun; the others are lost.
        """
        came_up, self._runner, self._orders = self._orders is not None, "", None
        if not came_up:
            told = self.last_words(ended)
            self._end_calls(f"the process that runs calls did not come up; it wrote:\n{told}")
        for job in self._calls():
            live = self._live[job.id]
            if job.state == "running" or live.given >= TRIES:
                self._end(job, "lost", "the process that ran it was killed")
            elif live.is_cancelled:
                # The runner may have ended before it was told.
                self._end(job, "cancelled")
        if not self._calls() or self._closed:
            return None
        try:
            return self._begin_runner()
        except OSError as problem:
            self._end_calls(f"the process that runs calls could not be started: {problem}")
            return None

    def _calls(self) -> list[Job]:
        """The calls that wait or run, in the order in which they were made."""
        there = [self._jobs[name] for name, live in self._live.items() if live.is_sent]
        return [job for job in there if job.kind == "call"]

    def _end_calls(self, problem: str) -> None:
        for job in self._calls():
            self._end(job, "lost", problem)

    def _give(self, name: str) -> None:
        self._live[name].given += 1
        self._order({"run": name})

    def _order(self, order: dict[str, Any]) -> None:
        assert self._orders is not None
        # If the runner is gone, its end as a job is noted.
        with contextlib.suppress(OSError):
            self._orders.send(Reply(order, more=True))


def new_result(folder: Path) -> Path:
    """Where a runner writes what came of a call.

    It becomes the result when the runner reports the call: a runner that loses its agent sees its
    tasks fail for that, which is not what came of them.
    """
    return output_log.only_file(folder / RESULT).with_suffix(".new")


def _publish(folder: Path) -> None:
    """Let clients read what came of a call, if the runner has written it and they cannot yet."""
    with contextlib.suppress(FileNotFoundError):
        new_result(folder).rename(output_log.only_file(folder / RESULT))


def environment_of(config: AgentConfig, compute_pool: str = "") -> dict[str, str]:
    """The environment of programs: the image's, and that of the first worker if its pool is given.

    `compute_pool` is the worker's `COMPUTE_POOL`.
    """
    environment = dict(os.environ)
    programs = os.path.dirname(sys.executable)
    path = environment.get("PATH", os.defpath)
    if programs not in path.split(":"):
        environment["PATH"] = f"{programs}:{path}"
    if compute_pool:
        environment[context.VARIABLE] = compute_pool
        if config.visible[0]:
            environment["CUDA_VISIBLE_DEVICES"] = nth_card(config.visible[0])
        ours = [each for each in config.search_path if each]
        theirs = [each for each in environment.get("PYTHONPATH", "").split(":") if each]
        environment["PYTHONPATH"] = ":".join(dict.fromkeys([*ours, *theirs]))
    return environment


def _unpack(files: Path, work: Path) -> None:
    if not files.exists() or not files.stat().st_size:
        return
    with tarfile.open(files, mode="r:gz") as tar:
        # Older patch releases of Python 3.11 have no filters.
        if hasattr(tarfile, "data_filter"):
            tar.extractall(work, filter="data")
        else:
            tar.extractall(work)
    files.unlink()


def _last_change(folder: Path) -> float:
    """When something in a job's folder was written, or its program has ended."""
    places = (folder, *folder.glob("*"), *folder.glob(f"{OUTPUT}/*"))
    return max(each.lstat().st_mtime for each in places)


def _name_of(job: str) -> str:
    return job.rpartition("-")[0]


def _number_of(job: str) -> int:
    number = job.rpartition("-")[2]
    return int(number) if number.isdigit() else 0
