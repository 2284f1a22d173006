"""Stacks: where the workers of a pool are, as their agents see it."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from skyward.calls.task import Standing
from skyward.errors import SkywardError
from skyward.wire.channel import ServiceConnection

ANSWER_SECONDS = 12.0
"""How long the client waits for a node; its agent takes five seconds for a process that hangs."""
AT_ONCE = 64
"""How many nodes the client asks at the same time."""

STANDING_SECONDS = 9.0
"""How long an agent has to answer; the client cancels the task a moment later in any case."""
FRAMES = 2
"""How many frames of the user's code an error shows."""

_NO_TASK = (0, "", 0.0)
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "/lib/python3")
_COLLECTIVES = ("/torch/distributed/", "/jax/experimental/multihost_utils.py")
_WRAPPERS = ("wrapper", "<lambda>", "inner", "_fn")
_WAITING = {"threading.py", "socket.py", "ssl.py", "selectors.py", "queue.py"}

Open = Callable[[int, str], ServiceConnection]
"""Opens a connection to a service of a node, as `Fleet.service` does."""


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A call that a thread is in."""

    file: str
    line: int
    function: str
    source: str
    """The line itself; empty if neither the node nor this machine has the file."""
    internal: bool
    """Whether the code is Skyward's own."""

    def __str__(self) -> str:
        where = f'File "{self.file}", line {self.line}, in {self.function}'
        return f"{where}\n  {self.source}" if self.source else where


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread of a worker's process; `frames` begins with the outermost call."""

    name: str
    task_id: int
    """The number of the task that the thread runs; 0 if it runs none."""
    task: str
    """The name of the task that the thread runs; empty if it runs none."""
    seconds: float
    """For how long it has run the task."""
    frames: tuple[StackFrame, ...]

    @property
    def user_frames(self) -> tuple[StackFrame, ...]:
        """The frames inside the code of the user; none for a thread of Skyward's that waits."""
        inner = list(itertools.dropwhile(_starts_thread, self.frames))
        inner = [frame for frame in inner if not _imports(frame)]
        is_ours = bool(inner) and inner[0].internal
        inner = list(itertools.dropwhile(lambda frame: frame.internal, inner))
        if is_ours and not self.task and all(map(_only_waits, inner)):
            return ()
        return tuple(inner)


def _starts_thread(frame: StackFrame) -> bool:
    """Whether every thread begins with such a frame."""
    first = frame.function in ("_bootstrap", "_bootstrap_inner", "run")
    return "<frozen runpy>" in frame.file or (first and frame.file.endswith("threading.py"))


def _imports(frame: StackFrame) -> bool:
    """Whether it is the import system's own; an import has six of them, and tracebacks none."""
    return frame.file.startswith("<frozen importlib")


