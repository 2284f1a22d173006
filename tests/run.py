"""Run as a script: the whole suite, in as many pytest processes as the machine is good for.

Files are put together to batches of about five minutes, each one pytest process. Batches begin
longest first, by the seconds in `seconds.txt`. Files that need Podman, pods, jobs, instances or SSH
hosts wait for those more than they compute, so further processes begin with them, and then help the
others. Nothing is run again because it failed: a test that fails at times has or shows a defect.

`make test` gives an order; without `--order`, each commit has one of its own, and each run with
`--all`. A run prints its order, which says what files share a process, and shuffles files, classes
and tests within it.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from skyward.device import torch_build

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
TABLE = TESTS / "seconds.txt"
NEWEST = ROOT / ".venv-newest"
"""An environment with the newest torch that pip offers, and all else from the one that made it."""
REPORTS = ROOT / "build" / ("tests-newest" if Path(sys.prefix) == NEWEST else "tests")
KEPT_SECONDS = 86400.0
"""How long the reports of other runs stay there."""
BATCH_SECONDS = 300.0
"""What a batch is filled up to: pytest, torch and a pool with two devices take 9 s to start."""
UNKNOWN_SECONDS = 30.0
"""What a file is taken for that the table does not have."""
SMALL_SECONDS = 80.0
"""Folders that take less share a batch: 2 s of a processor for each process that is not started.
Larger batches were worse: a processor had nothing to do for the last 45 s."""
PROCESSES = 1 + (os.cpu_count() or 2)
"""Besides those that begin with Podman and SSH hosts. With one less, a quarter of the processors'
time was not used: tests wait for what other processes do. Two more made every test take longer."""
SLOWEST = 25
NOTHING_COLLECTED = 5
LANES = {
    "jobs": re.compile(r"\bslurm_testbed\b"),
    "containers": re.compile(r"\bengine\b"),
    "hosts": re.compile(r"\bsshd\b|\blinked\b"),
    "pods": re.compile(r"\bkube\b"),
    "instances": re.compile(r"\bec2: |\(\"ec2\"\)"),
}
"""What files have in them that need Slurm, the one Podman, SSH hosts, Kubernetes, or EC2."""
LANE_FOLDERS = ("tests/providers/", "tests/network/")
"""Where such files are; elsewhere the words mean other things."""
ORDER = (("instances", "containers"), ("hosts",), ("pods", "jobs"))
"""The lanes of each further process, one after the other; instances and containers share Podman."""
TOGETHER = ("pods", "jobs", "instances")
"""What takes so long to start that one process runs all files that need it."""
ORDERS = 10_000
DTYPES = ("int64", "bool", "complex64", "bfloat16")


@dataclass(frozen=True)
class Batch:
    """Files that one pytest process runs, one after the other."""

    lane: str
    files: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        first, *others = self.files
        return f"{first} and {len(others)} more" if others else first


@dataclass
class Outcome:
    """What became of a batch."""

    batch: Batch
    seconds: float
    processor_seconds: float
    problem: str = ""
    """Why its counts are not all, in a sentence."""
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    slow: list[tuple[float, str]] = field(default_factory=list)
    skipped: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: dict[str, list[str]] = field(default_factory=dict)
    """The tests that failed, each with what it is counted as."""

    @property
    def is_good(self) -> bool:
        return not self.problem and not self.failed


def known_seconds() -> dict[str, float]:
    """The seconds that each file took when they were measured."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {path: float(seconds) for seconds, path in rows}


def lane_of(path: str) -> str:
    """Which process a file belongs to; empty for any."""
    if not path.startswith(LANE_FOLDERS):
        return ""
    text = (ROOT / path).read_text()
    return next((lane for lane, needs in LANES.items() if needs.search(text)), "")


ALONE = ("tests/device/test_whole_runs.py",)
"""Files in a process of their own: what libraries leave behind changes the last bits of others."""


def batches_of(files: Sequence[str], order: int) -> list[Batch]:
    """The files in batches, longest first; those of one folder share what its fixtures start."""
    known = known_seconds()
    shuffle = random.Random(order).shuffle
    found: list[Batch] = []
    groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for path in files:
        lane = lane_of(path)
        apart = path if path in ALONE else "" if lane else str(Path(path).parent)
        groups[lane, apart].append(path)
    for (lane, _), group in groups.items():
        shuffle(group)
        # A mesh is four processes with torch: its files share one.
        group.sort(key=lambda path: "/test_mesh" not in path)
        bins: list[tuple[list[str], float]] = []
        for path in group:
            seconds = known.get(path, UNKNOWN_SECONDS)
            for index, (members, filled) in enumerate(bins):
                if lane in TOGETHER or filled + seconds <= BATCH_SECONDS:
                    bins[index] = ([*members, path], filled + seconds)
                    break
            else:
                bins.append(([path], seconds))
        found += [Batch(lane, tuple(members), filled) for members, filled in bins]
    shuffle(found)
    return sorted(put_together(found), key=lambda batch: -batch.seconds)


