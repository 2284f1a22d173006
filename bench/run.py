"""Every benchmark in one table, printed here and written to docs/benchmarks.md.

    make bench
    python bench/run.py [--only functions,objects,device] [--quick]
    python bench/run.py --page    # the page and its charts again, from what is recorded

The rows of each suite are kept in bench/recorded with their machine and date, and the page is made
of all that is kept there; a quick run only prints. A missed bar is shown, and is not an error: the
exit status says whether everything could be measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from charts import chart
from measure import say
from report import Row, load, markdown_table, text_table

import skyward

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
SUITES = {
    "functions": "Calls",
    "objects": "Objects",
    "state": "Shared state and objects that live on a node",
    "attach": "Kept pools",
    "device": "The torch device, on a CPU worker",
    "replay": "Replayed training steps, on a CPU worker",
    "mesh": "A mesh: sharded training by one program, on CPU workers",
    "links": "Links between machines: TLS beside plain C++ programs over the same library",
    "copies": "Copies between devices",
    "ddp": "Distributed training",
    "store": "The model store",
    "files": "Files on nodes",
    "machines": "Containers and SSH hosts",
    "kubernetes": "Kubernetes",
    "slurm": "Slurm",
    "ray": "Ray",
    "aws": "AWS, in a simulated account",
    "scale": "A thousand simulated nodes",
    "page": "The page",
}
CHARTS = PAGE.parent / "images" / "bench"
FIRST = (
    "ResNet-50, AMP, channels last",
    "GPT-2 124M, bf16",
    "BERT-base with dropout, bf16",
    "ViT-base, bf16",
    "Llama with LoRA, bf16",
)
"""The models of the first page's chart."""
LOCALLY = "PyTorch on the same GPU, directly"
RECORDED = HERE / "recorded"
"""The last run of each suite, and runs on machines that not everybody has, as they came."""

