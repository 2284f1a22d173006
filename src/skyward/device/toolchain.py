"""What makes the device's cores: a compiler, sources joined into units, objects that are kept."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from skyward import kernel
from skyward.errors import SkywardError
from skyward.wire.native import SOURCES as LINK_SOURCES
from skyward.wire.native import digest

SOURCES = Path(__file__).parent / "csrc"
PARTS = ("client", "worker")
LINK = "link"
"""The core of links, which needs no torch."""
FLAGS = (
    "-std=c++20",
    "-fPIC",
    # Nobody replaces a core's functions from outside: they may call each other straight.
    "-fno-semantic-interposition",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wno-unused-function",
)
OPTIMIZATION = {"client": "-O1", "worker": "-O2", LINK: "-O2"}
"""The client's core has three quarters of the code. With -O2 it takes 41 s instead of 31 s to
compile, and is no faster beyond the noise: its time goes to PyTorch's own dispatcher."""
UNITS = 2 if kernel.processors() >= 4 else 1
"""Into how many units the sources of a core are joined before they are compiled.

Nearly all of a compiler's time goes to torch's headers: the sources of the client one by one take
226 s of processor time, all in one unit 31 s. So the two cores, side by side on two processors,
take 37 s. Two units for each take 26 s of processor time more: 51 s on two processors, but 28 s
instead of 38 s on sixteen. A precompiled header would save 9 s, but writes 320 MB, and a second
processor has nothing to do meanwhile.
"""
LINK_LIBRARIES = ("-ldl", "-pthread")
TICK_SECONDS = 1.0
"""How often somebody who waits for a compiler hears of it."""
END_SECONDS = 0.05
"""How often compilers that are to end are looked for."""


class CompilerError(SkywardError):
    """The device's core could not be compiled; the message carries what the compiler said."""


@dataclass(frozen=True)
class Compiler:
    """A compiler with its options, and the torch whose headers it reads."""

    command: tuple[str, ...]
    include: Path
    """The headers of torch."""
    torch: str
    """Which torch that is: objects for another one are other objects."""
    options: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    linker: tuple[str, ...] | None = None
    """What links, if it is another command."""
    units: int | None = None
    """Into how many units sources are joined, if not `UNITS`: other units make other bytes."""

    @cached_property
    def identity(self) -> str:
        """What tells apart compilers, and versions of one."""
        # In a folder of its own: zig makes an empty file when it is asked this.
        with tempfile.TemporaryDirectory(prefix="sky-version-") as folder:
            return " ".join(self.command) + run(*self.command, "--version", folder=folder)

    @cached_property
    def cast_policies(self) -> str:
        """The lists in torch's header of autocast, without what it includes; see autocast.cpp."""
        header = (self.include / "ATen" / "autocast_mode.h").read_text()
        return "".join(re.findall(r"^#define AT_FORALL_(?:.*\\\n)*.*\n", header, re.MULTILINE))


@dataclass(frozen=True)
class Unit:
    """Some sources of one core, compiled as one."""

    part: str
    sources: tuple[Path, ...]

    @property
    def weight(self) -> int:
        return sum(map(_weight, self.sources))

    def text(self, compiler: Compiler) -> str:
        """What the compiler reads."""
        included = "".join(f'#include "{source}"\n' for source in self.sources)
        return included if self.part == LINK else compiler.cast_policies + included

    def digest(self, compiler: Compiler) -> str:
        """Changes with everything that goes into the object."""
        headers = [path for path in files_of(self.part) if path.suffix == ".h"]
        words = (*flags_of(self.part), *compiler.options, compiler.identity)
        if self.part != LINK:
            words = (*words, compiler.torch, compiler.cast_policies)
        return digest([*self.sources, *headers], words)


def files_of(part: str) -> list[Path]:
    """The source files of a part's core."""
    if part == LINK:
        return list(LINK_SOURCES.iterdir())
    own = [path for room in (part, "wire") for path in (SOURCES / room).iterdir()]
    return [*own, LINK_SOURCES / "link_functions.h"]


def flags_of(part: str) -> tuple[str, ...]:
    """What every compiler is told for a part."""
    return (*FLAGS, OPTIMIZATION[part])


def units_of(part: str, count: int | None = None) -> list[Unit]:
    """A part's sources, shared out so that every unit takes about as long."""
    count = 1 if part == LINK else count or UNITS
    shares: list[list[Path]] = [[] for _ in range(count)]
    folder = LINK_SOURCES if part == LINK else SOURCES / part
    for source in sorted(folder.glob("*.cpp"), key=lambda path: (-_weight(path), path)):
        min(shares, key=lambda share: sum(map(_weight, share))).append(source)
    return [Unit(part, tuple(sorted(share))) for share in shares if share]


