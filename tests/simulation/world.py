"""The world that simulated programs are started in: programs, hosts, and what they print."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import io
import linecache
import os
import shutil
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent

from . import tls
from .kernel import File, NullFile, Process
from .modules import MAIN_IDENT, Machinery, Program, SharedWriter, SimulatedFile

PRELOADED = [
    "asyncio",
    "tempfile",
    "shutil",
    "uuid",
    "secrets",
    "concurrent.futures.thread",
    "skyward",
    "skyward.compute",
    "skyward.worker.agent",
    "skyward.worker.executor",
    "skyward.worker.nested",
    "skyward.worker.services.state",
    "skyward.nodes.fleet",
    "skyward.providers.local",
    "skyward.store.models",
    "skyward.compute.runner",
    "skyward.worker.program",
    "skyward.cli.main",
    "skyward.cli.gc",
    "skyward.nodes.cleanup",
    "tests.simulation.vendor",
]
ENVIRONMENT = {
    "SKYWARD_LINKS": "python",
    "HOME": "/root",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
}


_world: World | None = None


def world(programs: int) -> World:
    """The world of this process, with everything loaded."""
    global _world
    if _world is None:
        _world = World(programs)
    return _world


def _do_once() -> None:
    """Do once what is the same in every program, such as to compile its dataclasses."""
    compiled = functools.cache(functools.partial(compile, filename="<string>", mode="exec"))

    def execute(text: str, *scopes: Any) -> None:
        exec(compiled(text), *scopes)

    dataclasses.__dict__["exec"] = execute
    typing.__dict__["compile"] = functools.cache(compile)
    found: Any = importlib.metadata
    found.entry_points = functools.cache(found.entry_points)
    found.version = functools.cache(found.version)
    # Tracebacks show lines of these.
    for module in list(sys.modules.values()):
        if module.__name__.startswith(("skyward.", "tests.simulation.")) and module.__file__:
            linecache.getlines(module.__file__)


class Shown(File):
    """Takes what a process prints, for the history."""

    def __init__(self, world: World) -> None:
        super().__init__(world.machinery.kernel)
        self._world = world
        self._line = b""

    def events(self) -> int:
        return 4

    def write(self, data: bytes) -> int:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._world.said.append(line.decode(errors="replace"))
            self.kernel.note(f"prints {line.decode(errors='replace')}")
        return len(data)


class World:
    """Programs that are loaded and not used yet, and the machinery that they run on."""

    def __init__(self, programs: int) -> None:
        # First as they are: what they share is loaded over the real modules.
        for name in PRELOADED:
            importlib.import_module(name)
        for name in ("rich.console", "cloudpickle", "xxhash", "numpy", "encodings.ascii"):
            importlib.import_module(name)
        sysconfig.get_config_vars()
        self.machinery = Machinery()
        self.kernel = self.machinery.kernel
        _do_once()
        gc.disable()
        self.programs = [self._load() for _ in range(programs)]
        self.kernel.share()
        self.hosts = False
        """Whether each node is a host of its own; else all is on one."""
        self.said: list[str] = []
        self.commands: dict[str, Callable[[Process], int]] = {}
        """What runs besides Python modules, by the first word."""
        self.kernel.start = self._run
        gc.enable()
        gc.collect()
        gc.freeze()

    def _give_hosts(self, local: Any) -> None:
        """Have each machine of the provider `Local` be a host of its own, if there are hosts."""
        made = local.LocalMachine.__init__

        def make(machine: Any, *args: Any, **given: Any) -> None:
            made(machine, *args, **given)
            if self.hosts:
                machine.address = machine.direct = f"host{machine.node}"

        local.LocalMachine.__init__ = make

    def _host(self, process: Process) -> str:
        """The host of a process that another one has started."""
        folder = process.directory.rpartition("/")[2]
        if self.hosts and folder.startswith("sky-"):
            return f"host{folder.rpartition('-')[2].partition('.')[0]}"
        return process.host

    def begin(self, seed: int | str) -> None:
        """Have everything from now on be what a seed says."""
        self.kernel.random.seed(seed)
        self.kernel.hub = getcurrent()
        # The same in every run of a seed: paths are in messages, and in the keys of tables.
        base = os.environ.get("SIMULATION_FOLDER", "/dev/shm/simulation")
        self.folder = f"{base}-{seed}"
        self._await_folder()

    def _await_folder(self) -> None:
        """Make the folder of the run, empty, once nobody else on this machine runs this seed."""
        while True:
            os.makedirs(self.folder, exist_ok=True)
            try:
                self._held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._held, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(self._held), os.stat(self.folder)):
                    break
                os.close(self._held)
            except FileNotFoundError:
                continue
        for each in os.scandir(self.folder):
            shutil.rmtree(each) if each.is_dir(follow_symlinks=False) else os.unlink(each)

    def end(self) -> None:
        """Remove what the run has left."""
        os.chdir("/")
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._held)

    def spawn(self, argv: list[str], host: str = "client", **environment: str) -> Process:
        """Start a process that no other process has started."""
        process = self.kernel.spawn(
            None,
            argv=argv,
            environment={
                **ENVIRONMENT,
                "TMPDIR": self.folder,
                "SKYWARD_STATE": f"{self.folder}/state",
                "XDG_CACHE_HOME": f"{self.folder}/cache",
                **environment,
            },
            directory=self.folder,
            host=host,
        )
        process.put(0, NullFile(self.kernel))
        process.put(1, Shown(self))
        process.put(2, Shown(self))
        return process

    def _run(self, process: Process, work: Callable[[], None] | None) -> None:
        """The life of a process, on its main thread."""
        thread = self.kernel.current
        assert thread is not None
        thread.ident = MAIN_IDENT
        status = 1
        try:
            status = self._status(process, work)
        finally:
            # It may have forked, and be the child.
            if not thread.process.dead:
                self.kernel.end(thread.process, status)

    def _program(self) -> Program:
        """One that no process has; if there is none any more, it is loaded now."""
        if self.programs:
            return self.programs.pop()
        current, self.kernel.current = self.kernel.current, None
        made = self._load()
        self.kernel.current = current
        return made

    def _load(self) -> Program:
        program = Program(self.machinery, PRELOADED)
        handshake: Any = program.modules["skyward.wire.handshake"]
        real, simulated = handshake.Authority, tls.authority(handshake, self.kernel)
        for module in program.modules.values():
            if getattr(module, "Authority", None) is real:
                module.Authority = simulated  # type: ignore[attr-defined]
        self._give_hosts(program.modules["skyward.providers.local"])
        return program

    def _status(self, process: Process, work: Callable[[], None] | None) -> int:
        program = self._program()
        process.host = self._host(process)
        if process.argv[0] in self.commands:
            name = process.argv[0]
        else:
            name = process.argv[process.argv.index("-m") + 1] if "-m" in process.argv else ""
        output = io.TextIOWrapper(
            SharedWriter(self.kernel, SimulatedFile(self.machinery, 1, "w", closefd=False)),
            encoding="utf-8",
            write_through=True,
        )
        errors = io.TextIOWrapper(
            SharedWriter(self.kernel, SimulatedFile(self.machinery, 2, "w", closefd=False)),
            encoding="utf-8",
            write_through=True,
        )
        given = io.TextIOWrapper(
            io.BufferedReader(SimulatedFile(self.machinery, 0, "r", closefd=False)),
            encoding="utf-8",
        )
        process.system = {
            "argv": [name, *process.argv[process.argv.index(name) + 1 :]] if name else process.argv,
            "orig_argv": list(process.argv),
            "stdin": given,
            "stdout": output,
            "stderr": errors,
            "path": list(sys.path),
            "excepthook": sys.__excepthook__,
        }
        program.modules["os"].environ.update(process.environment)
        self.kernel.enter_again(process, program.modules)
        try:
            result: Any = None
            if work is not None:
                work()
            elif name in self.commands:
                result = self.commands[name](process)
            elif name:
                result = importlib.import_module(name).main()
            else:
                print(f"no program {process.argv}", file=errors)
                result = 127
        except SystemExit as leaving:
            result = leaving.code  # type: ignore[assignment]
        except BaseException:
            self.kernel.note(f"fails: {traceback.format_exc()}")
            traceback.print_exc(file=errors)
            result = 1
        try:
            program.modules["threading"]._shutdown()
            program.modules["atexit"]._run_exitfuncs()
            output.flush()
        except BaseException:
            traceback.print_exc(file=errors)
            result = 1
        if isinstance(result, str):
            print(result, file=errors)
            result = 1
        errors.flush()
        return result or 0