def put_together(batches: Sequence[Batch]) -> list[Batch]:
    """The batches, with the small ones that need nothing special joined to fewer."""
    found: list[Batch] = []
    joined = Batch("", (), 0.0)
    for batch in batches:
        if batch.lane or batch.seconds > SMALL_SECONDS or set(batch.files) & set(ALONE):
            found.append(batch)
            continue
        joined = Batch("", (*joined.files, *batch.files), joined.seconds + batch.seconds)
        if joined.seconds > SMALL_SECONDS:
            found.append(joined)
            joined = Batch("", (), 0.0)
    return [*found, joined] if joined.files else found


class Suite:
    """The batches that are left, and the outcomes of those that ended."""

    def __init__(self, batches: Sequence[Batch], options: Sequence[str], folder: Path) -> None:
        self.waiting = list(batches)
        self.total = len(batches)
        self.options = options
        self.folder = folder
        self.outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, processes: int) -> None:
        """Run everything; returns when all of it has ended."""
        there = {batch.lane for batch in self.waiting}
        lanes = [lanes for lanes in ORDER if there & set(lanes)]
        threads = [
            threading.Thread(target=self._work, args=(lanes,))
            for lanes in [*lanes, *[()] * processes]
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            # The pytest processes got the same Ctrl-C, and end by themselves.
            self._stopped = True
            for thread in threads:
                thread.join()
            raise

    def _next(self, lanes: tuple[str, ...]) -> Batch | None:
        """The next batch of these lanes; after those, one that belongs to no lane."""
        with self._lock:
            for each in (*lanes, ""):
                mine = [batch for batch in self.waiting if batch.lane == each]
                if mine and not self._stopped:
                    self.waiting.remove(mine[0])
                    return mine[0]
            return None

    def _work(self, lanes: tuple[str, ...]) -> None:
        while (batch := self._next(lanes)) is not None:
            outcome, text = run_pytest(batch, self.options, self.folder)
            with self._lock:
                self.outcomes.append(outcome)
                self._tell(outcome, text)

    def _tell(self, outcome: Outcome, text: str) -> None:
        number = f"{len(self.outcomes):>3}/{self.total}"
        print(
            f"{number} {outcome.seconds:5.0f} s {outcome.processor_seconds:5.0f} s processor  "
            f"{counted(outcome.counts)}  {outcome.batch}",
            flush=True,
        )
        if not outcome.is_good:
            print(text, flush=True)
            if outcome.problem:
                print(f"{' '.join(outcome.batch.files)}: {outcome.problem}", flush=True)


def run_pytest(batch: Batch, options: Sequence[str], folder: Path) -> tuple[Outcome, str]:
    """Run a batch in one process; gives what became of its tests, and what pytest printed."""
    name = re.sub(r"\W+", "-", batch.files[0]).strip("-")
    report, log = folder / f"{name}.xml", folder / f"{name}.log"
    command = [
        *(sys.executable, "-m", "pytest", "-q", f"--durations={SLOWEST}"),
        *(f"--junitxml={report}", "-o", "junit_family=xunit1", *options, *batch.files),
    ]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment()
        )
        _, status, usage = os.wait4(process.pid, 0)
        code = process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    outcome = Outcome(batch, seconds, usage.ru_utime + usage.ru_stime)
    if report.exists():
        read_report(report, outcome)
    else:
        said = f"signal {-code}" if code < 0 else f"exit status {code}"
        outcome.problem = f"pytest ended without a report ({said}): its tests are not counted"
        outcome.problem += where_it_hung(log.read_text(errors="replace"))
    # A file that skips itself as a whole, or that the options select nothing of.
    empty = code == NOTHING_COLLECTED and (outcome.skipped or options)
    if not outcome.problem and code not in (0, 1) and not empty:
        outcome.problem = f"pytest ended with exit status {code}"
    if not outcome.problem and code == 1 and not outcome.failed:
        outcome.problem = "pytest failed, though no test did"
    return outcome, log.read_text(errors="replace")


