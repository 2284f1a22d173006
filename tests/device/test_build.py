"""The cores' compiler at work: what was made is kept, what changed is made again, old is removed.

The sources here are small ones of the tests' own, compiled by the real compiler.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from skyward.device import build, toolchain
from skyward.events import EventStream
from skyward.nodes.devices import PoolDevices
from skyward.wire.messages import CloseDevice, Message, OpenDevice

from ..conftest import Eventually, has_compiler, only_in_all, other_case

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")

REAL = os.environ.get("CXX") or "g++"
BUILD = """
import sys
from pathlib import Path
from skyward.device import build, toolchain
toolchain.UNITS = 2
toolchain.SOURCES = Path(sys.argv[1])
print(*build.libraries(), sep="\\n")
"""


class Workshop:
    """Sources of two cores, a compiler that keeps a log, and an empty cache."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.cache, self.sources = folder / "cache" / "device", folder / "csrc"
        self._log, self._hang = folder / "log", folder / "hang"
        for part in (*build.PARTS, "wire"):
            (self.sources / part).mkdir(parents=True)
        (self.sources / "wire" / "number.h").write_text("#pragma once\n#define NUMBER 1\n")
        for part in build.PARTS:
            for name in "abcd":
                self.write(part, name, f'extern "C" int {name}() {{ return NUMBER; }}')
        compiler = folder / "compiler"
        compiler.write_text(
            # What stands still while the file `hang` is there is a unit with the function `a`.
            "#!/bin/sh\n"
            'for unit; do case $unit in *unit.cpp) grep -o "/[a-z]*/[a-z]*[.]cpp" "$unit" '
            f">>{shlex.quote(str(self._log))}\n"
            f'grep -q client/a.cpp "$unit" && while [ -e {shlex.quote(str(self._hang))} ]; '
            "do sleep 0.05; done;; esac; done\n"
            f'exec {REAL} "$@"\n'
        )
        compiler.chmod(0o755)
        patch.setenv("CXX", str(compiler))
        patch.setenv("SKYWARD_CACHE", str(folder / "cache"))
        patch.setattr(toolchain, "SOURCES", self.sources)
        patch.setattr(toolchain, "UNITS", 2)

    def write(self, part: str, name: str, text: str) -> None:
        text = f'#include "../wire/number.h"\n{text}\n'
        (self.sources / part / f"{name}.cpp").write_text(text)

    def compiled(self) -> list[str]:
        """The sources that were compiled since the last question."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return sorted(line.strip("/") for line in lines)

    def objects(self) -> list[Path]:
        return list(self.cache.glob("objects/*.o"))

    def left_behind(self) -> list[Path]:
        """The folders of compilers that run, or that were killed."""
        return list(self.cache.glob("objects/sky-*"))

    def hang(self, value: bool) -> None:
        if value:
            self._hang.touch()
        else:
            self._hang.unlink()

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", BUILD, str(self.sources)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


EVERY_SOURCE = sorted(f"{part}/{name}.cpp" for part in build.PARTS for name in "abcd")


@only_in_all
def test_a_killed_compile_goes_on_where_it_was(workshop: Workshop, eventually: Eventually) -> None:
    workshop.hang(True)
    with workshop.start() as process:
        # All but the unit that stands still; the process then dies at once and cleans up nothing.
        eventually(lambda: len(workshop.objects()) == 3, 60)
        process.kill()
    kept = {path: path.stat().st_mtime_ns for path in workshop.objects()}
    assert workshop.compiled() == EVERY_SOURCE
    assert workshop.left_behind()

    # What runs now is not taken for what was killed.
    with workshop.start() as process:
        eventually(lambda: len(workshop.left_behind()) == 1, 60)
        (running,) = workshop.left_behind()
        build.library("worker")
        assert workshop.left_behind() == [running]
        workshop.hang(False)
    assert process.returncode == 0
    for path in build.libraries():
        assert ctypes.CDLL(str(path)).a() == 1
    assert not workshop.left_behind()
    again = workshop.compiled()
    assert "client/a.cpp" in again
    assert len(again) == 2, "only the unit that was not finished"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@only_in_all
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=other_case)])
def test_a_compile_that_is_ended_leaves_neither_files_nor_compilers(
    workshop: Workshop, eventually: Eventually, number: signal.Signals
) -> None:
    workshop.hang(True)
    with workshop.start() as process:
        eventually(lambda: len(workshop.objects()) == 3, 60)
        compilers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT}[number]
    assert compilers
    assert not [each for each in compilers if each.is_running()]
    assert not workshop.left_behind()


def test_a_compile_shows_what_it_does_and_for_how_long(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "TICK_SECONDS", 0.01)
    told: list[tuple[str, bool]] = []
    build.library("worker", lambda text, transient: told.append((text, transient)))
    what = "the torch device's worker core"
    first, *states, last = ((re.sub(r"\d+ s$", "N s", text), transient) for text, transient in told)
    assert first == (
        f"compiling {what}, once for this torch (most often less than a minute)",
        False,
    )
    assert set(states) == {(f"compiling {what}, once for this torch: N s", True)}
    assert last == (f"compiled {what} in N s", False)


@only_in_all
def test_who_waits_for_another_process_that_compiles_says_so(
    workshop: Workshop, eventually: Eventually
) -> None:
    workshop.hang(True)
    with workshop.start():
        eventually(lambda: len(workshop.objects()) == 3, 60)
        told: list[tuple[str, bool]] = []

        def show(text: str, transient: bool) -> None:
            told.append((text, transient))
            if len(told) == 1:
                workshop.hang(False)

        build.library("client", show)
    assert told[0][0].startswith("waiting for another process that compiles the torch device's cli")
    assert told[-1][0].startswith("waited ")
    assert [transient for _, transient in (told[0], told[-1])] == [False, False]


def test_what_changed_is_compiled_again_and_nothing_else(workshop: Workshop) -> None:
    client, worker = build.libraries()
    assert workshop.compiled() == EVERY_SOURCE
    assert build.libraries() == [client, worker]
    assert workshop.compiled() == []

    workshop.write("client", "b", 'extern "C" int b() { return NUMBER + 7; }')
    changed, unchanged = build.libraries()
    assert (changed == client, unchanged == worker) == (False, True)
    assert ctypes.CDLL(str(changed)).b() == 8
    again = workshop.compiled()
    assert "client/b.cpp" in again
    assert len(again) == 2

    (workshop.sources / "wire" / "number.h").write_text("#pragma once\n#define NUMBER 5\n")
    assert [ctypes.CDLL(str(path)).a() for path in build.libraries()] == [5, 5]
    assert workshop.compiled() == EVERY_SOURCE, "every source sees the header"


def test_another_compiler_makes_its_own_objects(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.libraries()
    workshop.compiled()
    for path in workshop.cache.glob("*.so"):
        path.unlink()
    build.libraries()
    assert workshop.compiled() == [], "the objects are there"
    for path in workshop.cache.glob("*.so"):
        path.unlink()
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-DOTHER"))
    build.libraries()
    assert workshop.compiled() == EVERY_SOURCE


def test_an_error_names_the_line_and_leaves_the_other_objects(workshop: Workshop) -> None:
    workshop.write("client", "b", "int b() { return nothing; }")
    with pytest.raises(build.CompilerError, match=r"b.cpp:2:.*'nothing'|b.cpp:2:.*nothing"):
        build.libraries()
    assert len(workshop.objects()) == 3
    workshop.compiled()
    workshop.write("client", "b", "int b() { return 0; }")
    build.libraries()
    assert len(workshop.compiled()) == 2


def test_the_cache_keeps_what_was_used_last(workshop: Workshop) -> None:
    client, worker = build.libraries()
    crumbs = workshop.cache / "objects" / "sky-unit-of-a-killed-compiler"
    crumbs.mkdir()
    day = 86400
    for number in range(build.KEPT + 5):
        for path in (workshop.cache / f"old{number}.so", workshop.cache / f"objects/{number}.o"):
            path.touch()
            os.utime(path, (time.time() - day,) * 2)
    os.utime(client, (time.time() - 2 * day,) * 2)
    os.utime(crumbs, (time.time() - day,) * 2)
    assert build.library("client") == client  # it is used, so it stays
    workshop.write("worker", "a", 'extern "C" int a() { return 2; }')
    newer = build.library("worker")
    cores = set(workshop.cache.glob("*.so"))
    assert {client, worker, newer} <= cores
    assert len(cores) == len(workshop.objects()) == build.KEPT
    assert not crumbs.exists()


def test_client_and_node_compile_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Message] = []

    def compiles(parts: Sequence[str], show: build.Show) -> list[Path]:
        assert told == [OpenDevice(1, "cpu")], "the node has begun before"
        raise build.CompilerError("on purpose")

    monkeypatch.setattr(build, "libraries", compiles)
    node: Any = SimpleNamespace(serves=True, tell=told.append)
    roster: Any = SimpleNamespace(closed=False, get=lambda index: node)
    nothing: Any = SimpleNamespace(own_line=None)
    desk = PoolDevices("pool", nothing, roster, None, None, EventStream(), nothing)
    with pytest.raises(build.CompilerError, match="on purpose"):
        desk.get(0, "cpu")
    assert told[1:] == [CloseDevice(1)], "a process that nobody will use ends"


def test_units_weigh_about_the_same() -> None:
    for part in build.PARTS:
        units = toolchain.units_of(part)
        sources = [source for unit in units for source in unit.sources]
        assert sorted(sources) == sorted((toolchain.SOURCES / part).glob("*.cpp"))
        weights = [unit.weight for unit in units]
        assert max(weights) < 1.25 * min(weights), f"{part}: {weights}"


def test_a_compiler_that_does_not_start_is_named(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(workshop.sources / "no-such-compiler"))
    with pytest.raises(build.CompilerError, match=r"no-such-compiler.*name another one with CXX"):
        build.libraries()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.CompilerError, match="install g"):
        build.libraries()


def test_no_name_of_a_source_hides_another_when_sources_are_joined() -> None:
    """Sources in one unit share their anonymous namespace, where a constant hides a header's."""
    sources = toolchain.SOURCES

    def constants(path: Path) -> set[str]:
        text = re.sub(r"//[^\n]*", "", path.read_text())
        listed = re.findall(r"\benum\b[^{;]*\{([^}]*)\}", text)
        found = {
            name for each in listed for name in re.findall(r"\b(k[A-Z]\w*)\s*(?:=|,|\Z)", each)
        }
        for line in re.findall(r"^constexpr [^;]*;", text, re.MULTILINE):
            found.update(re.findall(r"\b(k[A-Z]\w*)\s*=", line))
        return found

    for part in toolchain.PARTS:
        headers = [*(sources / part).glob("*.h"), *(sources / "wire").glob("*.h")]
        seen = set().union(*map(constants, headers))
        assert "kSettings" in seen
        for source in sorted((sources / part).glob("*.cpp")):
            assert not seen & constants(source), f"{source.name} has a name that is taken"
            seen |= constants(source)
