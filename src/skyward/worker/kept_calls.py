"""Calls by name: calls of a pool that go on without a client, with their results kept.

The head's agent has them. Each has a folder: `about.json` says what it is, `call` is the encoded
call, `output` is its log, `result` what came of it, `stream-0` the items of a generator, and
`ended.json` says how it ended. A process on the node that is a client of the pool, the runner, runs
them; the agent starts it when needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from skyward.errors import PoolError
from skyward.wire.channel import Channel
from skyward.wire.messages import Reply
from skyward.worker import output_log
from skyward.worker.changes import Changes
from skyward.worker.kept_jobs import JobState, JobView, KeptJobs

CALL, RESULT, OUTPUT = "call", "result", "output"
TRIES = 2
"""How many runners are given a call that does not begin: a third one would end as the others."""
_ABOUT, _ENDED = "about.json", "ended.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_TOLD = 2000
"""How many characters of a runner's output an error tells."""


def stream_file(number: int) -> str:
    """The name of the file with the items of a call's stream."""
    return f"stream-{number}"


class CallAbout(msgspec.Struct):
    """What a call is."""

    id: str
    function: str
    began: float
    by: str = ""


class CallEnd(msgspec.Struct):
    """How a call has ended."""

    when: float
    state: JobState
    problem: str = ""


class _Live:
    """A call that waits or runs."""

    def __init__(self) -> None:
        self.started = False
        self.streams = False
        self.given = 0
        """How many runners were given it."""