def where_it_hung(text: str) -> str:
    """Where the main thread was when a test's time was over, from what pytest printed."""
    _, is_there, stack = text.rpartition("Stack of MainThread")
    frames = re.findall(r'File ".*?((?:tests|src)/.*)", line (\d+), in (\w+)\n(.*)', stack)
    at = [f"\n  {path}:{line} in {name}: {code.strip()}" for path, line, name, code in frames]
    return f"; a test did not end:{''.join(at)}" if is_there else ""


def environment() -> dict[str, str]:
    """The environment of a pytest process."""
    found = dict(os.environ)
    # Every pool starts processes: without bytecode each of them compiles our sources again.
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    # Several test processes share each processor: threads of one would only wait for each other.
    # An example that trains took 20 s so instead of 31 s beside four other processes.
    found.setdefault("OMP_NUM_THREADS", "1")
    # Else torch's compiler compiles a program for each kind of vector instructions, to see whether
    # it may use them: 18 s of a processor where torch has no cache yet.
    found.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    return found


def read_report(report: Path, outcome: Outcome) -> None:
    """Add up what pytest has written down."""
    modules = {path.removesuffix(".py").replace("/", "."): path for path in outcome.batch.files}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = name_of(case, modules)
        kinds = {child.tag for child in case}
        if (skipped := case.find("skipped")) is not None:
            if skipped.get("type") == "pytest.xfail":
                kinds.add("xfailed")
            else:
                outcome.skipped[skipped.get("message") or "no reason given"] += 1
        kind = next((k for k in ("error", "failure", "xfailed", "skipped") if k in kinds), "passed")
        kind = {"failure": "failed", "error": "errors"}.get(kind, kind)
        if kind in ("failed", "errors"):
            outcome.failed.setdefault(name, []).append(kind)
        outcome.counts[kind] += 1
        outcome.slow.append((float(case.get("time") or 0), name))


def name_of(case: ElementTree.Element, modules: dict[str, str]) -> str:
    """How pytest calls a test; one that a class inherits belongs to the file of the class."""
    within = case.get("classname") or ""
    for module, path in modules.items():
        if within == module or within.startswith(f"{module}."):
            classes = within.removeprefix(module).split(".")[1:]
            return "::".join([path, *classes, case.get("name") or ""])
    return f"{case.get('file')}::{case.get('name')}"


def counted(counts: collections.Counter[str]) -> str:
    """Counts as pytest writes them."""
    kinds = ("failed", "errors", "passed", "skipped", "xfailed")
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind]) or "no tests"


def minutes(seconds: float) -> str:
    """Seconds as a person reads them."""
    return f"{int(seconds) // 60} min {int(seconds) % 60:02} s"


def summarise(outcomes: Sequence[Outcome], seconds: float) -> bool:
    """Print what a reader wants to know in the end; whether all is well."""
    slow = sorted((pair for each in outcomes for pair in each.slow), reverse=True)[:SLOWEST]
    print(f"\n== slowest {SLOWEST} tests")
    for took, name in slow:
        print(f"{took:7.1f} s  {name}")
    skipped = sum((each.skipped for each in outcomes), collections.Counter())
    if skipped:
        print("\n== skipped")
        for reason, number in skipped.most_common():
            print(f"{number:5}  {reason}")
    bad = [each for each in outcomes if not each.is_good]
    if bad:
        print("\n== failed")
        for each in bad:
            for name in each.failed:
                print(name)
            if each.problem:
                print(f"{' '.join(each.batch.files)}: {each.problem}")
    counts = sum((each.counts for each in outcomes), collections.Counter())
    processor = sum(each.processor_seconds for each in outcomes)
    print(f"\n== {counted(counts)} in {minutes(seconds)}, {minutes(processor)} of processor time")
    return not bad


def tell_how_again(outcomes: Sequence[Outcome], order: int) -> None:
    """Print the commands that repeat a run, and each batch of it that failed, in its order."""
    python = os.path.relpath(sys.executable)
    names = ("SKYWARD_OPS_DTYPES", "SKYWARD_TEST_ALL", "SKYWARD_TEST_ORDER")
    given = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    print("\n== in the same order again")
    print(shlex.join([python, *sys.argv, f"--order={order}"]))
    for each in outcomes:
        if not each.is_good:
            print(shlex.join(["env", *given, python, "-m", "pytest", *each.batch.files]))


def choose_dtypes(everything: bool) -> str:
    """The dtypes of op_db's samples: one, so that no result depends on the day, or all."""
    given = os.environ.get("SKYWARD_OPS_DTYPES")
    return given or ",".join(("float32", *(DTYPES if everything else ())))


