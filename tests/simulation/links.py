"""Links alone, between two processes on two hosts; and what must hold, whatever is between them."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .kernel import Process
from .scenario import Scenario
from .world import World

PORT = 7000
LIMIT_SECONDS = 20.0
"""So long after the last fault everything has arrived: a connection that has fallen silent is
noticed after 10 s, and an attempt to connect again takes 5 s."""
SETTLE_SECONDS = 5.0
LOOK_SECONDS = 0.5
GONE = "its process is gone"
READERS = ("loop", "loop", "blocking")
FAR_SECONDS = 0.02
"""What bytes take between hosts that are far apart: large writes go over several connections."""
SMALL = (0, 1, 60, 60, 300, 1500, 6000)
SIZES = (*SMALL, *SMALL, 15_000, 30_000, 90_000)


@dataclass
class Step:
    """A message, and how long its writer waits before it writes it."""

    size: int
    pause: float
    is_answered: bool = False
    """Whether who reads it sends one of the same size back."""
    follows: tuple[str, int] | None = None
    """Another message, which must have come before the task of this one begins."""


Task = tuple[str, int, Step]
"""The writer and the number of a message, and what was to be sent."""


@dataclass
class Writer:
    """One thread that writes messages."""

    name: str
    steps: list[Step]
    sent: int = 0
    """How many writes have returned."""
    given: int = 0
    """How many of them the kernel has for certain."""


@dataclass
class Plan:
    """One link, who reads and writes at its ends, and what has come of that."""

    number: int
    readers: dict[str, str]
    """How each end reads: with the client's loop, a thread that waits, or a reader of tasks."""
    patient: dict[str, bool]
    writers: dict[str, list[Writer]]
    channels: dict[str, Any] = field(default_factory=dict)
    got: Counter[str] = field(default_factory=Counter)
    """How many messages of each writer have come."""
    answered: Counter[str] = field(default_factory=Counter)
    """The same of answers, by the writer of what they answer."""
    losses: int = 0
    """How often the client has lost a connection of it."""
    over: dict[str, str] = field(default_factory=dict)
    """Why it has ended, by the end that has noticed."""

    def missing(self) -> list[str]:
        """What has not come yet."""
        found = []
        for writer in (*self.writers["client"], *self.writers["worker"]):
            if self.got[writer.name] < len(writer.steps):
                found.append(
                    f"{self.got[writer.name]} of {len(writer.steps)} of {writer.name} have come"
                )
            count = sum(each.is_answered for each in writer.steps)
            if self.answered[writer.name] < count:
                found.append(f"{self.answered[writer.name]} of {count} answers to {writer.name}")
        return found


