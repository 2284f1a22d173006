"""Where to run: pools, their nodes and workers, and what they do as they change."""

import contextvars
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.calls.lane import Lane

from .conftest import only_in_all, other_case
from .waiting import wait_for

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def compute(pool):
    return pool


@pytest.fixture(scope="module")
def processes(sharing):
    """One node, three processes."""
    with sharing(sky.Compute(worker=sky.Worker(concurrency=3), options=QUIET)) as pool:
        yield pool


@pytest.fixture(scope="module")
def workers(sharing):
    """Two nodes with two workers each."""
    with sharing(sky.Compute(nodes=2, worker=sky.Worker(per_node=2), options=QUIET)) as pool:
        yield pool


@sky.function
def add(a, b=1):
    return a + b


@sky.function
def pid():
    return os.getpid()


@sky.function
def info():
    return sky.instance_info()


@sky.function
def wait_then(path, value):
    wait_for(path)
    return value


@sky.function
def meet(folder, mine, everyone):
    """Returns only if all of them run at the same time."""
    Path(folder, str(mine)).touch()
    for other in range(everyone):
        wait_for(Path(folder, str(other)))
    return os.getpid(), threading.get_ident()


# Entering, leaving, naming.


def test_a_pool_without_arguments_runs_here_with_nothing_to_set_up():
    with sky.Compute(options=QUIET) as pool:
        assert add(1) >> pool == 2
        assert len(pool.nodes) == 1


@pytest.mark.usefixtures("nothing_left")
def test_leaving_a_pool_leaves_no_process_behind():
    with sky.Compute(nodes=2, options=QUIET) as pool:
        pids = pid() @ pool
        assert all(psutil.pid_exists(number) for number in pids)

    assert not any(psutil.pid_exists(number) for number in pids)


def test_an_exception_in_the_block_comes_out_as_it_is():
    with pytest.raises(LookupError, match="mine"), sky.Compute(options=QUIET) as pool:
        add(1) >> pool
        assert repr(pool).endswith(": 1 node>")
        raise LookupError("mine")

    assert repr(pool).endswith(": closed>")


def test_leaving_with_calls_in_flight_fails_them_clearly(tmp_path):
    with sky.Compute(options=QUIET) as pool:
        running = wait_then(tmp_path / "gate", 1) > pool
        queued = add(1) > pool

    for future in (running, queued):
        assert isinstance(future.exception(10), sky.errors.PoolClosedError)


def test_a_pool_cannot_be_entered_twice(compute):
    with pytest.raises(sky.errors.PoolClosedError, match="is already entered; make another"):
        compute.__enter__()

    assert add(1) >> compute == 2


def test_a_timeout_that_a_signal_handler_raises_is_no_lost_executor(compute, monkeypatch):
    """As one that raises within the sending of a call, which would be waited for otherwise."""

    def interrupted(*_):
        monkeypatch.undo()
        raise TimeoutError("too slow")

    monkeypatch.setattr(Lane, "_send", interrupted)
    with pytest.raises(TimeoutError, match="too slow"):
        add(1) >> compute
    assert add(1) >> compute == 2


def test_a_pool_that_was_left_cannot_be_entered_again():
    pool = sky.Compute(options=QUIET)
    with pool:
        pass

    with pytest.raises(sky.errors.PoolClosedError, match=r"is closed, .* make another"), pool:
        pass


def test_a_started_pool_runs_until_it_is_closed(nothing_left):
    pool = sky.Compute(options=QUIET).start()

    assert pool.start() is pool, "starting it again changes nothing"
    assert add(1) >> pool == 2
    assert add(1) >> sky == 2, "the module finds it"
    pool.close()

    assert repr(pool).endswith(": closed>")
    with pytest.raises(sky.errors.PoolClosedError, match="make another Compute"):
        pool.start()