def write_table(outcomes: Sequence[Outcome]) -> None:
    """Write down how long the tests of each file took; what was not run keeps its line."""
    known = known_seconds()
    for path in {path for each in outcomes for path in each.batch.files}:
        known[path] = 0.0
    for each in outcomes:
        for seconds, name in each.slow:
            if (path := name.partition("::")[0]) in known:
                known[path] += seconds
    lines = [f"{seconds:6.1f} {path}" for path, seconds in sorted(known.items())]
    TABLE.write_text("\n".join(["# Seconds of each file: tests/run.py --measure", *lines]) + "\n")


def on_newest_torch() -> bool:
    """Run the device's tests on the newest torch that pip offers; whether all is well."""
    print("\n== the device's tests on the newest torch", flush=True)
    python = NEWEST / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(NEWEST)], check=True)
    install = [python, "-m", "pip", "-q", "install", "--upgrade", "torch"]
    done = subprocess.run(
        [*install, *shlex.split(os.environ.get("TORCH_PIP_ARGS", ""))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        # All that pip says where it has no index, or one without a torch for this Python.
        if "No matching distribution found for torch" in done.stderr:
            print(f"skipped: pip offers no torch: {said}")
            return True
        print(f"failed: pip cannot install the newest torch: {said}")
        return False
    asked = "from importlib import metadata; print(metadata.version('torch'))"
    told = subprocess.check_output([python, "-I", "-c", asked], text=True)
    version = told.strip().partition("+")[0]
    if version == metadata.version("torch").partition("+")[0]:
        print(f"skipped: torch {version} is the newest, and the tests have run on it")
        return True
    # After its own packages, of which torch is one.
    (folder,) = NEWEST.glob("lib/python*/site-packages")
    (folder / "others.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    print(f"torch {version}, after {metadata.version('torch')} above", flush=True)
    subprocess.run([python, "-m", "skyward.device.build"], stdout=subprocess.DEVNULL)
    # Not all of them: what takes long is about ourselves.
    told_here = ("SKYWARD_TEST_ALL", "SKYWARD_OPS_DTYPES")
    plain = {name: value for name, value in os.environ.items() if name not in told_here}
    found = subprocess.run([python, __file__, str(TESTS / "device")], env=plain)
    if found.returncode == 0 and not torch_build.is_tried(version):
        print(f"the device passes on torch {version}: add it to TRIED in {torch_build.__file__}")
    return found.returncode == 0


def order_of_commit() -> int:
    """The order of this commit, so that CI's is the one that its author has tried."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    try:
        said = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        # No checkout.
        return random.randrange(ORDERS)
    return int(said, 16) % ORDERS


def new_folder() -> Path:
    """A folder for the logs and reports of this run; those of earlier runs stay for a day."""
    for left in REPORTS.glob("*/"):
        if time.time() - left.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    folder = REPORTS / str(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def test_files(given: Sequence[str]) -> Iterator[str]:
    """The test files below the paths given, or all."""
    for each in given or [str(TESTS)]:
        path = Path(each).resolve()
        found = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        for file in found:
            yield str(file.relative_to(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files or folders; all when left out")
    parser.add_argument("--all", action="store_true", help="all dtypes of op_db, examples in full")
    parser.add_argument("--newest", action="store_true", help="the device's, on the newest torch")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--order", type=int, help="that of another run, which printed it")
    parser.add_argument("--measure", action="store_true", help="write seconds.txt after the run")
    parser.add_argument("--pytest", action="append", default=[], help="an option for pytest")
    told = parser.parse_args()
    if told.newest:
        return 0 if on_newest_torch() else 1
    os.environ["SKYWARD_OPS_DTYPES"] = choose_dtypes(told.all)
    if told.all:
        os.environ["SKYWARD_TEST_ALL"] = "1"
    files = list(test_files(told.paths))
    order = told.order
    if order is None:
        order = random.randrange(ORDERS) if told.all else order_of_commit()
    os.environ["SKYWARD_TEST_ORDER"] = str(order)
    batches = batches_of(files, order)
    suite = Suite(batches, told.pytest, new_folder())
    print(
        f"{len(files)} files in {len(batches)} batches; "
        f"op_db with {os.environ['SKYWARD_OPS_DTYPES']}; --order {order}",
        flush=True,
    )
    began = time.monotonic()
    suite.run(told.processes)
    if told.measure:
        write_table(suite.outcomes)
    good = summarise(suite.outcomes, time.monotonic() - began)
    if not good:
        tell_how_again(suite.outcomes, order)
    lost = set(batches) - {outcome.batch for outcome in suite.outcomes}
    for batch in lost:
        print(f"{' '.join(batch.files)}: was not run")
    if told.all and not told.paths:
        good = on_newest_torch() and good
    return 0 if good and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