class Links(Scenario):
    """Two processes, the links between them, and what goes wrong on the way."""

    killed = ("worker",)
    stopped = ("client", "worker")
    spans = (0.002, 0.01, 0.05, 0.3, 1.0, 5.0, 20.0)

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        random = self.random
        world.hosts = True
        self.network.seconds = FAR_SECONDS if random.random() < 0.2 else 0.0002
        self.window = random.choice((4_000, 20_000, 100_000, 8 << 20))
        """How many uncounted bytes are kept at most; an end sends its count after an eighth."""
        self.plans = [self._plan(number) for number in range(random.choice((1, 1, 2, 3)))]
        self._follow(self.plans[0], self.plans[-1])
        self.given_up = False
        self.calm = self.kernel.now
        """Since when nothing goes wrong."""
        self.killed_at: dict[str, int] | None = None
        """How many writes of each writer the kernel had when its process was killed."""
        self._choose_faults()
        world.commands["client"] = self._client
        world.commands["worker"] = self._worker

    def _choose_faults(self) -> None:
        if self.random.random() < 0.85:
            kinds = ["cut", "cut", "cut", "late", "silence", "partition", "stop", "worker"]
            self.kinds = {self.random.choice(kinds) for _ in range(self.random.randint(1, 2))}

    def _plan(self, number: int) -> Plan:
        random = self.random
        readers = {"client": random.choice(READERS), "worker": random.choice((*READERS, "tasks"))}
        if number == 0 and random.random() < 0.4:
            readers["worker"] = "tasks"
        writers: dict[str, list[Writer]] = {"client": [], "worker": []}
        for end, threads in writers.items():
            for each in range(random.choice((0, 1, 1, 2, 3) if end == "worker" else (1, 1, 2, 3))):
                pauses = random.choice(
                    ((0.0,), (0.0, 0.0, 0.0, 0.001, 0.05), (0.0, 0.03, 0.7, 3.0))
                )
                sizes = random.choice((SMALL, SIZES, (60,), (15_000,)))
                answers = random.choice((0.0, 0.0, 0.3, 1.0))
                steps = [
                    Step(
                        random.choice(sizes),
                        random.choice(pauses) * random.random(),
                        is_answered=random.random() < answers,
                    )
                    for _ in range(random.choice((1, 3, 10, 30)))
                ]
                threads.append(Writer(f"{end}-{number}-{each}", steps))
        patient = {"client": False, "worker": random.random() < 0.7}
        return Plan(number, readers, patient, writers)

    def _follow(self, one: Plan, other: Plan) -> None:
        """Have some messages of a link need others, as calls need bytes that come beside them."""
        if one.readers["worker"] != "tasks":
            return
        for writer in one.writers["client"]:
            for step in writer.steps:
                if self.random.random() < 0.3:
                    # Of the same link, too: what was lost on the way is sent again there.
                    before = self.random.choice([*one.writers["client"], *other.writers["client"]])
                    step.follows = before.name, self.random.randrange(len(before.steps))

    # The run.

    def run(self) -> None:
        """Run both processes until all has arrived, and look at what has."""
        kernel = self.kernel
        self.worker = self.world.spawn(["worker"], host="host0")
        self.client = self.world.spawn(["client"])
        self._begin_faults()
        kernel.at(kernel.now + LOOK_SECONDS, self._look)
        kernel.run(lambda: not kernel.living)
        self._check()

    @property
    def finished(self) -> bool:
        """Whether nothing more is to come."""
        if self.given_up:
            return True
        if self.worker.dead:
            return all("client" in each.over for each in self.plans)
        return not any(each.missing() for each in self.plans)

    def _look(self) -> None:
        """Look now and then whether what was sent arrives."""
        kernel, network = self.kernel, self.network
        faults = [process for process in self._living() if process.stopped]
        if network.unreachable or faults or any(each.tears for each in network.live()):
            self.calm = kernel.now
        writing = any(
            writer.sent < len(writer.steps) and any(step.pause > 0.1 for step in writer.steps)
            for each in self.plans
            for end in each.writers.values()
            for writer in end
        )
        if writing and kernel.now < 1000 + 60.0:
            self.calm = kernel.now
        since = max(self.calm, network.broken_at, network.late_until)
        if kernel.now - since > LIMIT_SECONDS and not self.given_up:
            self.over = True
            if not self.finished:
                kernel.note(kernel.stacks())
                for each in self.plans:
                    what = "; ".join(each.missing())
                    if what and not self.worker.dead:
                        self._says(f"link {each.number}: {what}, {LIMIT_SECONDS:g} s later")
                    elif self.worker.dead and "client" not in each.over:
                        self._says(f"link {each.number} goes on without its process")
            self.given_up = True
            self.ending = kernel.now
            kernel.note("nothing more is waited for")
        if self.given_up and kernel.now - self.ending > LIMIT_SECONDS:
            for process in self._living():
                self._says(f"{process.name} does not end")
                kernel.note(kernel.stacks())
                kernel.end(process, 1)
        if kernel.living:
            kernel.at(kernel.now + LOOK_SECONDS, self._look)

    def _fault(self) -> None:
        before = {
            writer.name: writer.given if self._writes(each) else writer.sent
            for each in self.plans
            for writer in each.writers["worker"]
        }
        was_dead = self.worker.dead
        super()._fault()
        self.calm = self.kernel.now
        if self.worker.dead and not was_dead:
            self.killed_at = before

    def _writes(self, plan: Plan) -> bool:
        """Whether a thread of the worker is in a write: it then sends what others have written."""
        channel = plan.channels.get("worker")
        return channel is not None and (
            channel.link.outgoing._sending.locked() or channel.link.outgoing._due
        )

    # The processes.

    def _credentials(self, name: str) -> Any:
        from skyward.wire import handshake

        saved = handshake.SavedAuthority('{"authority": "pool"}', "key")
        return handshake.Authority("pool", saved).issue(name)

    def _resize(self) -> None:
        """Have counts, windows and stripes of sizes that small messages reach."""
        from skyward.wire import frames
        from skyward.wire.link import backlog, incoming, large, outgoing

        incoming.COUNT_EVERY = self.window // 8
        outgoing.LINK_WINDOW = self.window
        outgoing.QUEUED_MAX = self.window // 8
        backlog.CHUNK = 16 << 10
        frames.INLINE_BODY = 20_000
        for module in (incoming, large):
            module.STRIPED_MIN = 50_000
        large.STRIPE_PART = large.STRIPED_HEAD = 8_000

    def _worker(self, process: Process) -> int:
        """The end that listens."""
        import time

        from skyward.wire.listener import Listener

        self._resize()
        threads: list[Any] = []
        accepted: list[Any] = []

        def accept(channel: Any, hello: Any) -> None:
            accepted.append(channel)
            plan = self.plans[int(hello.role)]
            # The client may have given up this link before it was there.
            with contextlib.suppress(EOFError, OSError):
                channel.receive()
                if "worker" in plan.channels:
                    self._says(f"link {plan.number} was made twice")
                self._use(plan, "worker", channel, threads)

        listener = Listener(f"tcp:0.0.0.0:{PORT}", "pool", self._credentials("node"), accept)
        while not self.finished:
            time.sleep(LOOK_SECONDS)
        listener.close()
        self._leave(accepted, threads)
        return 0

    def _client(self, process: Process) -> int:
        """The end that connects."""
        import threading
        import time

        from skyward.errors import SkywardError
        from skyward.wire.handshake import Dialer
        from skyward.wire.messages import Hello, Ping

        self._resize()
        threads: list[Any] = []
        credentials = self._credentials("client")

        def open_one(plan: Plan) -> None:
            hello = Hello(pool="pool", role=str(plan.number), pid=process.pid)
            while not self.finished:
                dialer = Dialer(f"tcp:host0:{PORT}", hello, credentials, "node", gone=GONE)
                try:
                    channel, _ = dialer.open()
                except (OSError, EOFError, SkywardError) as problem:
                    self.kernel.note(f"link {plan.number} is not opened: {problem}")
                    if self.worker.dead:
                        plan.over["client"] = str(problem)
                    time.sleep(0.1)
                else:
                    channel.send(Ping(0))
                    self._use(plan, "client", channel, threads)
                    return

        opening = [threading.Thread(target=open_one, args=(plan,)) for plan in self.plans]
        for each in opening:
            each.start()
        for each in opening:
            each.join()
        while not self.finished:
            time.sleep(LOOK_SECONDS)
        self._leave([each.channels["client"] for each in self.plans if each.channels], threads)
        return 0

    def _leave(self, channels: list[Any], threads: list[Any]) -> None:
        self.given_up, self.ending = True, self.kernel.now
        for channel in channels:
            channel.close()
        for each in threads:
            each.join() if hasattr(each, "join") else each.stop()

    def _use(self, plan: Plan, end: str, channel: Any, threads: list[Any]) -> None:
        """Read and write on one end of a link."""
        import threading

        self.kernel.note(f"link {plan.number} is open")
        plan.channels[end] = channel
        if plan.patient[end]:
            channel.be_patient()
        if end == "client":

            def changed(connected: bool) -> None:
                if not connected and not self.worker.dead and not self.finished:
                    plan.losses += 1
                self.kernel.note(f"link {plan.number} is {'made again' if connected else 'lost'}")

            channel.on_change(changed)
        reading = plan.readers[end]
        if reading == "loop":
            from skyward.calls.loop import Loop

            loop = Loop()
            loop.watch(
                channel,
                lambda frame: self._take(plan, end, channel, frame),
                lambda problem: self._ended(plan, end, problem),
            )
            threads.append(loop)
        elif reading == "blocking":
            threads.append(threading.Thread(target=self._read, args=(plan, end, channel)))
            threads[-1].start()
        else:
            threading.Thread(target=self._run_tasks, args=(plan, channel), daemon=True).start()
        for writer in plan.writers[end]:
            threads.append(threading.Thread(target=self._write, args=(plan, end, channel, writer)))
            threads[-1].start()

    def _ended(self, plan: Plan, end: str, problem: BaseException) -> None:
        self.kernel.note(f"link {plan.number} has ended: {problem}")
        plan.over[end] = str(problem)
        if not self.given_up and not self.worker.dead:
            self._says(f"link {plan.number} has ended: {problem}")

    def _write(self, plan: Plan, end: str, channel: Any, writer: Writer) -> None:
        import time

        from skyward.wire.messages import Question

        for number, step in enumerate(writer.steps):
            if step.pause:
                time.sleep(step.pause)
            try:
                channel.send(
                    Question(writer.name, {}, number), (_body(writer.name, number, step.size),)
                )
                if step.size > self.window:
                    channel.wait_for_room()
            except OSError as problem:
                if not self.given_up and not self.worker.dead:
                    self._says(f"{writer.name} cannot write: {problem}")
                return
            writer.sent += 1
            if not self._writes(plan):
                writer.given = writer.sent

    def _read(self, plan: Plan, end: str, channel: Any) -> None:
        try:
            while True:
                self._take(plan, end, channel, channel.receive())
        except (OSError, EOFError) as problem:
            self._ended(plan, end, problem)

    def _take(self, plan: Plan, end: str, channel: Any, frame: Any) -> Task | None:
        """A message has come: whether it is the next one, and what was sent."""
        from skyward.wire import messages
        from skyward.wire.channel import whole_of

        message = messages.decode(frame.kind, frame.meta)
        body = whole_of(channel, frame)
        name, number = message.what, message.number
        if message.arguments:
            plan.answered[name] += 1
            return None
        writers = [each for every in plan.writers.values() for each in every if each.name == name]
        step = writers[0].steps[number]
        if plan.got[name] != number:
            self._says(f"message {number} of {name} came instead of {plan.got[name]}")
        if bytes(body) != _body(name, number, step.size):
            self._says(f"message {number} of {name} came with other bytes")
        plan.got[name] += 1
        self.counts["messages"] += 1
        if step.is_answered and plan.readers[end] != "tasks":
            # A thread that waits for the kernel must not wait for counts, too, which only it reads.
            size = min(step.size, 10_000) if plan.patient[end] else step.size
            self._answer(channel, name, number, size)
        return name, number, step

    def _answer(self, channel: Any, name: str, number: int, size: int) -> None:
        from skyward.wire.messages import Question

        # Who has lost its link has said so.
        with contextlib.suppress(OSError):
            channel.send(Question(name, {"answer": True}, number), (bytes(size),))

    def _run_tasks(self, plan: Plan, channel: Any) -> None:
        """Read as an executor does: between tasks on this thread, else on another one."""
        import threading
        import time

        from skyward.worker.reader import TaskReader

        waiting: list[Task] = []

        def has_come(step: Step) -> bool:
            if step.follows is None:
                return True
            name, number = step.follows
            return any(each.got[name] > number for each in self.plans)

        def read_one() -> None:
            try:
                frame = channel.receive()
                task = self._take(plan, "worker", channel, frame)
            except (OSError, EOFError) as problem:
                self._ended(plan, "worker", problem)
                raise SystemExit from None
            if task is not None:
                waiting.append(task)
                look()

        def look() -> None:
            """Begin the tasks that have all that they need."""
            with lock:
                for task in [each for each in waiting if has_come(each[2])]:
                    waiting.remove(task)
                    reader.put(task)

        def look_again() -> None:
            # As the thread that reads what travels beside the calls.
            while not self.given_up:
                time.sleep(0.05)
                if waiting:
                    look()

        lock = threading.Lock()
        reader: Any = TaskReader(read_one, lambda: bool(waiting))
        threading.Thread(target=look_again, daemon=True).start()
        while True:
            name, number, step = reader.next()
            if step.pause:
                time.sleep(step.pause)
            self.calm = self.kernel.now
            if step.is_answered:
                self._answer(channel, name, number, step.size)

    # The end.

    def _check(self) -> None:
        for process in (self.worker, self.client):
            if process.status and (process is self.client or self.killed_at is None):
                self._says(f"{process.name} has ended with {process.status}")
        for line in self.world.said:
            if line.startswith("Traceback"):
                self._says(f"a process shows an error: {self.world.said[-1]}")
                break
        losses = sum(each.losses for each in self.plans)
        self.counts["losses"] += losses
        if losses > self.network.broken and self.killed_at is None:
            self._says(f"{losses} connections were lost, and {self.network.broken} were broken")
        for plan in self.plans:
            if self.worker.status == 0 and not plan.missing():
                self._check_counts(plan)
            if self.killed_at is not None and self.kinds == {"worker"} and plan.patient["worker"]:
                for writer in plan.writers["worker"]:
                    if plan.got[writer.name] < (count := self.killed_at.get(writer.name, 0)):
                        self._says(
                            f"{writer.name} had sent {count} when its process was killed, and "
                            f"{plan.got[writer.name]} have come"
                        )

    def _check_counts(self, plan: Plan) -> None:
        """What one end has received is what the other one has sent."""
        client, worker = (plan.channels[end].link for end in ("client", "worker"))
        for sender, receiver in ((client, worker), (worker, client)):
            # A large write that waits for counts when the link is closed is not in the backlog, nor
            # is a small one whose thread did not go on after it was sent.
            sent = max(sender.outgoing._backlog.end, sender.outgoing._goal)
            sent += sum(len(data) for data, start in sender.outgoing._queue if start == -1)
            received = receiver.connections.received
            if sent != received:
                self._says(f"link {plan.number}: {sent} bytes were sent, {received} counted")


def _body(name: str, number: int, size: int) -> bytes:
    """Bytes that are of this message alone."""
    piece = Random(f"{name} {number}").randbytes(61)
    return (piece * (size // 61 + 1))[:size]
