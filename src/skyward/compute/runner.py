"""The runner: a client of the pool on its head node, which runs the calls by name.

The head's agent starts it as a job, tells it which calls there are, and lets it go when there are
none. It writes what came of a call into logs of the call's job.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from skyward import context
from skyward.calls.packer import PackedCall, PackedFunction, PackedHandle, encoded_of
from skyward.calls.streams import RemoteIterator
from skyward.calls.task import Answer, Failed, Streaming, Task, Value
from skyward.compute import attach
from skyward.compute.broadcasts import Ranks, first_failed, run_ranks
from skyward.compute.named import CallFacts, Facts
from skyward.context import Output
from skyward.errors import TaskCancelledError
from skyward.events import CallStarted, Event
from skyward.nodes.fleet import Fleet
from skyward.objects import encoding, stored
from skyward.objects.payloads import Pieces
from skyward.wire.channel import ServiceConnection
from skyward.worker import output_log
from skyward.worker.failures import CHAIN_DEPTH, portable, text, type_name
from skyward.worker.jobs import (
    FOLDER,
    GIVEN,
    JOB,
    OUTPUT,
    OUTPUT_KEPT,
    RESULT,
    JobState,
    new_result,
)
from skyward.worker.output_log import OutputLog

LINGER_SECONDS = 2.0
"""How long the runner waits for another call before it leaves."""
_NOTHING: Pieces = (memoryview(b""), [], [])


@dataclass(slots=True)
class Settled:
    """The answer of one worker; the items of a stream are not in it."""

    node: int
    worker: int
    answer: Answer


class NamedRun:
    """One call that the runner has, until its result is written."""

    def __init__(
        self, fleet: Fleet, name: str, folder: Path, on_stream: Callable[[str], None]
    ) -> None:
        """`on_stream` is told when clients may read the result, while items still come."""
        self.name = name
        self._fleet, self._folder, self._on_stream = fleet, folder, on_stream
        self._lock = threading.Lock()
        self._tasks: list[Task] = []
        self._found: dict[int, Settled] = {}
        """What workers have answered, by the number of the task."""
        self._unwritten: OSError | None = None
        self._log: OutputLog | None = None
        self._everywhere = False
        self._ranks: Ranks | None = None
        """The tasks, if the call is a broadcast."""
        self.cancelled = False

    def write(self, line: Output) -> None:
        """Keep a line that the call wrote."""
        label = f"[node {line.node}] " if self._everywhere else ""
        # On a full disk the call goes on, and its output is lost.
        with self._lock, contextlib.suppress(OSError):
            if self._log is not None:
                self._log.write(f"{label}{line}\n".encode("utf-8", "replace"))

    def cancel(self) -> None:
        """Give the call up, also if it has not been sent yet."""
        with self._lock:
            self.cancelled = True
            tasks = list(self._tasks)
        for task in tasks:
            self._fleet.dispatcher.cancel(task)

    def run(self) -> tuple[JobState, str]:
        """Run the call, write its result, and tell how it ended, and why if it failed."""
        try:
            # Not in `__init__`: a full disk is the problem of this call, not of the others.
            with self._lock:
                self._log = OutputLog(self._folder / OUTPUT, OUTPUT_KEPT)
        except OSError as problem:
            return "failed", f"its output could not be written: {problem}"
        try:
            found = self._answers()
        except Exception as problem:
            found = [Failed.because(problem)]
            self._write([Settled(0, 0, found[0])])
        finally:
            self._close_log()
        if (unwritten := self._unwritten) is not None:
            shutil.rmtree(self._folder / RESULT, ignore_errors=True)
            return "failed", f"its result could not be written: {unwritten}"
        failed = [each for each in found if isinstance(each, Failed)]
        if not failed:
            return "done", ""
        return "cancelled" if self.cancelled else "failed", failed[0].summary

    def _close_log(self) -> None:
        with self._lock:
            log, self._log = self._log, None
        if log is not None:
            log.close()

    def _write(self, found: list[Settled]) -> None:
        new = new_result(self._folder)
        try:
            new.parent.mkdir(exist_ok=True)
            with new.open("wb") as file:
                first = first_failed([each.answer for each in found])
                write(file, found, everywhere=self._everywhere, first=first)
        except OSError as problem:
            self._unwritten = problem

    def _answers(self) -> list[Answer]:
        """Run the call; returns when its result is written."""
        facts, call = read_call(self._folder / GIVEN, self.name)
        self._everywhere = facts.everywhere
        if not facts.everywhere:
            tasks = [self._fleet.dispatcher.prepare(call, keep=False, on=facts.on)]
            return self._run([(0, 0)], tasks)
        return run_ranks(self._fleet, call, self._run_ranks, self._note, fail_fast=facts.fail_fast)

    def _run_ranks(self, ranks: Ranks) -> list[Answer]:
        self._ranks = ranks
        return self._run(ranks.workers, ranks.tasks)

    def _run(self, places: Sequence[tuple[int, int]], tasks: list[Task]) -> list[Answer]:
        """Run the tasks, each on its place."""
        self._found.clear()
        with self._lock:
            self._tasks = tasks
            if self.cancelled:
                problem = TaskCancelledError(f"{self.name} was cancelled before it started")
                failed: list[Answer] = [Failed.because(problem) for _ in places]
                self._write([Settled(*at, each) for at, each in zip(places, failed, strict=True)])
                return failed
            self._fleet.dispatcher.submit_all(tasks)
        # At once: the generators of a broadcast may wait for each other.
        with concurrent.futures.ThreadPoolExecutor(len(tasks)) as waiting:
            answers = waiting.map(self._settled, range(len(tasks)), tasks, places)
            if self._ranks is not None:
                self._ranks.wait(streams=True)
            return list(answers)

    def _note(self, text: str) -> None:
        """Write a remark into the output of the call."""
        self.write(Output(f"skyward: {text}", "stderr", self._fleet.head, 0, self.name))

    def _settled(self, number: int, task: Task, place: tuple[int, int]) -> Answer:
        """The answer of a worker, after all items of a stream have come."""
        answer = task.wait()
        load = task.load
        where = place if load is None else (load.node, load.worker)
        if isinstance(answer, Streaming):
            # Closed if its items cannot be written, so that the generator ends.
            with contextlib.closing(answer.get()) as stream:
                try:
                    log = output_log.only_file(self._folder / f"stream-{number}")
                    log.parent.mkdir(exist_ok=True)
                    with log.open("wb") as file:
                        self._answered(number, Settled(*where, answer))
                        answer = write_items(file, stream) or answer
                except OSError as problem:
                    self._unwritten = problem
            self._fleet.dispatcher.flush_output(task)
        else:
            self._fleet.dispatcher.flush_output(task)
            self._answered(number, Settled(*where, answer))
        return answer

    def _answered(self, number: int, settled: Settled) -> None:
        """Write the result once every worker has answered, also if it is a stream that goes on."""
        with self._lock:
            self._found[number] = settled
            if len(self._found) < len(self._tasks):
                return
        found = [self._found[each] for each in range(len(self._tasks))]
        if self._ranks is not None and self._ranks.why_again() is not None:
            return
        self._write(found)
        is_stream = any(isinstance(each.answer, Streaming) for each in found)
        if is_stream and self._unwritten is None:
            self._on_stream(self.name)


def read_call(path: Path, name: str) -> tuple[CallFacts, PackedCall]:
    """The call in a file, as it was encoded."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Memory that only this process changes.
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        block = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=writable)
    found = list(stored.objects(memoryview(block)))
    facts = msgspec.convert(found[0][0], CallFacts)
    (_, code), (_, arguments), *rest = found
    data = {bytes(key): PackedHandle(bytes(key), encoded_of(*each, ())) for key, each in rest}

    def held(keys: Sequence[bytes]) -> list[PackedHandle]:
        return [data[key] for key in keys]

    function = PackedFunction(
        facts.key,
        encoded_of(*code, held(facts.code_handles)),
        name=f"{facts.function} ({name})",
        timeout=facts.timeout,
        retries=facts.retries,
        fail_fast=facts.fail_fast,
    )
    return facts, PackedCall(function, encoded_of(*arguments, held(facts.handles)))