def _only_waits(frame: StackFrame) -> bool:
    """Whether Skyward's own threads wait in such frames."""
    return frame.internal or os.path.basename(frame.file) in _WAITING


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """The threads of one process: an executor, or the process of a torch device."""

    node: int
    worker: int | None
    """None for a device, and if the node does not answer."""
    slot: int
    kind: str
    """"executor"; else the device's kind, such as "cuda:0"; "node" if the node does not answer."""
    pid: int
    tasks: tuple[tuple[int, str, float], ...]
    """The number and the name of each task that runs, and for how many seconds it has run."""
    threads: tuple[ThreadStack, ...]
    answered: bool
    """False while C code holds the interpreter, which its agent sees in another way."""
    problem: str
    """Why there are no threads; empty if there are."""

    @property
    def where(self) -> str:
        """The process's place, in words."""
        if self.kind == "node":
            return f"node {self.node}"
        if self.worker is None:
            return f"node {self.node} device {self.kind}"
        slot = f" process {self.slot}" if self.slot else ""
        return f"node {self.node} worker {self.worker}{slot}"

    def text(self, *, everything: bool = False) -> str:
        """The stacks as a person reads them; `everything` adds Skyward's own frames and threads."""
        head = self.where + (f" (pid {self.pid})" if self.pid else "")
        doing = ", ".join(f"{name} for {seconds:.1f} s" for _, name, seconds in self.tasks)
        # What the process of a device does is not known here: it has no tasks.
        rest = "" if self.worker is None else "idle"
        lines = [f"{head}: {doing or self.problem or rest}".rstrip()]
        if doing and self.problem:
            lines.append(f"  {self.problem}")
        if not self.answered and self.threads:
            lines.append("  C code holds the interpreter, or the process has no processor")
        for thread in self.threads:
            frames = thread.frames if everything else thread.user_frames
            if not frames:
                continue
            lines.append(f"  thread {thread.name or 'without a name'}:")
            lines += [f"    {line}" for line in _folded(frames, everything=everything)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


class Stacks(tuple[ProcessStacks, ...]):
    """The stacks of every process of a pool; `print` shows them.

    >>> print(compute.stacks())
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))


@dataclass(frozen=True, slots=True)
class PoolStacks:
    """The stacks of one pool."""

    pool: str
    """The pool's identifier."""
    name: str
    processes: tuple[ProcessStacks, ...]
    problem: str = ""
    """Why there are none; empty if there are."""

    @classmethod
    def of(cls, pool: str, name: str, look: Callable[[], Stacks]) -> Self:
        """The stacks that a look at a pool gives, or its problem: the pool may be closing."""
        try:
            return cls(pool, name, tuple(look()))
        except (SkywardError, OSError, EOFError) as problem:
            return cls(pool, name, (), str(problem) or type(problem).__name__)


def _folded(frames: Iterable[StackFrame], *, everything: bool) -> Iterable[str]:
    """The frames in lines; some of Skyward's own in a row become one line."""
    hidden = 0
    for frame in frames:
        if frame.internal and not everything:
            hidden += 1
            continue
        if hidden:
            yield f"({hidden} frames of Skyward)"
            hidden = 0
        yield from str(frame).split("\n")
    if hidden:
        yield f"({hidden} frames of Skyward)"


def read_stacks(nodes: Iterable[int], open_service: Open) -> Stacks:
    """Ask the agents of all these nodes; one that does not answer is named with the reason."""
    asked = list(nodes)
    if not asked:
        return Stacks()
    with ThreadPoolExecutor(min(AT_ONCE, len(asked)), "skyward-stacks") as threads:
        found = threads.map(lambda node: node_stacks(node, open_service), asked)
        # A list first: while a tuple is filled from a generator, `gc.get_objects` breaks it.
        return Stacks([each for stacks in found for each in stacks])


def node_stacks(node: int, open_service: Open, seconds: float = ANSWER_SECONDS) -> Stacks:
    """Ask the agent of one node."""
    answers: queue.SimpleQueue[Stacks] = queue.SimpleQueue()
    opened: queue.SimpleQueue[ServiceConnection] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with open_service(node, "stacks") as agent:
                opened.put(agent)
                told = agent.ask("stacks")
            answers.put(Stacks([_process(node, each) for each in told]))
        except (SkywardError, OSError, EOFError) as problem:
            answers.put(Stacks([_silent(node, str(problem))]))

    # A daemon: a connection to a machine that is gone may take a minute to fail.
    threading.Thread(target=ask, name="skyward-stacks", daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        with contextlib.suppress(queue.Empty):
            opened.get_nowait().channel.abort()
        return Stacks([_silent(node, f"its agent did not answer in {seconds:g} s")])


def _silent(node: int, problem: str) -> ProcessStacks:
    return ProcessStacks(node, None, 0, "node", 0, (), (), False, problem)


def _process(node: int, told: dict[str, Any]) -> ProcessStacks:
    running = {thread: (task, name, seconds) for task, name, thread, seconds in told["tasks"]}
    return ProcessStacks(
        node,
        None if told["worker"] < 0 else told["worker"],
        told["slot"],
        told["kind"],
        told["pid"],
        tuple((task, name, seconds) for task, name, _, seconds in told["tasks"]),
        tuple(
            ThreadStack(name, *running.get(ident, _NO_TASK), tuple(map(_frame, reversed(frames))))
            for ident, name, frames in told["threads"]
        ),
        told["answered"],
        told["problem"],
    )


def _frame(told: list[Any]) -> StackFrame:
    file, line, function, source, internal = told
    # A notebook's cells and a script's own file may be here alone.
    source = source or linecache.getline(file, line).strip()
    return StackFrame(file, line, function, source, internal)


def standing_of(task: int, pid: int, stacks: Stacks) -> Standing:
    """Where a task is, from the stacks of its node and the process that has it."""
    process = next((each for each in stacks if each.pid == pid), None)
    if process is None:
        problems = [each.problem for each in stacks if each.problem]
        return Standing("where it was is not known" + "".join(f": {each}" for each in problems[:1]))
    if task not in [number for number, _, _ in process.tasks]:
        others = ", ".join(name for _, name, _ in process.tasks)
        return Standing("it had not begun" + (f": its worker runs {others}" if others else ""))
    thread = next((each for each in process.threads if each.task_id == task), None)
    return _standing(thread, process)


def _standing(thread: ThreadStack | None, process: ProcessStacks) -> Standing:
    frames = thread.user_frames if thread is not None else ()
    if not frames:
        return Standing(f"where it was is not known: {process.problem or 'it shows no stack'}")
    own = [frame for frame in frames if not _is_library(frame)] or list(frames)
    innermost = own[-1]
    place = f"{os.path.basename(innermost.file)}:{innermost.line} in {innermost.function}"
    if innermost.source:
        place += f": {innermost.source}"
    shown = own[-FRAMES:] + ([frames[-1]] if frames[-1] is not innermost else [])
    lines = "\n".join(f"  {line}" for frame in shown for line in str(frame).split("\n"))
    collective = _collective(frames)
    doing = f"it waited in the collective {collective}" if collective else "it was here"
    if not process.answered:
        doing += ", in C code that holds the interpreter"
    return Standing(f"{doing}:\n{lines}", place, collective)


def _is_library(frame: StackFrame) -> bool:
    return frame.internal or any(each in frame.file for each in _LIBRARIES)


def _collective(frames: tuple[StackFrame, ...]) -> str:
    """The collective that the frames are in; empty if they are in none."""
    for frame in frames:
        if any(part in frame.file for part in _COLLECTIVES) and frame.function not in _WRAPPERS:
            return frame.function
    return ""
