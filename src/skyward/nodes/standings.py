"""Standings: where the tasks are whose time is over, from the stacks of their workers."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future

from skyward.calls.lane import Lane
from skyward.calls.standing import Standing
from skyward.calls.task import Task
from skyward.nodes.stacks import Open, ProcessStacks, StackFrame, Stacks, ThreadStack, node_stacks

SECONDS = 2.8
"""How long an agent has to answer; the client cancels the task a moment later in any case."""
FRAMES = 2
"""How many frames of the user's code an error shows."""

_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "/lib/python3")
_COLLECTIVES = ("/torch/distributed/", "/jax/experimental/multihost_utils.py")
_WRAPPERS = ("wrapper", "<lambda>", "inner", "_fn")


class Standings:
    """Finds tasks on their workers; tasks of one node that are looked for at once share a look."""

    def __init__(self, open_service: Open) -> None:
        self._open = open_service
        self._lock = threading.Lock()
        self._asking: dict[int, Future[Stacks]] = {}

    def find(self, lane: Lane, task: Task) -> Standing:
        """Where a task is; waits for the node's agent."""
        with self._lock:
            asked = self._asking.get(lane.node)
            if asked is None:
                mine: Future[Stacks] = Future()
                self._asking[lane.node] = mine
        if asked is None:
            try:
                mine.set_result(node_stacks(lane.node, self._open, SECONDS))
            except BaseException as problem:
                mine.set_exception(problem)
            finally:
                with self._lock:
                    del self._asking[lane.node]
            asked = mine
        return standing_of(task.id, lane.pid, asked.result())


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