def compile_units(
    units: Sequence[Unit], compiler: Compiler, objects: Path, tick: Callable[[], None] | None = None
) -> dict[Unit, Path]:
    """The objects of some units, in a folder where they stay; those that are there are used.

    `tick` is called about every second meanwhile.
    """
    objects.mkdir(parents=True, exist_ok=True)
    made = {unit: objects / f"{unit.part}-{unit.digest(compiler)}.o" for unit in units}
    # The longest first: a long one at the end would leave processors idle.
    missing = [unit for unit in units if not made[unit].exists()]
    missing.sort(key=lambda unit: -unit.weight)
    running: set[subprocess.Popen[str]] = set()
    with ThreadPoolExecutor(kernel.processors()) as workers:
        compiled = [
            workers.submit(_compile, unit, compiler, made[unit], running) for unit in missing
        ]
        try:
            while wait(compiled, TICK_SECONDS).not_done:
                if tick is not None:
                    tick()
        except BaseException:
            # Ctrl-C, or the end of the program: the compilers may have a minute to go.
            for each in compiled:
                each.cancel()
            # In a loop: one may be about to start.
            while wait(compiled, END_SECONDS).not_done:
                for process in list(running):
                    _end(process)
            raise
        for each in compiled:
            each.result()
    return made


def make(
    targets: Mapping[str, Path],
    compiler: Compiler,
    objects: Path,
    tick: Callable[[], None] | None = None,
) -> None:
    """Compile and link the core of each part to its target; `tick` as for `compile_units`.

    Objects that are in the folder `objects` are not made again, so what was interrupted goes on.
    """
    units = [unit for part in targets for unit in units_of(part, compiler.units)]
    made = compile_units(units, compiler, objects, tick)
    for part, target in targets.items():
        linker = compiler.linker or compiler.command
        libraries = compiler.link
        if part == LINK:
            linker, libraries = compiler.command, LINK_LIBRARIES
        with tempfile.TemporaryDirectory(prefix=f"sky-{part}-", dir=objects) as folder:
            linked = Path(folder, target.name)
            its_objects = [str(path) for unit, path in made.items() if unit.part == part]
            run(*linker, "-shared", *its_objects, "-o", str(linked), *libraries)
            os.replace(linked, target)


def inspect(part: str, compiler: Compiler, flags: tuple[str, ...]) -> None:
    """Have the compiler read a part's sources and write nothing; raises what it finds."""
    with tempfile.TemporaryDirectory(prefix="sky-check-") as folder:
        for number, unit in enumerate(units_of(part)):
            Path(folder, f"{number}.cpp").write_text(unit.text(compiler))
        with ThreadPoolExecutor(kernel.processors()) as workers:
            command = (*compiler.command, *flags, "-isystem", str(compiler.include))
            read = [workers.submit(run, *command, str(p)) for p in Path(folder).iterdir()]
            for each in read:
                each.result()


def run(
    *command: str,
    folder: str | None = None,
    temporary: str | None = None,
    running: set[subprocess.Popen[str]] | None = None,
) -> str:
    """Run a compiler in a folder; returns what it printed, and raises what it complained about.

    A compiler that is killed leaves its temporary files in `temporary`. The process is in `running`
    while it runs.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=None if temporary is None else {**os.environ, "TMPDIR": temporary},
        )
    except OSError as problem:
        raise CompilerError(
            f"the compiler {command[0]!r} does not start: {problem}; name another one with CXX"
        ) from problem
    started = set() if running is None else running
    started.add(process)
    try:
        printed, complaints = process.communicate()
    except BaseException:
        _end(process)
        raise
    finally:
        started.discard(process)
    if process.returncode:
        errors = [line for line in complaints.splitlines() if "error" in line][:20]
        raise CompilerError(
            f"compiling the torch device's core failed:\n{' '.join(command)}\n"
            + "\n".join(errors or complaints.splitlines()[-20:])
        )
    return printed


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a compiler with the programs that it has started, which do the work."""
    import psutil  # takes 20 ms, and is rarely needed

    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.kill()


def _weight(source: Path) -> int:
    """How long a source takes to compile, roughly, in bytes of plain code."""
    text = source.read_text()
    # An operator's header, or a kernel's registration, costs as much as so many bytes.
    return len(text) + 300 * text.count("#include <ATen/") + 1000 * text.count('.impl("')


def _compile(
    unit: Unit, compiler: Compiler, target: Path, running: set[subprocess.Popen[str]]
) -> None:
    with tempfile.TemporaryDirectory(prefix=f"sky-{unit.part}-", dir=target.parent) as folder:
        source, made = Path(folder, "unit.cpp"), Path(folder, "unit.o")
        source.write_text(unit.text(compiler))
        run(
            *compiler.command,
            *flags_of(unit.part),
            *compiler.options,
            # Messages name a file as the package does, wherever it was compiled.
            f"-ffile-prefix-map={folder}=.",
            f"-ffile-prefix-map={SOURCES}=skyward/device/csrc",
            f"-ffile-prefix-map={LINK_SOURCES}=skyward/wire/csrc",
            f"-ffile-prefix-map={compiler.include}=torch/include",
            f"-I{compiler.include}",
            "-c",
            str(source),
            "-o",
            str(made),
            temporary=folder,
            running=running,
        )
        os.replace(made, target)
