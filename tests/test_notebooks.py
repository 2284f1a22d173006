"""Skyward in a notebook, with a real Jupyter kernel: what a user does in cells, and sees below."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("nbclient")

import nbformat
from nbclient import NotebookClient

from skyward.calls.dispatch import Counts
from skyward.compute.snapshot import snapshot

from .conftest import PATIENCE, Eventually, only_in_all, worker_processes
from .kernels import Kernel, kernel_in

pytestmark = pytest.mark.slow
"""A kernel and its pool take seconds to start; most tests share one."""

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = Path(__file__).parents[1] / "docs" / "notebooks.md"
START = """
import time, os, threading
from pathlib import Path
import skyward as sky
compute = sky.Compute(nodes=2, worker=sky.Worker(concurrency=2)).start()

def until(path, seconds=100):
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)

@sky.function
def minus(x): return -x

@sky.function
def endless(begun, ended):
    Path(begun).touch()
    try:
        while True: time.sleep(0.01)
    finally:
        Path(ended).touch()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel with a pool of two nodes, `compute`."""
    with kernel_in(folder) as kernel:
        kernel.first = kernel.run(START)
        kernel.run("%load_ext skyward")
        yield kernel


@only_in_all
def test_a_starting_pool_is_one_display_that_changes(kernel: Kernel) -> None:
    shown = kernel.displays(kernel.first)

    assert len(shown) == 1
    assert "2 nodes ready in" in shown[0]["text/plain"]
    assert "✓" in shown[0]["text/html"]
    assert kernel.text(kernel.first, "stderr") == ""


def test_a_function_of_a_cell_travels_and_its_later_definition_counts(kernel: Kernel) -> None:
    kernel.run("factor = 2\n@sky.function\ndef scale(x): return x * factor")
    assert kernel.value("scale(21) >> compute") == "42"

    kernel.run("factor = 3")
    assert kernel.value("scale(21) >> compute") == "63"
    kernel.run("@sky.function\ndef scale(x): return -x")
    assert kernel.value("scale(21) >> compute") == "-21"


def test_output_is_under_the_cell_of_the_call_while_another_runs(
    kernel: Kernel, folder: Path, eventually: Eventually
) -> None:
    kernel.run("@sky.function\ndef say(gate, word):\n    until(gate)\n    print(word)")
    first = kernel.run(f"future = say({str(folder / 'a')!r}, 'first') > compute")
    second = kernel.begin(f"Path({str(folder / 'a')!r}).touch(); future.result(); print('second')")
    kernel.finish(second)

    eventually(lambda: "first" in kernel.text(first))
    assert "first" not in kernel.text(second)
    assert kernel.text(second) == "second\n"


def test_output_of_futures_map_broadcasts_and_threads_is_under_their_cell(
    kernel: Kernel, folder: Path, eventually: Eventually
) -> None:
    kernel.run("@sky.function\ndef tell(gate, word):\n    until(gate)\n    print(word)")
    gate = str(folder / "b")
    threads = kernel.run(
        "@sky.function\ndef hi(word): print(word)\n"
        f"thread = threading.Thread(target=lambda: tell({gate!r}, 'of-thread') >> compute)\n"
        "thread.start()\n"
        "while not any(node.running for node in compute.nodes): time.sleep(0.005)"
    )
    mapped = kernel.run("list(compute.map(hi, ['m1', 'm2', 'm3']))")
    everywhere = kernel.run("hi('everyone') @ compute")
    kernel.run(f"Path({gate!r}).touch(); thread.join()")

    eventually(lambda: "of-thread" in kernel.text(threads))
    assert sorted(line.split()[-1] for line in kernel.text(mapped).splitlines()) == [
        "m1",
        "m2",
        "m3",
    ]
    lines = sorted(kernel.text(everywhere).splitlines())
    assert lines == ["[node 0] everyone", "[node 1] everyone"]


def test_progress_bars_share_one_display_and_their_last_state_stays(kernel: Kernel) -> None:
    kernel.run(
        "import sys\n"
        "@sky.function\n"
        "def work():\n"
        "    for i in range(0, 101, 10):\n"
        "        sys.stderr.write(f'\\rsteps: {i:3}%|{\"#\" * i:100}| {i}/100 [0.1s]')\n"
        "        sys.stderr.flush(); time.sleep(0.03)\n"
        "    sys.stderr.write('\\n'); print('after')\n"
    )
    cell = kernel.run("work() @ compute")

    shown = [each for each in kernel.displays(cell) if "steps" in each["text/plain"]]
    assert len(shown) == 1, kernel.all(cell)
    assert shown[0]["text/plain"].count("100/100") == 2, "one bar for each node"
    assert "width:100%" in shown[0]["text/html"]
    assert kernel.text(cell, "stderr") == "", "no flood of lines"
    assert kernel.text(cell).count("after") == 2
    assert kernel.updates(cell) < 40


def test_a_bar_of_a_future_changes_under_its_own_cell_while_another_runs(
    kernel: Kernel, folder: Path, eventually: Eventually
) -> None:
    kernel.run(
        "import sys\n"
        "@sky.function\n"
        "def goes_on(gate):\n"
        "    def bar(i):\n"
        "        sys.stderr.write(f'\\rslow: {i:3}%|####| {i}/100 [0.1s]'); sys.stderr.flush()\n"
        "    bar(10); until(gate); bar(100); sys.stderr.write('\\n')\n"
    )
    gate = str(folder / "bar")
    first = kernel.run(f"future = goes_on({gate!r}) > compute")
    eventually(lambda: any("10/100" in each["text/plain"] for each in kernel.displays(first)))
    second = kernel.run(f"Path({gate!r}).touch(); future.result()")

    eventually(lambda: any("100/100" in each["text/plain"] for each in kernel.displays(first)))
    assert len(kernel.displays(first)) == 1, "the display has changed, and there is no second one"
    assert kernel.updates(first) >= 1
    assert kernel.displays(second) == []


def test_nodes_that_join_later_are_shown_under_the_cell_that_asked(kernel: Kernel) -> None:
    grown = kernel.run("compute.resize(3)")
    shrunk = kernel.run("compute.resize(2)")

    assert [each["text/plain"] for each in kernel.displays(grown)] == ["node 2: ready"]
    assert not kernel.text(shrunk, "stderr")


def test_a_long_transfer_is_a_display_of_which_a_line_stays(kernel: Kernel) -> None:
    kernel.run("from skyward.console import transfers\nfrom skyward.store.progress import watched")
    cell = kernel.run(
        "transfers.DELAY = 0\n"
        "with watched(True, 'saving <digits>') as progress:\n"
        "    progress.begin(4096)\n"
        "    progress.advance(1024)\n"
        "    while not progress._is_shown: time.sleep(0.005)\n"
        "    progress.advance(3072)\n"
    )

    assert kernel.updates(cell) >= 1
    (shown,) = kernel.displays(cell)
    assert shown["text/plain"] == "saving <digits>: 4.0 of 4.0 KiB in 0:00"
    assert "&lt;digits&gt;" in shown["text/html"]


def test_an_interrupt_ends_the_call_and_neither_the_kernel_nor_the_pool(
    kernel: Kernel, folder: Path, eventually: Eventually
) -> None:
    begun, ended = folder / "begun", folder / "ended"
    cell = kernel.begin(f"endless({str(begun)!r}, {str(ended)!r}) >> compute")
    eventually(begun.exists)
    kernel.interrupt()
    kernel.finish(cell)

    assert "KeyboardInterrupt" in kernel.error(cell)
    eventually(ended.exists, what="the end of the remote work")
    assert kernel.value("minus(1) >> compute") == "-1"


def test_an_interrupted_await_cancels_the_call(
    kernel: Kernel, folder: Path, eventually: Eventually
) -> None:
    begun, ended = folder / "begun-2", folder / "ended-2"
    cell = kernel.begin(f"await (endless({str(begun)!r}, {str(ended)!r}) > compute)")
    eventually(begun.exists)
    kernel.interrupt()
    kernel.finish(cell)

    assert kernel.error(cell)
    eventually(ended.exists, what="the end of the remote work")
    assert kernel.value("await (minus(1) > compute)") == "-1"


def test_an_interrupt_while_a_pool_starts_leaves_nothing_of_it(
    kernel: Kernel, folder: Path, eventually: Eventually
) -> None:
    before = len(worker_processes())
    begun = folder / "starting"
    kernel.run(
        "import contextlib\n"
        "@contextlib.contextmanager\n"
        "def hold(compute):\n"
        f"    Path({str(begun)!r}).touch()\n"
        "    time.sleep(30)\n"
        "    yield\n"
        "slow = sky.Plugin.create('slow').with_around_client(hold)\n"
        "other = sky.Compute(plugins=[slow])"
    )
    cell = kernel.begin("other.start()")
    eventually(begun.exists)
    kernel.interrupt()
    kernel.finish(cell)

    assert "KeyboardInterrupt" in kernel.error(cell)
    eventually(lambda: len(worker_processes()) == before, what="the end of the other pool")
    assert kernel.value("minus(2) >> compute") == "-2"


def test_a_cell_may_await_and_open_a_pool_with_async_with(kernel: Kernel) -> None:
    kernel.run(
        "async with sky.Compute(options=sky.Options(console=False)) as short:\n"
        "    seen = await (minus(5) > short)"
    )

    assert kernel.value("seen") == "-5"


def test_a_failure_shows_the_lines_of_the_cell_that_defined_the_function(kernel: Kernel) -> None:
    kernel.run("@sky.function\ndef broken(x):\n    y = x + 1\n    return y / 0  # this line")
    shown = kernel.fail("broken(1) >> compute")

    assert "ZeroDivisionError" in shown
    assert "return y / 0  # this line" in shown
    assert "raised by broken on node" in shown


def test_a_module_that_was_reloaded_is_sent_again(kernel: Kernel, folder: Path) -> None:
    module = folder / "shapes.py"
    module.write_text("SIDES = 3\ndef sides(): return SIDES\nclass Shape:\n    name = 'old'\n")
    kernel.run(
        "import importlib, shapes\n"
        "from shapes import sides, Shape\n"
        "by_name = sky.function(lambda: (sides(), Shape().name))\n"
        "by_module = sky.function(lambda: (shapes.sides(), shapes.Shape().name, shapes.SIDES))"
    )
    assert kernel.value("by_name() >> compute, by_module() >> compute") == (
        "((3, 'old'), (3, 'old', 3))"
    )
    module.write_text(
        "SIDES = 400\ndef sides(): return SIDES + 1\nclass Shape:\n    name = 'new'\n"
    )
    kernel.run("importlib.reload(shapes); from shapes import sides, Shape")

    for _ in range(2):
        assert kernel.value("by_name() >> compute, by_module() >> compute") == (
            "((401, 'new'), (401, 'new', 400))"
        )


def test_autoreload_sends_what_changed_on_disk(kernel: Kernel, folder: Path) -> None:
    module = folder / "recipe.py"
    module.write_text("def cook(): return 'raw'\nclass Pot:\n    def stir(self): return 1\n")
    kernel.run("%load_ext autoreload\n%autoreload 2")
    kernel.run(
        "import recipe\nfrom recipe import cook, Pot\n"
        "pot = Pot()\n"
        "serve = sky.function(lambda pot: (cook(), recipe.cook(), pot.stir(), Pot().stir()))"
    )
    assert kernel.value("serve(pot) >> compute") == "('raw', 'raw', 1, 1)"
    module.write_text("def cook(): return 'well done'\nclass Pot:\n    def stir(self): return 22\n")

    assert kernel.value("serve(pot) >> compute") == "('well done', 'well done', 22, 22)"
    kernel.run("%autoreload 0")


def test_a_pool_shows_its_nodes_and_what_they_run(kernel: Kernel, folder: Path) -> None:
    gate = str(folder / "c")
    kernel.run(
        "@sky.function(name='<b>till</b>')\ndef till(path): until(path)\n"
        f"held = till({gate!r}) > compute\n"
        "while not any(node.running for node in compute.nodes): time.sleep(0.005)"
    )
    cell = kernel.run("compute")
    kernel.run(f"Path({gate!r}).touch(); held.result()")
    page = kernel.displays(cell)[0]["text/html"]

    assert page.count("ready") >= 3
    assert "&lt;b&gt;till&lt;/b&gt;" in page
    assert "<b>till</b>" not in page
    assert "calls succeeded" in page
    assert "GiB" in page
    assert "sky.Compute" in kernel.displays(cell)[0]["text/plain"]


def test_calls_and_futures_show_how_they_stand(kernel: Kernel) -> None:
    call, future = (
        kernel.run("minus('<i>')"),
        kernel.run("done = minus(1) > compute; done.result(); done"),
    )

    shown = kernel.displays(call)[0]["text/html"]
    assert "has not run; run it with &gt;&gt; compute" in shown
    assert "&lt;i&gt;" in shown
    assert "done" in kernel.displays(future)[0]["text/html"]
    idle = kernel.run("sky.Compute(name='later')")
    assert "not started" in kernel.displays(idle)[0]["text/html"]


def test_a_cell_with_the_magic_runs_on_the_pool(kernel: Kernel, folder: Path) -> None:
    kernel.run("import math\nbase = 10\ntotal = 1\ndef twice(x): return 2 * x")
    (folder / "beside.py").write_text("def help_out(x): return x + 1000\n")
    kernel.run("import beside")
    cell = kernel.run(
        "%%sky --node 1 -o total,where\n"
        "where = os.environ['COMPUTE_POOL']\n"
        "def inner(): return twice(base) + beside.help_out(0)\n"
        "total += inner()\n"
        "unseen = math.pi\n"
        "print('seen there', total)\n"
        "[total, 'shown']"
    )

    assert "[node 1] seen there 1021" in kernel.text(cell)
    assert kernel.displays(cell)[0]["text/plain"] == "[1021, 'shown']"
    assert (
        kernel.value("total, 'unseen' in globals(), '\"node\": 1' in where")
        == "(1021, False, True)"
    )


def test_a_second_run_of_a_cell_begins_afresh(kernel: Kernel) -> None:
    kernel.run("items = []\ncount = 0")
    for _ in range(2):
        kernel.run("%%sky --node 0 -o items,count\nitems.append(1)\ncount += 1")
        assert kernel.value("items, count") == "([1], 1)"
        kernel.run("items = []\ncount = 0")


def test_the_magic_runs_a_cell_on_every_worker(kernel: Kernel) -> None:
    cell = kernel.run("%%sky --all -o rank\nrank = sky.instance_info().node\nrank * 10")

    assert kernel.value("rank") == "[0, 1]"
    assert [each["text/plain"] for each in kernel.displays(cell)] == ["0", "10"]


def test_a_cell_with_the_magic_may_await(kernel: Kernel) -> None:
    kernel.run(
        "%%sky -o slept\nimport asyncio\nslept: float = 0\nawait asyncio.sleep(0)\nslept += 1"
    )

    assert kernel.value("slept") == "1"


def test_an_error_in_the_magics_cell_shows_its_line(kernel: Kernel) -> None:
    shown = kernel.fail("%%sky\na = 1\nb = a / 0  # here\n")

    assert "ZeroDivisionError" in shown
    assert "line 3, in cell" in shown
    assert "b = a / 0  # here" in shown
    assert re.search(r"-+> 3 b = a / 0  # here", shown), "as in a cell that runs here"
    assert "magics.py" not in shown


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("%%sky\nprint(unheard_of)", "'unheard_of' is not defined in this notebook"),
        ("%%sky --on nowhere\n1", "give a variable that holds a sky.Compute"),
        ("%%sky --node x\n1", "give a node's number, or head"),
        ("%%sky --node 1 --all\n1", "not allowed with"),
        ("%%sky --nod 1 --what\n1", "write %%sky [--on POOL]"),
        ("%%sky -o gone\n1", "the cell has not assigned gone"),
        ("%%sky -o a-b\n1", "'a-b' is not a name; write -o loss,model"),
        ("%%sky\nreturn 1", "'return' outside function"),
    ],
)
def test_a_magic_that_cannot_work_says_why(kernel: Kernel, source: str, message: str) -> None:
    assert message in kernel.fail(source)


def test_an_interrupt_ends_the_magics_cell(
    kernel: Kernel, folder: Path, eventually: Eventually
) -> None:
    begun = folder / "begun-3"
    cell = kernel.begin(f"%%sky\nPath({str(begun)!r}).touch()\nwhile True:\n    time.sleep(0.01)")
    eventually(begun.exists)
    kernel.interrupt()
    kernel.finish(cell)

    assert "KeyboardInterrupt" in kernel.error(cell)
    assert kernel.value("minus(3) >> compute") == "-3"


def test_the_line_magic_shows_pools_and_runs_commands(kernel: Kernel) -> None:
    pools, version = kernel.run("%sky"), kernel.run("%sky --version")

    assert "2 ready" in kernel.displays(pools)[0]["text/html"]
    assert kernel.text(version).startswith("skyward ")


@only_in_all
def test_a_kernel_that_restarts_or_ends_leaves_no_pool(
    folder: Path, eventually: Eventually
) -> None:
    before = {process.pid for process in worker_processes()}

    def left() -> list[int]:
        return [each.pid for each in worker_processes() if each.pid not in before]

    with kernel_in(folder) as kernel:
        kernel.run("import skyward as sky; compute = sky.Compute().start()")
        assert left()
        kernel.restart()
        eventually(lambda: not left(), what="the end of the pool after a restart")
        kernel.run("import skyward as sky; compute = sky.Compute().start()")
        assert left()
    eventually(lambda: not left(), what="the end of the pool with its kernel")


def test_the_cells_of_the_page_about_notebooks_run(kernel: Kernel) -> None:
    cells = re.findall(r"^```py(?:thon)?\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    kernel.run("shared = compute")
    for cell in cells:
        kernel.run(cell)
        # The first program of the page closes the pool that it has started.
        kernel.run("compute = shared")

    assert kernel.value("result, total") == "(9, 285)"
    kernel.run("%autoreload 0")


@only_in_all
def test_the_example_notebook_shows_what_it_promises(tmp_path: Path) -> None:
    """It trains on two workers and on a torch device, in a kernel of its own."""
    pytest.importorskip("sklearn")
    text, shown = executed("notebook", tmp_path)
    assert re.search(r"best width: \d+, accuracy 0\.9\d", text)
    assert re.search(r"on sky:0: loss 0\.\d+", text)
    for told in ("2 nodes ready in", "100%", "2 ready", "accuracy 0.9", "([899, 898], True)"):
        assert any(told in each for each in shown), told


@only_in_all
def test_the_example_of_a_mesh_shows_what_it_promises(tmp_path: Path) -> None:
    """It shards a model over two workers, trains it and saves it, in a kernel of its own."""
    pytest.importorskip("sklearn")
    text, shown = executed("notebook_mesh", tmp_path)
    assert re.search(r"epoch 5: loss 0\.\d+", text)
    assert re.search(r"norms of the parts \d\.\d+ and \d\.\d+, of the whole \d\.\d+", text)
    assert "rank 1 (node 0): index out of range in self" in text
    assert any("accuracy 0.9" in each for each in shown)
    assert sum("rank=0" in each and "rank=1" in each for each in shown) == 2


def executed(name: str, folder: Path) -> tuple[str, list[str]]:
    """What an example prints, and what it shows; it runs in the folder."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is stored without output"
    NotebookClient(
        notebook, timeout=int(PATIENCE), resources={"metadata": {"path": folder}}
    ).execute()
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    assert not any(each.get("name") == "stderr" for each in outputs)
    text = "".join(each.text for each in outputs if each.output_type == "stream")
    return text, [str(each.data) for each in outputs if "data" in each]


def test_a_pool_of_which_only_devices_were_used_tells_of_no_calls() -> None:
    spec = SimpleNamespace(provider=object())
    ledger = SimpleNamespace(cost=None, hourly_cost=None)
    calls = SimpleNamespace(counts=Counts(), traffic=lambda: (2048, 1024))
    fleet: Any = SimpleNamespace(closed=True, spec=spec, dispatcher=calls, ledger=ledger)
    shown = snapshot("p", fleet)
    assert "2.0 KiB sent, 1.0 KiB received" in shown
    assert "calls" not in shown