def test_a_pool_that_did_not_start_can_be_started_again(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    pool = sky.Compute(options=QUIET)
    with monkeypatch.context() as patch:
        patch.setattr("skyward.nodes.fleet.Fleet.start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.start()

    with pool:
        assert add(1) >> pool == 2


def test_a_pool_that_was_not_entered_says_how():
    pool = sky.Compute(options=QUIET)

    for use in (lambda: add(1) >> pool, lambda: pool.nodes, pool.stats, lambda: pool.resize(2)):
        with pytest.raises(
            sky.errors.PoolClosedError, match=r"write `with sky\.Compute\(\) as compute"
        ):
            use()


def test_every_pool_has_a_name():
    assert sky.Compute(name="mine").name == "mine"
    assert sky.Compute().name != sky.Compute().name
    assert repr(sky.Compute(name="mine")) == "<sky.Compute mine: not entered>"


@pytest.mark.parametrize(
    ("program", "called"),
    [
        ("/home/me/fit.py", "fit"),
        ("Fine Tuning (v2).py", "fine-tuning-v2"),
        ("/lib/python/pytest/__main__.py", "pytest"),
        ("-c", "python"),
        ("", "python"),
        ("обучение.py", "python"),
    ],
)
def test_a_pool_without_a_name_is_called_after_its_script_and_the_time(
    monkeypatch, program, called
):
    monkeypatch.setattr(sys, "argv", [program])
    names = [sky.Compute().name for _ in range(3)]
    assert len(set(names)) == 3
    for name in names:
        assert re.fullmatch(called + r"-\d{6}(-\d)?", name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "at least 1"),
        ({"nodes": (3, 2)}, "min exceeds max"),
        ({"nodes": "two"}, "two"),
        ({"vcpus": 0}, "vcpus=0"),
        ({"memory_gb": -1}, "memory_gb=-1"),
        ({"name": " "}, "name"),
        ({"provider": "aws"}, "provider='aws'"),
        ({"provider": sky.Local}, "give an instance, not the class"),
        ({"worker": 2}, "worker=2"),
        ({"image": "python:3.12"}, "image='python:3.12'"),
        ({"options": {"console": False}}, "options"),
        ({"accelerator": "A100"}, "accelerator='A100'"),
        ({"volumes": ["/data"]}, "volumes"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_created(arguments, message):
    with pytest.raises(sky.errors.ConfigurationError, match=message):
        sky.Compute(**arguments)


def test_an_accelerator_this_machine_lacks_is_refused_with_what_it_has(monkeypatch):
    monkeypatch.delenv("SKYWARD_DEVICE", raising=False)

    with pytest.raises(sky.errors.ConfigurationError, match=r"accelerator=.*this machine has"):
        sky.Compute(accelerator=sky.accelerators.H100(count=64))


def test_two_pools_at_once_keep_to_themselves(compute):
    with sky.Compute(options=QUIET) as other:
        mine = [add(number) > compute for number in range(50)]
        theirs = [add(number, 1000) > other for number in range(50)]

        assert [future.result(100) for future in mine] == list(range(1, 51))
        assert [future.result(100) for future in theirs] == list(range(1000, 1050))
        assert set(pid() @ compute).isdisjoint(pid() @ other)

    assert add(1) >> compute == 2


def test_a_pool_may_be_used_inside_a_function_of_another(compute):
    @sky.function
    def nested():
        with sky.Compute(options=sky.Options(console=False)) as inner:
            return add(1) >> inner, add(2) >> sky

    assert nested() >> compute == (2, 3)


# Looking.


def test_nodes_show_their_state_and_address(compute):
    assert [view.node for view in compute.nodes] == [0, 1]
    for view in compute.nodes:
        assert view.state == "ready"
        assert view.address == "127.0.0.1"
        assert view.running == ()
        assert (view.accelerator is None) == (view.accelerators == 0)


def test_nodes_show_what_runs_on_them(compute, tmp_path, eventually):
    future = compute.submit(wait_then(tmp_path / "gate", 1), on=1)

    eventually(lambda: compute.nodes[1].running == ("wait_then",))
    assert compute.nodes[0].running == ()
    (tmp_path / "gate").touch()
    future.result(100)
    eventually(lambda: compute.nodes[1].running == ())


def test_stats_count_what_was_done(compute, tmp_path):
    before = compute.stats()

    add(1) >> compute
    add(1) @ compute
    with pytest.raises(ZeroDivisionError):
        sky.function(lambda: 1 / 0)() >> compute
    (wait_then(tmp_path / "gate", 1) > compute).cancel()

    after = compute.stats()
    assert after.submitted - before.submitted == 5
    assert after.succeeded - before.succeeded == 3
    assert after.failed - before.failed == 1
    assert after.cancelled - before.cancelled == 1
    assert after.bytes_sent > before.bytes_sent
    assert after.bytes_received > before.bytes_received
    assert after.seconds > before.seconds


def test_stats_count_workers_that_died(compute):
    before = compute.stats()

    with pytest.raises(sky.WorkerDiedError, match="SIGKILL"):
        sky.function(lambda: os.kill(os.getpid(), signal.SIGKILL))() >> compute

    assert compute.stats().workers_died == before.workers_died + 1
    assert compute.stats().bytes_sent >= before.bytes_sent
    assert add(1) @ compute == [2, 2]


# Growing and shrinking.


@pytest.fixture
def resizable():
    with sky.Compute(options=QUIET) as pool:
        yield pool


def test_a_pool_grows_and_every_node_hears_of_it(resizable):
    assert [i.total_nodes for i in info() @ resizable] == [1]

    resizable.resize(3)

    assert [view.state for view in resizable.nodes] == ["ready"] * 3
    infos = info() @ resizable
    assert [i.node for i in infos] == [0, 1, 2]
    assert {i.total_nodes for i in infos} == {3}
    assert {len(i.peers) for i in infos} == {3}
    assert resizable.run(info(), on=2).node == 2


@other_case
def test_a_pool_shrinks_and_every_node_hears_of_it(resizable):
    resizable.resize(3)

    resizable.resize(1)

    (left,) = info() @ resizable
    assert (left.node, left.total_nodes, len(left.peers)) == (0, 1, 1)
    with pytest.raises(sky.errors.ConfigurationError, match="a node from 0 to 0"):
        resizable.run(add(1), on=1)


def test_a_leaving_node_finishes_what_it_runs(resizable, tmp_path, eventually):
    resizable.resize(2)
    running = resizable.submit(wait_then(tmp_path / "gate", "finished"), on=1)
    eventually(running.running)
    shrinking = threading.Thread(target=resizable.resize, args=(1,))

    shrinking.start()
    eventually(lambda: resizable.nodes[1].state == "draining")
    assert {info.node for info in (info() >> resizable for _ in range(4))} == {0}
    (tmp_path / "gate").touch()

    assert running.result(100) == "finished"
    shrinking.join(100)
    assert len(resizable.nodes) == 1


def test_calls_that_wait_for_a_leaving_node_fail_clearly(resizable, tmp_path, eventually):
    resizable.resize(2)
    running = resizable.submit(wait_then(tmp_path / "gate", 1), on=1)
    waiting = resizable.submit(add(1), on=1)
    anywhere = [add(1) > resizable for _ in range(4)]
    shrinking = threading.Thread(target=resizable.resize, args=(1,))

    shrinking.start()
    problem = waiting.exception(10)
    (tmp_path / "gate").touch()

    assert isinstance(problem, sky.NodeLostError)
    assert running.result(100) == 1
    assert [future.result(100) for future in anywhere] == [2] * 4
    shrinking.join(100)


def test_a_growing_pool_takes_over_what_waits(resizable, tmp_path):
    waiting = [meet(tmp_path, number, 2) > resizable for number in range(2)]

    resizable.resize(2)

    assert len({future.result(100) for future in waiting}) == 2


def test_resizing_to_what_it_is_does_nothing(resizable):
    before = pid() @ resizable

    resizable.resize(1)

    assert pid() @ resizable == before


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_a_size_that_makes_no_sense_is_refused(compute, count):
    with pytest.raises(
        sky.errors.ConfigurationError, match="give a whole number of nodes, 1 or more"
    ):
        compute.resize(count)


@only_in_all
def test_an_elastic_pool_grows_under_load_and_shrinks_when_idle(tmp_path, eventually):
    """Slow: it waits until a backlog is worth a node, and then until a node is idle."""
    options = sky.Options(console=False, idle_timeout=0.3)
    with sky.Compute(nodes=(1, 2), options=options) as pool:
        assert len(pool.nodes) == 1

        calls = [meet(tmp_path, number, 2) > pool for number in range(2)]
        calls += [wait_then(tmp_path / "gate", 1) > pool for _ in range(4)]
        eventually(lambda: [view.state for view in pool.nodes] == ["ready"] * 2)
        (tmp_path / "gate").touch()

        assert len({calls[0].result(100), calls[1].result(100)}) == 2
        assert [future.result(100) for future in calls[2:]] == [1] * 4
        eventually(lambda: len(pool.nodes) == 1)
        eventually(lambda: [i.total_nodes for i in info() @ pool] == [1])


@only_in_all
def test_an_elastic_pool_says_nothing_when_it_is_to_be_quiet(tmp_path, eventually, capsys):
    """Slow: see above."""
    options = sky.Options(console=False, idle_timeout=60)
    with sky.Compute(nodes=(1, 2), options=options) as pool:
        calls = [meet(tmp_path, number, 2) > pool for number in range(2)]
        eventually(lambda: all(future.done() for future in calls))

    assert capsys.readouterr() == ("", "")


@other_case
def test_a_name_is_only_a_name_and_two_pools_may_share_it(compute):
    with sky.Compute(name="train", options=QUIET) as one, sky.Compute(name="train") as other:
        assert pid() >> one != pid() >> other


def test_nodes_can_start_between_the_bounds():
    with sky.Compute(nodes=sky.Nodes(2, min=1, max=3), options=QUIET) as pool:
        assert len(pool.nodes) == 2


# Workers: threads.


def test_threads_run_as_many_calls_at_once_as_asked_for(threads, tmp_path):
    places = sky.gather(*[meet(tmp_path, number, 4) for number in range(4)]) >> threads

    assert len({process for process, _ in places}) == 1
    assert len({thread for _, thread in places}) == 4


def test_threads_take_no_more_than_asked_for(threads, tmp_path, eventually):
    calls = [wait_then(tmp_path / "gate", 1) > threads for _ in range(6)]

    eventually(lambda: len(threads.nodes[0].running) == 4)
    (tmp_path / "gate").touch()
    assert [future.result(100) for future in calls] == [1] * 6


def test_a_context_variable_set_by_one_call_is_not_seen_by_another(threads, tmp_path):
    @sky.function
    def touch(folder, mine, everyone):
        variable = contextvars.ContextVar("level", default="untouched")
        seen = []
        for key, value in contextvars.copy_context().items():
            if key.name == "level":
                seen.append(value)
        variable.set(mine)
        Path(folder, str(mine)).touch()
        for other in range(everyone):
            wait_for(Path(folder, str(other)))
        return seen, variable.get()

    first = sky.gather(*[touch(tmp_path, number, 4) for number in range(4)]) >> threads
    (tmp_path / "again").mkdir()
    again = sky.gather(*[touch(tmp_path / "again", number, 4) for number in range(4)]) >> threads

    assert first == again == [([], number) for number in range(4)]


def test_threads_share_the_state_of_their_process(threads):
    remember = sky.function(lambda value: vars(sys).setdefault("_remembered", value))

    assert {remember(number) >> threads for number in range(8)} == {0}


def test_cancelling_one_thread_leaves_the_others_alone(threads, tmp_path, eventually, patient):
    @sky.function
    def spin(started, stopped):
        Path(started).touch()
        try:
            while True:
                time.sleep(0.001)
        finally:
            Path(stopped).touch()

    others = [wait_then(tmp_path / "gate", number) > threads for number in range(2)]
    before = pid() >> threads
    victim = spin(tmp_path / "started", tmp_path / "stopped") > threads
    eventually((tmp_path / "started").exists)

    victim.cancel()

    eventually((tmp_path / "stopped").exists)
    eventually(lambda: len(threads.nodes[0].running) == 2)
    assert not any(other.done() for other in others)
    (tmp_path / "gate").touch()
    assert [other.result(100) for other in others] == [0, 1]
    assert pid() >> threads == before


def test_an_import_is_done_before_its_thread_is_interrupted(threads, tmp_path, eventually, patient):
    """Torch, for one, cannot be imported again after half an import."""
    (tmp_path / "slow_to_import.py").write_text(
        "import pathlib, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / 'begun').touch()\n"
        "while not (here / 'go').exists():\n"
        "    time.sleep(0.001)\n"
        "(here / 'whole').touch()\n"
    )

    @sky.function
    def importing(folder):
        sys.path.insert(0, folder)
        import slow_to_import  # noqa: F401

        try:
            while True:
                time.sleep(0.001)
        finally:
            Path(folder, "stopped").touch()

    other = wait_then(tmp_path / "gate", "fine") > threads
    victim = importing(str(tmp_path)) > threads
    eventually((tmp_path / "begun").exists)

    victim.cancel()
    (tmp_path / "go").touch()

    eventually((tmp_path / "stopped").exists)
    assert (tmp_path / "whole").exists()
    (tmp_path / "gate").touch()
    assert other.result(100) == "fine"


def test_an_exception_on_one_thread_is_its_calls_alone(threads, tmp_path):
    other = wait_then(tmp_path / "gate", "fine") > threads

    with pytest.raises(ZeroDivisionError):
        sky.function(lambda: 1 / 0)() >> threads
    (tmp_path / "gate").touch()

    assert other.result(100) == "fine"


def test_threads_stream_and_await_too(threads):
    @sky.function
    async def later(x):
        return x + 1

    streams = sky.gather(*[sky.function(lambda: iter_of(100))() for _ in range(4)]) >> threads

    assert [sum(stream) for stream in streams] == [4950] * 4
    assert sky.gather(*[later(number) for number in range(8)]) >> threads == list(range(1, 9))


def iter_of(n):
    yield from range(n)


# Workers: processes.


def test_one_node_runs_several_processes_at_once(processes, tmp_path):
    places = sky.gather(*[meet(tmp_path, number, 3) for number in range(3)]) >> processes

    assert len({process for process, _ in places}) == 3


def test_several_processes_of_a_node_are_one_worker(processes):
    (only,) = info() @ processes

    assert (only.total_nodes, only.workers_per_node, only.total_workers) == (1, 1, 1)
    assert len(processes.nodes) == 1


def test_a_process_that_dies_takes_no_other_with_it(processes, tmp_path):
    other = wait_then(tmp_path / "gate", "fine") > processes

    with pytest.raises(sky.WorkerDiedError, match="exit status 3"):
        sky.function(lambda: os._exit(3))() >> processes
    (tmp_path / "gate").touch()

    assert other.result(100) == "fine"


# Workers: several per node.


def test_every_worker_of_every_node_has_its_rank(workers):
    infos = info() @ workers

    assert [(i.node, i.worker) for i in infos] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [i.global_worker_index for i in infos] == [0, 1, 2, 3]
    assert [i.is_head for i in infos] == [True, False, False, False]
    assert {(i.total_nodes, i.workers_per_node, i.total_workers) for i in infos} == {(2, 2, 4)}
    assert len({i.head_port for i in infos}) == 1


def test_workers_of_a_node_are_processes_of_their_own_and_run_at_once(workers, tmp_path):
    @sky.function
    def meet_all(folder):
        mine = sky.instance_info().global_worker_index
        return meet.local(folder, mine, 4)[0]

    assert len(set(meet_all(tmp_path) @ workers)) == 4


def test_on_picks_the_node_and_any_of_its_workers(workers, tmp_path):
    @sky.function
    def place(folder, mine):
        meet.local(folder, mine, 2)
        return sky.instance_info().node, sky.instance_info().worker

    futures = [workers.submit(place(tmp_path, number), on=1) for number in range(2)]

    assert sorted(future.result(100) for future in futures) == [(1, 0), (1, 1)]


def test_data_is_shared_out_among_all_workers(workers):
    part = sky.function(lambda items: sky.shard(items))

    assert part(list(range(8))) @ workers == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_one_worker_per_accelerator_needs_an_accelerator():
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        pytest.skip("this machine has an accelerator")
    worker = sky.Worker(per_node="accelerator")

    with pytest.raises(sky.errors.ConfigurationError, match="has no accelerator"):
        with sky.Compute(worker=worker, options=QUIET):
            pass


# What nodes are made of.


def test_the_images_environment_reaches_the_functions():
    image = sky.Image(env={"MODEL_HOME": "/models", "EMPTY": ""})
    read = sky.function(lambda: (os.environ["MODEL_HOME"], os.environ["EMPTY"]))

    with sky.Compute(image=image, options=QUIET) as pool:
        assert read() >> pool == ("/models", "")
    assert "MODEL_HOME" not in os.environ


def test_packages_that_are_there_are_fine():
    import numpy

    image = sky.Image(pip=[f"numpy=={numpy.__version__}", "cloudpickle"])

    with sky.Compute(image=image, options=QUIET) as pool:
        assert add(1) >> pool == 2


@pytest.mark.usefixtures("nothing_left")
def test_packages_that_are_missing_are_named_all_at_once():
    image = sky.Image(pip=["no-such-thing", "numpy", "nor-this>=2", "cloudpickle==0.0.1"])

    with pytest.raises(sky.errors.ImageError) as caught, sky.Compute(image=image, options=QUIET):
        pass

    message = str(caught.value)
    for package in ("no-such-thing", "nor-this>=2", "cloudpickle==0.0.1"):
        assert f"pip: {package} (" in message
    assert "numpy" not in message
    assert "or use a provider that builds environments" in message


def test_another_python_is_refused_at_construction():
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"

    sky.Compute(image=sky.Image(python=mine))
    other = "3.12" if mine != "3.12" else "3.13"
    with pytest.raises(
        sky.errors.ConfigurationError, match=rf"'{other}'.* run this Python, {mine}"
    ):
        sky.Compute(image=sky.Image(python=other))


def test_workers_run_where_the_client_does(compute):
    where = sky.function(lambda: os.getcwd())

    assert where() >> compute == os.getcwd()


def test_standalone_workers_know_no_peers():
    options = sky.Options(cluster=False, console=False)

    with sky.Compute(nodes=2, options=options) as pool:
        assert [i.peers for i in info() @ pool] == [(), ()]


def test_a_default_timeout_holds_for_functions_without_their_own():
    options = sky.Options(console=False, default_timeout=0.3)
    patient = sky.function(timeout=20)(lambda: time.sleep(0.5) or "done")

    with sky.Compute(options=options) as pool:
        with pytest.raises(sky.TaskTimeoutError, match=r"timeout of 0\.3 s"):
            wait_then("/nowhere", 1) >> pool
        assert patient() >> pool == "done"


def test_default_retries_hold_for_functions_without_their_own(tmp_path):
    @sky.function
    def dies_once(path):
        if not os.path.exists(path):
            Path(path).touch()
            os._exit(3)
        return "survived"

    with sky.Compute(options=sky.Options(console=False, retries=1)) as pool:
        assert dies_once(tmp_path / "died") >> pool == "survived"


def test_a_forked_child_leaves_the_parents_pool_alone(compute):
    def in_child():
        try:
            add(1) >> compute
        except sky.errors.PoolClosedError as problem:
            return "a forked child must make its own" in str(problem)
        return False

    child = os.fork()
    if not child:
        os._exit(0 if in_child() else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert add(1) @ compute == [2, 2]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"kind": "a:b:c"}, r"device\('a:b:c'\): there is no such device; give 'cuda', 'cuda:1'"),
        ({"kind": ""}, r"device\(''\): there is no such device"),
        ({"kind": 3}, r"device\(3\): there is no such device"),
        ({"kind": "cpu:0", "index": 1}, r"device\('cpu:0', 1\): the index is there twice"),
    ],
)
def test_an_impossible_device_is_a_runtime_error_as_from_torch(wanted, told):
    with pytest.raises(sky.errors.ConfigurationError, match=told) as refused:
        sky.Compute().device(**wanted)
    assert isinstance(refused.value, RuntimeError)


def test_a_device_without_torch_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"pip install 'skyward-torch\[torch\]'"
    ):
        sky.Compute().device()