TEMPLATE = """\
# Benchmarks

Written by `make bench`; do not edit. {verdict}

In the charts, a shorter bar is better for times and sizes, a longer one for rates. Orange misses
its bar. The table behind a chart has every figure, its spread, and the machine.

Both ends of every measurement share one machine, so a transfer has the sender, the receiver and
the rest of the system on its few cores. Compare ratios rather than figures.

{sections}## How it is measured

- Contenders are interleaved in one run: each measures itself once a round, in rotating order,
  after a warm-up. A figure is the median over the rounds, *p10 to p90* its spread (ours / theirs),
  the ratio that of the medians. A row without a bar is for information.
- *No-op call*: the p50 of calls made one after the other, on one worker. *Tiny tasks*: two
  workers each. Ray and Dask run from `.bench-venv`, in a process of their own that measures itself.
- A *new* tensor differs on every page from all that was sent before, so no cache can help. The
  receiver reads one value of every page inside the timed part, on both sides of a comparison.
  For a tensor sent *again*, and for `sky.put`, the function reads one value: what is timed is the
  call, not the reading.
- The floors are plain blocking Python sockets (`sendall`, `recv_into`) to another process. *Into a
  new buffer* allocates it for every transfer, as anything must that yields a new object; *into one
  reused buffer* does not, which is the least a socket can cost. The *first of a pool* finds no
  memory that was used before, neither here nor on the worker.
- TLS is version 1.3 on both sides, on loopback, with the cipher that OpenSSL prefers.
- *On the wire* is what went through the socket. On the same host a new tensor does not go that way
  either; there the time says that it was not copied again.
- *Client memory* is the peak beyond what the client held before it had a pool: its private memory
  plus every shared-memory file it has open or mapped, sampled every few milliseconds, or the
  kernel's high-water mark of its resident set if that is larger.
- The *torch device* is compared with the same PyTorch in a process of its own: `issuing` is what
  the user's thread spends on `x + 1`, a *step* is forward, backward and a foreach Adam.
- *Into a new tensor* is `x.to(device)`, with the tensor of the round before dropped, so that the
  worker can use its memory again; *and new pages* gives that memory back first
  (`torch.sky.empty_cache`), as with the first tensors of a device. `memcpy` is one thread's.
- *Replayed* steps are those of `sky.replay`; *a local CUDA graph* has the whole step captured by
  hand. The client's processor time is that of the thread that calls the step.
- The *worker thread's* CPU time is the kernel's count for the thread that serves the device while
  operations stream in; a *direct call* is the same operation in a C++ loop (`bench/floor.cpp`),
  below autograd and single-threaded as well. Of ten bursts on either side the best counts.
- The *round trip of 20 ms* is a real delay on the packets between two network namespaces, with
  the client in one and the agent in the other (the testbed's `delay-link`, which needs root). Its
  loopback contender uses the same TLS connections. A *round trip* in the figure is a byte's, there
  and back over plain TCP, taken in the same rounds.
- A *copy between devices* is timed until the target's device has it. *Through the client* is
  `q.copy_(p.cpu())`. *To 4 nodes* passes through a throttle in the benchmark's own process, which
  limits what each node sends, since a machine has no links between its own nodes: without passing
  the tensor on, it would take 4 times as long as to one.
- *Distributed training* runs the same steps, imported from the same file, in workers of a pool and
  in processes of `torchrun`, one thread each; both measure the steps alone, after a warm-up.
- The *weights* are a transformer's, random. What was saved is in the system's page cache, except
  where the disk *has to be read*: there it is dropped from the cache before each load. To *read*
  them is to sum every tensor, since `load_file` maps its file and reads nothing. Saving with 1 %
  *changed* is compared with the first save as bytes a second of the whole. *Over a socket* is
  `torch.save` into memory, a plain TCP connection on loopback, and `torch.load` on the other side.
- *Containers and SSH hosts* are on this machine (the testbed's; containers need root), so
  that both ends of SSH share its cores. A pool is *ready* when all its nodes take calls; it is
  timed from `with` on, after one start that is not. `scp` copies from memory to memory over a
  connection that is there, so that logging in is not counted.
- *Kubernetes* is the testbed's cluster on this machine (or that of `SKYWARD_KUBECONFIG`): client,
  API server, both kubelets and containerds, and the pods share its cores. *After both run* begins
  when the API server tells a watch that the second pod's container runs. A *message there and back*
  and the plain transfers go to a process in the pod, which reads one value of every page. With
  port forwarding the bytes of a call are TLS of the pool's own inside the API server's TLS; those
  of the plain sockets are not. *Requests to the API* are counted by a pretended API server, whose
  pods run on no machine; the processor time includes this server.
- *Scheduling* drives the pool's scheduler with simulated nodes and tasks, in processor time.

## Reproduce

    make setup
    make bench                                   # everything, and this page
    .venv/bin/python bench/run.py --only device  # one section of this page
    .venv/bin/python bench/run.py --quick        # a smoke test: the figures mean little
    .venv/bin/python bench/objects.py --match tls

Run it on a machine that does nothing else. It needs Linux, and about 4 GiB of memory.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="run the benchmarks")
    parser.add_argument("--only", default=",".join(SUITES), help="suites, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small and few: a smoke test")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    options = parser.parse_args()
    if options.page:
        write_page()
        return 0
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(SUITES):
        parser.error(f"no suite named {', '.join(unknown)}; there are {', '.join(SUITES)}")

    rows: list[Row] = []
    for suite in chosen:
        before = os.getloadavg()[0]
        measured = run(suite, quick=options.quick)
        rows += measured
        if not options.quick:
            record(suite, measured, before)
    print(text_table(rows))
    print(verdict(rows))
    if options.quick:
        print(f"{PAGE.relative_to(HERE.parent)} is left as it is: this was a quick run")
    else:
        write_page()
    return 1 if any(row.failed for row in rows) else 0


def run(suite: str, *, quick: bool) -> list[Row]:
    """The rows of one suite, taken in a process of its own."""
    say(f"{suite}:")
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, HERE / f"{suite}.py", "--rows", path]
        done = subprocess.run([*command, "--quick"] if quick else command)
        if path.exists():
            return load(path)
        return [Row(suite, f"ended with {done.returncode} before it had a row", failed=True)]


def verdict(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.met is not None]
    missed = [row for row in judged if not row.met]
    failed = [row for row in rows if row.failed]
    text = f"{len(judged) - len(missed)} of {len(judged)} bars are met."
    if missed:
        named = "; ".join(
            " ".join(filter(None, (row.what, row.ratio or row.ours, row.against))) for row in missed
        )
        text += f" Missed: {named}."
    if failed:
        text += f" Could not be measured: {'; '.join(row.what for row in failed)}."
    return text


def record(suite: str, rows: Sequence[Row], load_before: float) -> None:
    """Keep a suite's rows, with where and when they were taken."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    machine = (
        f"{processor()}, {os.cpu_count()} cores, {platform.machine()}",
        f"{memory:.0f} GiB",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        f"torch {version('torch')}",
        f"skyward {skyward.__version__}",
        f"load before the run {load_before:.2f}",
    )
    kept = {
        "title": SUITES[suite],
        "machine": ", ".join(machine),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": f"python bench/run.py --only {suite}",
        "rows": [asdict(row) for row in rows],
    }
    text = json.dumps(kept, indent=1, ensure_ascii=False)
    _kept(suite).write_text(text + "\n")