def write(file: IO[bytes], answers: list[Settled], *, everywhere: bool, first: int | None) -> None:
    """Write what came of a call, for each of its workers; streams by their numbers.

    `first` is the rank of a broadcast that failed first.
    """
    _append(file, Facts("call", everywhere=everywhere, first=first), _NOTHING)
    for number, each in enumerate(answers):
        place = each.node, each.worker
        if isinstance(each.answer, Failed):
            _write_failed(file, place, each.answer)
        elif isinstance(each.answer, Value):
            _append(file, Facts("value", *place, where=each.answer.place), each.answer.pieces)
        elif isinstance(each.answer, Streaming):
            _append(file, Facts("stream", *place, stream=number), _NOTHING)
        else:
            _append(file, Facts("end", *place), _NOTHING)


def write_items(file: IO[bytes], stream: RemoteIterator) -> Failed | None:
    """Write the items of a stream as they come, then its end; returns how it failed, if it did."""
    while isinstance(item := stream.next_item(), tuple):
        _append(file, Facts("item"), item[0])
        file.flush()
    if not isinstance(item, Failed):
        _append(file, Facts("end"), _NOTHING)
        return None
    _write_failed(file, (0, 0), item)
    return item


def _write_failed(file: IO[bytes], place: tuple[int, int], failed: Failed) -> None:
    raised = failed.raised
    if raised is not None:
        told = msgspec.structs.replace(raised.failure, payload=None)
        facts = Facts("raised", *place, name=raised.name, where=raised.where, failure=told)
        _append(file, facts, raised.pieces or _NOTHING)
        return
    try:
        failed.get()
    except BaseException as problem:
        facts = Facts("problem", *place, name=type_name(problem), text=text(problem))
        _append(file, facts, _encoded(problem))