class KeptCalls:
    """Owns the calls by name of one pool; any thread may call it."""

    def __init__(
        self, folder: Path, jobs: KeptJobs, runners: KeptJobs, changes: Changes | None = None
    ) -> None:
        """`jobs` have names as well, which no call may have."""
        self._folder, self._jobs, self._runners = folder, jobs, runners
        self._changes = changes
        self.version = 0
        """Another number for other calls, or other states of them."""
        self._past: dict[str, JobView] = {}
        """The calls that have ended, as far as somebody has looked at them."""
        self._live: dict[str, _Live] = {}
        self._begun: set[str] = set()
        """The calls that are still being sent."""
        self._ended: list[str] = []
        """The calls that have ended, or whose items come, in this order."""
        self._unwritten: dict[str, CallEnd] = {}
        """The ends that no file tells: the disk was full."""
        self._runner: Channel | None = None
        self._served: set[str] = set()
        """The runners that have connected, as jobs."""
        self._starting = False
        self._launch: Callable[[], str] | None = None
        self._changed = threading.Condition(threading.RLock())
        self._closed = False

    @property
    def working(self) -> bool:
        """Whether a call waits or runs."""
        return bool(self._live or self._begun or self._runners.running)

    @property
    def live(self) -> list[JobView]:
        """The calls that wait or run, in the order in which they were made."""
        with self._changed:
            return [self._view(name) for name in self._live]

    def _note_change(self) -> None:
        self.version += 1
        if self._changes is not None:
            self._changes.tell()

    # Clients make calls.

    def begin(self, name: str) -> Path:
        """Take a name for a call that is being sent; returns the call's folder."""
        if not _NAME.fullmatch(name):
            raise PoolError(
                f"a call cannot be named {name!r}: give letters, digits, '_', '-' and '.', at most "
                "64 of them"
            )
        with self._changed:
            if self.has(name):
                raise PoolError(self._in_use(name))
            if any(each.id == name for each in self._jobs.all()):
                raise PoolError(f"a job is called {name!r}, see `sky jobs`; give another name")
            folder = self._folder / name
            folder.mkdir(parents=True, mode=0o700)
            self._past.pop(name, None)
            # Only now: without a folder there is no call, and nobody gives it up.
            self._begun.add(name)
        return folder

    def _in_use(self, name: str) -> str:
        state = "being submitted" if name in self._begun else self.get(name).state
        if name in self._begun or name in self._live:
            return (
                f"a call named {name!r} is {state}: compute.result({name!r}) waits for it and "
                f"compute.cancel({name!r}) ends it; give another name"
            )
        return (
            f"a call named {name!r} is there, {state}: compute.result({name!r}) gets what came of "
            f"it, and compute.forget({name!r}) frees the name"
        )

    def give_up(self, name: str) -> None:
        """Discard a call that was not sent completely."""
        with self._changed:
            self._begun.discard(name)
            shutil.rmtree(self._folder / name, ignore_errors=True)
            # Whoever looked meanwhile has taken it for a lost one.
            self._past.pop(name, None)
            self._note_change()

    def add(self, name: str, function: str, by: str, launch: Callable[[], str]) -> None:
        """Have a call run that is complete; `launch` starts a runner, and returns its job."""
        about = CallAbout(name, function, time.time(), by)
        (self._folder / name / _ABOUT).write_bytes(msgspec.json.encode(about))
        with self._changed:
            self._begun.discard(name)
            self._live[name] = _Live()
            self._launch = launch
            try:
                if self._runner is not None:
                    self._give(name)
                else:
                    self._start()
            except BaseException:
                del self._live[name]
                raise
            finally:
                self._note_change()

    def cancel(self, name: str) -> JobView:
        """End a call that waits or runs."""
        with self._changed:
            found = self.get(name)
            if name in self._live:
                if self._runner is not None:
                    self._tell({"cancel": name})
                else:
                    self._end(name, "cancelled")
        return found

    def forget(self, name: str) -> bool:
        """Discard the result of a call that has ended, and free its name; whether there is one."""
        with self._changed:
            if not self.has(name):
                return False
            if name in self._live or name in self._begun:
                raise PoolError(
                    f"the call {name!r} has not ended; compute.cancel({name!r}) ends it"
                )
            shutil.rmtree(self._folder / name)
            self._unwritten.pop(name, None)
            self._past.pop(name, None)
            self._note_change()
        return True

    # Who looks.

    def has(self, name: str) -> bool:
        """Whether there is a call of that name."""
        return bool(_NAME.fullmatch(name)) and (self._folder / name).is_dir()

    def get(self, name: str) -> JobView:
        """The call of that name."""
        try:
            if self.has(name):
                return self._view(name)
        except FileNotFoundError:
            # It is being sent, or forgotten.
            pass
        known = ", ".join(each.id for each in self.all()) or "none"
        raise PoolError(f"there is no call named {name!r}; the pool's named calls are: {known}")

    def all(self) -> list[JobView]:
        """The calls, in the order in which they were made."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    found.append(self._view(name))
        return sorted(found, key=lambda each: each.began)

    def _view(self, name: str) -> JobView:
        if (past := self._past.get(name)) is not None:
            return past
        version, folder = self.version, self._folder / name
        about = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=CallAbout)
        live = self._live.get(name)
        end = None
        # In this order: a call that has ended meanwhile has left its mark.
        if live is None:
            agent_ended = CallEnd(about.began, "lost", "it ended with the node's agent")
            end = self._unwritten.get(name, agent_ended)
            with contextlib.suppress(FileNotFoundError):
                end = msgspec.json.decode((folder / _ENDED).read_bytes(), type=CallEnd)
        state: JobState = "queued"
        if end is not None:
            state = end.state
        elif live is not None and live.started:
            state = "running"
        found = JobView(
            id=about.id,
            state=state,
            command=[about.function],
            began=about.began,
            took=max(0.0, (time.time() if end is None else end.when) - about.began),
            folder=str(folder),
            problem="" if end is None else end.problem,
            by=about.by,
            kind="call",
            streams=live is not None and live.streams,
        )
        if end is not None:
            self._keep_past(name, found, version)
        return found

    def _keep_past(self, name: str, found: JobView, version: int) -> None:
        """Have the files of a call that has ended read no more, unless something has changed."""
        with self._changed:
            if self.version == version and name not in self._begun:
                self._past[name] = found

    def ended_since(self, count: int | None, seconds: float) -> tuple[int, list[str]]:
        """How many calls have ended or stream, and which since that number; waits for one.

        Without a number, nothing is waited for.
        """
        with self._changed:
            if count is not None and len(self._ended) <= count and not self._closed:
                self._changed.wait(seconds)
            begin = len(self._ended) if count is None else count
            return len(self._ended), self._ended[begin:]

    # The runner comes, works and goes.

    def serve(self, channel: Channel, job: str) -> bool:
        """Let a runner run the calls; whether it may: there is one at a time."""
        with self._changed:
            if self._runner is not None or self._closed:
                return False
            self._runner, self._starting = channel, False
            self._served.add(job)
            for name in list(self._live):
                self._give(name)
            return True

    def started(self, name: str) -> None:
        """Note that a worker has the call."""
        with self._changed:
            if name in self._live:
                self._live[name].started = True
                self._note_change()

    def streams(self, name: str) -> None:
        """Note that clients may read the result of a call, whose items still come."""
        with self._changed:
            if name in self._live:
                self._live[name].streams = True
                self._ended.append(name)
                self._changed.notify_all()

    def ended(self, name: str, end: CallEnd) -> None:
        """Note that a call has ended; the runner has written its result."""
        with self._changed:
            if name in self._live:
                self._end(name, end.state, end.problem)

    def let_go(self, channel: Channel) -> bool:
        """Whether the runner may leave: there is nothing to do."""
        with self._changed:
            if self._live or self._runner is not channel:
                return False
            self._runner = None
            return True

    def lost(self, channel: Channel) -> None:
        """Note that a runner's connection has ended: calls that it ran are lost."""
        with self._changed:
            if self._runner is not channel:
                return
            self._runner = None
            for name, call in list(self._live.items()):
                if call.started or call.given >= TRIES:
                    self._end(name, "lost", "the process that ran it was killed")
            if self._live and not self._closed:
                try:
                    self._start()
                except (OSError, PoolError) as problem:
                    self._end_all(f"it could not be started again: {problem}")

    def runner_ended(self, job: JobView) -> None:
        """Note the end of a runner; if it never connected, no call can run."""
        with self._changed:
            if job.id in self._served or self._runner is not None:
                return
            self._starting = False
            _, told = output_log.read(
                Path(job.folder, OUTPUT),
                max(0, output_log.bounds(Path(job.folder, OUTPUT))[1] - _TOLD),
                _TOLD,
            )
            said = told.decode("utf-8", "replace").strip()
            self._end_all(f"the process that runs calls did not come up; it wrote:\n{said}")

    def _start(self) -> None:
        if not self._starting:
            assert self._launch is not None
            self._launch()
            self._starting = True

    def _give(self, name: str) -> None:
        self._live[name].given += 1
        self._tell({"run": name})

    def _tell(self, order: dict[str, Any]) -> None:
        assert self._runner is not None
        # If it is gone, `lost` sees to its calls.
        with contextlib.suppress(OSError):
            self._runner.send(Reply(order, more=True))

    def _end_all(self, problem: str) -> None:
        for name in list(self._live):
            self._end(name, "lost", problem)

    def _end(self, name: str, state: JobState, problem: str = "") -> None:
        folder = self._folder / name
        new = folder / f"{_ENDED}.new"
        end = CallEnd(time.time(), state, problem)
        try:
            new.write_bytes(msgspec.json.encode(end))
            new.rename(folder / _ENDED)
        except OSError:
            self._unwritten[name] = end
        del self._live[name]
        with contextlib.suppress(OSError):
            # Only its result is of use from now on.
            (folder / CALL).unlink()
        self._ended.append(name)
        self._changed.notify_all()
        self._note_change()

    def close(self) -> None:
        """End the runner, and with it all calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._runners.close()