def write_page() -> None:
    for name, drawing in drawings():
        CHARTS.mkdir(exist_ok=True)
        (CHARTS / f"{name}.svg").write_text(drawing)
    PAGE.write_text(page())
    print(f"written to {PAGE.relative_to(HERE.parent)}")


def drawings() -> Iterator[tuple[str, str]]:
    """The charts by name: one for each run that is kept, and that of the first page."""
    for path in sorted(RECORDED.glob("*.json")):
        kept = json.loads(path.read_text())
        if drawing := chart(kept["title"], _rows(kept)):
            yield path.stem, drawing
    elsewhere = json.loads((RECORDED / "parity-h200.json").read_text())
    steps = {row.what: row for row in _rows(elsewhere)}
    rows = [replace(steps[f"{name}: steps a second"], against=LOCALLY) for name in FIRST]
    drawing = chart("Training on an NVIDIA H200 through the sky device", rows)
    assert drawing is not None
    yield "first", drawing


def page() -> str:
    """The page with everything that is kept: the suites in their order, then runs elsewhere."""
    suites = [path for path in map(_kept, SUITES) if path.exists()]
    elsewhere = sorted(set(RECORDED.glob("*.json")) - set(suites))
    judged = [row for path in suites for row in _rows(json.loads(path.read_text()))]
    return TEMPLATE.format(
        verdict=verdict(judged),
        sections="".join(map(section, [*suites, *elsewhere])),
    )


def _kept(suite: str) -> Path:
    return RECORDED / f"{suite}.json"


def _rows(kept: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in kept["rows"]]


def section(path: Path) -> str:
    """A section for one run that is kept."""
    kept = json.loads(path.read_text())
    rows = _rows(kept)
    drawn = chart(kept["title"], rows) is not None
    picture = f"![{kept['title']}](images/bench/{path.stem}.svg)\n\n" if drawn else ""
    return (
        f"## {kept['title']}\n\n{picture}"
        f'<details markdown="1"{"" if drawn else " open"}>\n'
        f"<summary>The table, of {kept['date']}</summary>\n\n"
        f"Recorded with `{kept['command']}`: {kept['machine']}.\n\n"
        f"{markdown_table(rows)}\n\n</details>\n\n"
    )


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or "unknown processor"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