def _encoded(problem: BaseException) -> Pieces:
    """An exception of ours, with its causes if they can be sent."""
    if isinstance(problem, Exception):
        for depth in (0, CHAIN_DEPTH):
            with contextlib.suppress(Exception):
                found = encoding.encode(portable(problem, depth), own_modules=True)
                return memoryview(b"".join(found.pieces)), found.buffers, found.storages
    return _NOTHING


def _append(file: IO[bytes], facts: Facts, pieces: Pieces) -> None:
    pickle, buffers, storages = pieces
    stored.append(file, [pickle], buffers, storages, msgspec.to_builtins(facts))


class CallRunner:
    """Runs the calls that the head's agent names, each on a thread of its own."""

    def __init__(self, fleet: Fleet, agent: ServiceConnection, folder: Path) -> None:
        self._fleet, self._agent, self._folder = fleet, agent, folder
        self._lock = threading.Lock()
        self._runs: dict[str, NamedRun] = {}
        self._leaving: threading.Timer | None = None

    def serve(self) -> None:
        """Run calls until the agent lets this process go."""
        self._wait_to_leave()
        # Closed at the end: what a call ends with because this client leaves is not reported.
        with self._agent:
            while "leave" not in (order := self._agent.next_reply().value):
                if "run" in order:
                    self._begin(order["run"])
                elif (run := self._runs.get(order["cancel"])) is not None:
                    run.cancel()

    def _begin(self, name: str) -> None:
        run = NamedRun(self._fleet, name, self._folder / name, self._report_stream)
        with self._lock:
            self._runs[name] = run
            if self._leaving is not None:
                self._leaving.cancel()
        threading.Thread(target=self._run, args=(run,), name=f"call-{name}", daemon=True).start()

    def _run(self, run: NamedRun) -> None:
        state: JobState
        try:
            state, problem = run.run()
        except BaseException as failure:
            traceback.print_exc()
            state, problem = "failed", f"{type(failure).__name__}: {failure}"
        with self._lock:
            del self._runs[run.name]
            idle = not self._runs
        # Without this agent the call is lost, which the next one notes.
        with contextlib.suppress(OSError):
            self._report(run.name, state, problem)
        if idle:
            self._wait_to_leave()

    def _wait_to_leave(self) -> None:
        self._leaving = threading.Timer(LINGER_SECONDS, self._ask_to_leave)
        self._leaving.daemon = True
        self._leaving.start()

    def _ask_to_leave(self) -> None:
        # Without its agent, this process ends in any case.
        with self._lock, contextlib.suppress(OSError):
            if not self._runs:
                self._agent.send("leave")

    def _report(
        self, name: str, state: JobState, problem: str = "", *, streams: bool = False
    ) -> None:
        with self._lock:
            self._agent.send("report", name=name, state=state, problem=problem, streams=streams)

    def _report_stream(self, name: str) -> None:
        self._report(name, "running", streams=True)

    # What happens in the pool.

    def note(self, event: Event) -> None:
        """Report a call that a worker was given."""
        if isinstance(event, CallStarted) and (run := self._run_of(event.name)) is not None:
            self._report(run.name, "running")

    def show(self, line: Output) -> None:
        """Keep a line that a call wrote with the call."""
        run = self._run_of(line.task)
        if run is not None:
            run.write(line)
        else:
            print(line, flush=True)

    def _run_of(self, task: str) -> NamedRun | None:
        return self._runs.get(task.rpartition(" (")[2].removesuffix(")"))


def main() -> None:
    """Attach to the pool that this process runs on, and run its calls by name."""
    folder = Path(os.environ[FOLDER]).parent
    runner: list[CallRunner] = []

    def note(event: Event) -> None:
        for each in runner:
            each.note(event)

    def show(line: Output) -> None:
        for each in runner:
            each.show(line)

    with attach(on_event=note) as compute:
        fleet = compute._open_fleet
        # Not `redirect_output`: only what the pool forwards.
        context.pool_listeners.append(show)
        agent = fleet.service(fleet.head, "jobs")
        runner.append(CallRunner(fleet, agent, folder))
        agent.send("serve", job=os.environ[JOB])
        runner[0].serve()


if __name__ == "__main__":
    try:
        main()
    except (EOFError, OSError) as problem:
        sys.exit(f"the agent is gone: {problem}")
