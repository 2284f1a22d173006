"""Jobs of a node: commands that go on without a client, with their output and their end kept.

Each job has a folder: `job.json` says what it is, `work` holds the files that came with it,
`output` is its log, and `ended.json` says how it ended. A job lives as long as its agent.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Literal

import msgspec

from skyward.errors import PoolError
from skyward.worker.changes import Changes
from skyward.worker.program import ENDED, ProgramConfig, ProgramEnd
from skyward.worker.programs import RunningProgram

KEPT = 50
"""How many ended jobs keep their folders."""
OUTPUT_KEPT = 64 << 20
"""How many bytes of a job's output are kept."""
CANCEL_SECONDS = 10.0
"""How long a job has to end after an interrupt before everything of it is ended."""
FOLDER = "SKYWARD_JOB_FOLDER"
"""The environment variable with the job's folder."""
JOB = "SKYWARD_JOB"
"""The environment variable with the job's name."""

JobState = Literal["queued", "running", "done", "failed", "cancelled", "lost"]
LIVE = ("queued", "running")
"""The states of a job or a call that has not ended."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_ABOUT = "job.json"
_CANCELLED = "cancelled"


class JobRecord(msgspec.Struct):
    """What a job is."""

    id: str
    command: list[str]
    began: float
    by: str = ""
    """Who has started it: user, host."""


class JobView(msgspec.Struct):
    """A job as its users see it."""

    id: str
    state: JobState
    command: list[str]
    began: float
    took: float
    folder: str
    code: int | None = None
    problem: str = ""
    by: str = ""
    kind: Literal["script", "call"] = "script"
    """Whether it is a program of its own, or a call by name."""
    streams: bool = False
    """Of a call that runs: whether its items come already."""


class KeptJobs:
    """Owns the jobs of one node; any thread may call it."""

    def __init__(
        self,
        folder: Path,
        *,
        others: Path | None = None,
        on_end: Callable[[JobView], None] | None = None,
        changes: Changes | None = None,
    ) -> None:
        """`others` is a folder with names that no job gets; `on_end` is told of each end."""
        self._folder, self._others, self._on_end = folder, others, on_end
        self._changes = changes
        self.version = 0
        """Another number for other jobs, or other states of them."""
        self._running: dict[str, RunningProgram] = {}
        self._live: set[str] = set()
        """The jobs that start or run."""
        self._timers: dict[str, threading.Timer] = {}
        self._watchers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._number = 0
        self._closed = False

    @property
    def running(self) -> int:
        """How many jobs run now."""
        return len(self._live)

    def _note_change(self) -> None:
        self.version += 1
        if self._changes is not None:
            self._changes.tell()

    def start(
        self,
        name: str,
        command: list[str],
        *,
        working_directory: str,
        environment: dict[str, str],
        own: Mapping[str, str] | None = None,
        private: Mapping[str, str] | None = None,
        files: IO[bytes] | None = None,
        by: str = "",
    ) -> str:
        """Start a job and return its id, which is the name and a number.

        `files` is a compressed tar. It is unpacked in the job's folder `work`, in which Python
        looks for modules. In the command, `{work}` stands for that folder, and a first word
        `{python}` for the node's interpreter. `own` are variables of this job alone, in which
        `{folder}` stands for the job's folder; `private` are texts that only the user may read,
        by their places in that folder.
        """
        if not _NAME.fullmatch(name):
            raise PoolError(
                f"a job cannot be called {name!r}: give letters, digits, '_', '-' and '.', at most "
                "64 of them"
            )
        if not command:
            raise PoolError("a job needs a command")
        job, folder = self._reserve(name)
        try:
            work = folder / "work"
            work.mkdir()
            if files is not None:
                _unpack(files, work)
            for place, text in (private or {}).items():
                _write_private(folder, place, text)
            mine = {key: each.replace("{folder}", str(folder)) for key, each in (own or {}).items()}
            program, *arguments = (part.replace("{work}", str(work)) for part in command)
            command = [sys.executable if program == "{python}" else program, *arguments]
            about = JobRecord(job, command, time.time(), by)
            (folder / _ABOUT).write_bytes(msgspec.json.encode(about))
            python_path = f"{work}:{environment.get('PYTHONPATH', '')}".rstrip(":")
            config = ProgramConfig(
                command,
                working_directory,
                environment | mine | {JOB: job, FOLDER: str(folder), "PYTHONPATH": python_path},
                status=-1,
                job=str(folder),
                keep=OUTPUT_KEPT,
            )
            self._launch(job, config)
        except BaseException:
            with self._lock:
                self._live.discard(job)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._note_change()
        return job

    def _reserve(self, name: str) -> tuple[str, Path]:
        with self._lock:
            self._folder.mkdir(exist_ok=True, mode=0o700)
            taken = [_number_of(each) for each in os.listdir(self._folder)]
            self._number = max([self._number, *taken]) + 1
            while self._others is not None and (self._others / f"{name}-{self._number}").exists():
                self._number += 1
            job = f"{name}-{self._number}"
            folder = self._folder / job
            folder.mkdir(mode=0o700)
            self._live.add(job)
        return job, folder

    def _launch(self, job: str, config: ProgramConfig) -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            program = RunningProgram(config, (nothing, nothing, nothing))
        finally:
            os.close(nothing)
        status = program.next_status()
        if status is None or status.problem:
            program.close()
            program.forget()
            raise PoolError(
                status.problem if status is not None else "the job's process was killed"
            )
        watcher = threading.Thread(
            target=self._watch, args=(job, program), name="skyward-job", daemon=True
        )
        with self._lock:
            self._running[job] = program
            closed = self._closed
            self._watchers.append(watcher)
        watcher.start()
        if closed:
            program.end()

    def _watch(self, job: str, program: RunningProgram) -> None:
        """Wait for a job's end, and remove the oldest ended jobs if there are too many."""
        program.wait()
        program.forget()
        with self._lock:
            program.end()
            del self._running[job]
            self._live.discard(job)
            timer = self._timers.pop(job, None)
        if timer is not None:
            timer.cancel()
        if self._on_end is not None:
            self._on_end(self.get(job))
        ended = [each for each in self.all() if each.state != "running"]
        for each in ended[:-KEPT]:
            shutil.rmtree(each.folder, ignore_errors=True)
        self._note_change()
        with self._lock:
            self._watchers.remove(threading.current_thread())

    def all(self) -> list[JobView]:
        """The jobs that are kept, in the order of their start."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        found = []
        for name in sorted(names, key=_number_of):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(self._view(self._folder / name))
        return found

    def get(self, job: str) -> JobView:
        """The job of that id, or the latest of that name."""
        there = self.all()
        # The id first: another job may have it for its name.
        found = [each for each in there if each.id == job]
        found = found or [each for each in there if each.id.rpartition("-")[0] == job]
        if found:
            return found[-1]
        known = ", ".join(each.id for each in there) or "none"
        raise PoolError(f"there is no job {job!r}; the pool's jobs are: {known}")

    def _view(self, folder: Path) -> JobView:
        about = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=JobRecord)
        running = about.id in self._live
        ended = None
        # In this order: a job that has ended meanwhile has left its mark.
        with contextlib.suppress(FileNotFoundError):
            ended = msgspec.json.decode((folder / ENDED).read_bytes(), type=ProgramEnd)
        state: JobState = "running" if running else "lost"
        if ended is not None:
            state = "lost" if ended.code is None else "failed" if ended.code else "done"
            if ended.code != 0 and (folder / _CANCELLED).exists():
                state = "cancelled"
        problem = ended.problem if ended is not None else ""
        if state == "lost":
            problem = "it ended with the node's agent, which was killed or stopped"
        until = ended.when if ended is not None else time.time() if running else about.began
        return JobView(
            about.id,
            state,
            about.command,
            about.began,
            max(0.0, until - about.began),
            str(folder),
            ended.code if ended is not None else None,
            problem,
            about.by,
        )

    def cancel(self, job: str) -> JobView:
        """Interrupt a job as Ctrl-C does; what does not end by itself is ended soon after."""
        found = self.get(job)
        with self._lock:
            program = self._running.get(found.id)
            if program is None or found.id in self._timers:
                return found
            Path(found.folder, _CANCELLED).touch()
            timer = self._timers[found.id] = threading.Timer(CANCEL_SECONDS, program.end)
            timer.daemon = True
            timer.start()
        program.signal(signal.SIGINT)
        return found

    def close(self) -> None:
        """End all jobs, and wait until they have ended."""
        with self._lock:
            self._closed = True
            programs, watchers = list(self._running.values()), list(self._watchers)
        for program in programs:
            program.end()
        for program in programs:
            program.close()
        for watcher in watchers:
            watcher.join()


def _write_private(folder: Path, place: str, text: str) -> None:
    path = folder / place
    if not place or ".." in path.parts or Path(place).is_absolute():
        raise PoolError(f"{place!r} is no place in a job's folder; give a relative path")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _unpack(files: IO[bytes], work: Path) -> None:
    with tarfile.open(fileobj=files, mode="r:gz") as tar:
        # Older patch releases of Python 3.11 have no filters.
        if hasattr(tarfile, "data_filter"):
            tar.extractall(work, filter="data")
        else:
            tar.extractall(work)


def _number_of(job: str) -> int:
    number = job.rpartition("-")[2]
    return int(number) if number.isdigit() else 0
