"""Shared objects: the same from every task and from the client, and as Python's own behave."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Iterator, MutableMapping, MutableSet
from typing import Any

import pytest

import skyward as sky

from ..conftest import Eventually, Sharing, other_case


@pytest.fixture(scope="module", params=["unix", pytest.param("tcp", marks=other_case), "threads"])
def pool(request: pytest.FixtureRequest, sharing: Sharing) -> Iterator[sky.Compute]:
    """Two nodes on Unix sockets, over TLS, and with threads for their tasks."""
    executor: Any = "thread" if request.param == "threads" else "process"
    provider = sky.Local(transport="tcp" if request.param == "tcp" else "unix")
    worker = sky.Worker(concurrency=2, executor=executor)
    options = sky.Options(console=False)
    with sharing(sky.Compute(provider, nodes=2, worker=worker, options=options)) as compute:
        yield compute


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return str(request.node.nodeid[-200:])


@sky.function
def adds(name: str, count: int) -> int:
    return [sky.counter(name).add() for _ in range(count)][-1]


@sky.function
def does(code: str, **names: Any) -> Any:
    """Evaluate an expression on a node."""
    return eval(code, {"sky": sky, **names})


def test_no_increment_of_four_workers_is_lost(pool: sky.Compute, name: str) -> None:
    sky.gather(*[adds(name, 250) for _ in range(4)]) >> pool
    assert sky.counter(name, on=pool).value == 1000


def test_all_nodes_and_the_client_see_one_dict(pool: sky.Compute, name: str) -> None:
    shared: sky.dict[Any, Any] = sky.dict(name)
    assert isinstance(shared, MutableMapping)
    for node in (0, 1):
        pool.run(does("sky.dict(name).update({node: {'rank': node}})", name=name, node=node), node)
    assert shared.copy() == {0: {"rank": 0}, 1: {"rank": 1}}
    assert list(shared) == [0, 1]
    assert pool.run(does("len(d), 1 in d, d.pop(1), d.get(1, 'none')", d=shared), 1) == (
        2,
        True,
        {"rank": 1},
        "none",
    )
    with pytest.raises(KeyError):
        shared[1]
    with pytest.raises(KeyError):
        del shared[1]
    assert shared == {0: {"rank": 0}}
    shared.clear()
    assert not shared


def test_updates_of_a_dict_are_atomic(pool: sky.Compute, name: str) -> None:
    calls = [does("[d.change('n', lambda n: n + 1, 0) for _ in range(25)][-1]", d=sky.dict(name))]
    sky.gather(*calls * 4) >> pool
    shared: sky.dict[str, Any] = sky.dict(name)
    assert shared["n"] == 100
    assert shared.compare_and_set("n", 100, 7)
    assert not shared.compare_and_set("n", 100, 8)
    assert not shared.compare_and_set("missing", 100, 8)
    assert shared.setdefault("n", 9) == 7
    assert shared.setdefault("m", 9) == 9
    assert shared.popitem() == ("m", 9)
    with pytest.raises(KeyError):
        shared.change("missing", lambda n: n)


def test_a_set_says_to_one_caller_that_an_element_is_new(pool: sky.Compute, name: str) -> None:
    firsts = sky.gather(*[does("sky.set(n).add_new('x')", n=name) for _ in range(4)]) >> pool
    assert sorted(firsts) == [False, False, False, True]
    shared: sky.set[Any] = sky.set(name)
    assert isinstance(shared, MutableSet)
    shared |= {1, (2, "b")}
    assert shared == {"x", 1, (2, "b")}
    assert shared & {1, 3} == {1}
    shared.discard("absent")
    with pytest.raises(KeyError):
        shared.remove("absent")
    assert {shared.pop() for _ in range(3)} == {"x", 1, (2, "b")}
    with pytest.raises(KeyError):
        shared.pop()


def test_a_counter_is_set_if_it_is_what_the_caller_thinks(pool: sky.Compute, name: str) -> None:
    counter = sky.counter(name)
    assert counter.add(5) == 5
    assert counter.add(-2) == int(counter) == 3
    assert counter.compare_and_set(3, 10)
    assert not counter.compare_and_set(3, 11)
    counter.set(0)
    assert counter.value == 0
    with pytest.raises(sky.errors.ConfigurationError, match=r"whole numbers, not in 0\.5"):
        counter.add(0.5)  # type: ignore[arg-type]
    with pytest.raises(sky.errors.ConfigurationError, match="63 bits"):
        counter.set(1 << 62)
        counter.add(1 << 62)


def test_each_item_of_a_queue_goes_to_one_task(pool: sky.Compute, name: str) -> None:
    jobs: sky.queue[int] = sky.queue(name)
    futures = [does("[q.get(timeout=200) for _ in range(5)]", q=jobs) > pool for _ in range(4)]
    for number in range(20):
        jobs.put(number)
    assert sorted(n for future in futures for n in future.result(100)) == list(range(20))
    assert jobs.empty()


def test_a_full_queue_makes_the_producer_wait(pool: sky.Compute, name: str) -> None:
    jobs: sky.queue[Any] = sky.queue(name, 2)
    jobs.put("a")
    jobs.put("b")
    assert jobs.full()
    assert jobs.qsize() == jobs.maxsize == 2
    with pytest.raises(queue.Full):
        jobs.put_nowait("c")
    with pytest.raises(queue.Full, match=r"had no room for 0\.05 s"):
        jobs.put("c", timeout=0.05)
    producer = does("q.put('c')", q=sky.queue(name)) > pool
    assert [jobs.get(timeout=200) for _ in range(3)] == ["a", "b", "c"]
    producer.result(100)
    with pytest.raises(queue.Empty):
        jobs.get_nowait()
    with pytest.raises(sky.errors.ConfigurationError, match="the queue is there, with maxsize=2"):
        sky.queue(name, 3).qsize()


def test_a_wait_that_takes_too_long_says_for_what(pool: sky.Compute, name: str) -> None:
    lock = sky.lock(name)
    with lock:
        with pytest.raises(TimeoutError, match=r"not free for 0\.05 s; it is held by the client"):
            sky.lock(name).acquire(timeout=0.05)
        with pytest.raises(TimeoutError), sky.lock(name, timeout=0.05):
            pass
        assert not sky.lock(name).acquire(blocking=False)
        assert lock.locked()
        with pytest.raises(RuntimeError, match="not held through this handle"):
            sky.lock(name).release()
    assert lock.owner is None
    with pytest.raises(TimeoutError, match=r"<sky.event .* was not set for 0\.05 s"):
        sky.event(name).wait(0.05)
    with pytest.raises(queue.Empty, match=r"had no item for 0\.05 s") as empty:
        sky.queue(name).get(timeout=0.05)
    assert isinstance(empty.value, TimeoutError)
    with pytest.raises(sky.errors.ConfigurationError, match="timeout=-1"):
        sky.event(name).wait(-1)


def test_a_lock_excludes_all_others(pool: sky.Compute, name: str) -> None:
    @sky.function
    def careful() -> None:
        value: sky.dict[str, int] = sky.dict(name)
        for _ in range(20):
            with sky.lock(name, timeout=60):
                value["n"] = value.get("n", 0) + 1

    sky.gather(*[careful() for _ in range(4)]) >> pool
    assert sky.dict(name)["n"] == 80


def test_the_lock_of_a_dead_holder_is_free_and_its_next_holder_sees_that(
    pool: sky.Compute, name: str
) -> None:
    @sky.function
    def dies() -> None:
        sky.lock(name, lease=600).acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(sky.WorkerDiedError):
        dies() >> pool
    with sky.lock(name, timeout=200) as lock:
        first, abandoned = lock.token, lock.abandoned
    assert abandoned
    with sky.lock(name, timeout=200) as lock:
        assert not lock.abandoned
        assert lock.token is not None
        assert first is not None
        assert lock.token > first


def test_a_barrier_lets_all_workers_go_on_together(pool: sky.Compute, name: str) -> None:
    barrier = sky.barrier(name)
    for _ in range(2):
        assert sorted(does("b.wait(100)", b=barrier) @ pool) == [0, 1]
    assert (barrier.parties, barrier.n_waiting, barrier.broken) == (2, 0, False)
    with pytest.raises(sky.errors.ConfigurationError, match="with parties=2"):
        sky.barrier(name, 3).wait(1)


def test_a_barrier_breaks_for_all_if_one_gives_up(pool: sky.Compute, name: str) -> None:
    barrier = sky.barrier(name, 3)
    patient = does("b.wait()", b=barrier) > pool
    with pytest.raises(threading.BrokenBarrierError, match=r"not all 3 came in 0\.05 s") as late:
        barrier.wait(0.05)
    assert isinstance(late.value, TimeoutError)
    with pytest.raises(threading.BrokenBarrierError, match="did not wait any longer"):
        # The call may come before or after the other one gave up.
        patient.result(100)
    assert barrier.broken
    barrier.reset()
    assert not barrier.broken


def test_an_event_reaches_everybody_who_waits(pool: sky.Compute, name: str) -> None:
    event = sky.event(name)
    waiting = [does("e.wait(100)", e=event) > pool for _ in range(4)]
    event.set()
    assert all(future.result(100) for future in waiting)
    assert event.is_set()
    event.clear()
    assert not event.is_set()


def test_a_cancelled_wait_takes_no_item(
    pool: sky.Compute, name: str, eventually: Eventually, patient: None
) -> None:
    jobs: sky.queue[str] = sky.queue(name)
    started = sky.event(name)
    future = does("(e.set(), q.get())", e=started, q=jobs) > pool
    started.wait(100)
    future.cancel()
    # Cancelled for the caller at once, on the node a little later.
    eventually(lambda: not any(node.running for node in pool.nodes))
    jobs.put("kept")
    assert jobs.get(timeout=200) == "kept"


def test_a_dead_waiter_takes_no_item(pool: sky.Compute, name: str, eventually: Eventually) -> None:
    @sky.function
    def waits() -> None:
        pid = os.getpid()
        threading.Timer(0.2, lambda: os.kill(pid, signal.SIGKILL)).start()
        sky.queue(name).get()

    with pytest.raises(sky.WorkerDiedError):
        waits() >> pool
    sky.queue(name).put("kept")
    assert sky.queue(name).get(timeout=200) == "kept"


def test_ctrl_c_ends_a_wait_of_the_client(pool: sky.Compute, name: str) -> None:
    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    timer = threading.Timer(0.3, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sky.queue(name).get()
    timer.join()
    sky.queue(name).put("kept")
    assert sky.queue(name).get(timeout=200) == "kept"


def test_a_deleted_object_is_new_when_it_is_used_again(pool: sky.Compute, name: str) -> None:
    shared: sky.dict[str, int] = sky.dict(name)
    shared["a"] = 1
    shared.delete()
    assert shared.copy() == {}


def test_threads_of_one_process_share_its_connection(pool: sky.Compute, name: str) -> None:
    def adds_some() -> None:
        for _ in range(50):
            sky.counter(name, on=pool).add()

    threads = [threading.Thread(target=adds_some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sky.counter(name).value == 400


def test_a_thread_that_waits_does_not_hold_up_the_others_of_its_process(
    pool: sky.Compute, name: str
) -> None:
    @sky.function
    def crowd() -> list[int]:
        waited: list[bool] = []

        def waits() -> None:
            waited.append(sky.event(name).wait(100))

        threads = [threading.Thread(target=waits) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            sky.counter(name).add()
        with sky.lock(name, timeout=200):
            sky.counter(name).add()
        sky.event(name).set()
        for thread in threads:
            thread.join()
        return [sky.counter(name).value, len(waited)]

    assert crowd() >> pool == [21, 3]


def test_a_whole_dict_comes_though_it_is_larger_than_a_message(
    pool: sky.Compute, name: str
) -> None:
    shared: sky.dict[int, bytes] = sky.dict(name)
    for number in range(6):
        shared[number] = bytes([number]) * (4 << 20)
    assert [value[0] for value in shared.values()] == list(range(6))
    shared.delete()


def test_values_are_what_calls_can_carry(pool: sky.Compute, name: str) -> None:
    numpy = pytest.importorskip("numpy")

    class Own:
        def __init__(self, weight: Any) -> None:
            self.weight = weight

    shared: sky.dict[str, Any] = sky.dict(name)
    shared["own"] = Own(numpy.arange(1000))
    assert int(pool.run(does("d['own'].weight.sum()", d=shared), 1)) == 499500
    array = shared["own"].weight
    array[0] = 7
    assert shared["own"].weight[0] == 0, "a value is a copy"
    with pytest.raises(sky.errors.SerializationError, match="the value of 'lock' in"):
        shared["lock"] = threading.Lock()
    with pytest.raises(sky.errors.ConfigurationError, match=r"9\.\d MB.*sky\.put"):
        shared["big"] = bytes(9 << 20)
    with pytest.raises(sky.errors.ConfigurationError, match="only calls can carry"):
        shared["put"] = sky.put([1])


@pytest.mark.parametrize("key", [[1], {"a": 1}, object(), ("a", []), 1 << 70])
def test_a_key_that_cannot_be_is_refused(key: Any) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match="cannot be a key"):
        sky.dict("keys")[key] = 1


@pytest.mark.parametrize("name", ["", 3, "x" * 201])
def test_a_name_that_cannot_be_is_refused(name: Any) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match="give a name of 1 to 200 characters"):
        sky.dict(name)


def test_outside_of_a_pool_the_objects_are_those_of_this_process() -> None:
    """As for `fn.local()`; in a thread of its own, where no pool is the current one."""
    assert sky.Compute().name
    with _no_pool():
        assert sky.counter("alone").add(2) == 2
        assert adds.local("alone", 3) == 5
        jobs: sky.queue[int] = sky.queue("alone")
        thread = threading.Thread(target=lambda: jobs.put(1))
        thread.start()
        assert jobs.get(timeout=200) == 1
        thread.join()
        with pytest.raises(queue.Empty):
            jobs.get(timeout=0.01)
        with sky.lock("alone", timeout=1), pytest.raises(TimeoutError, match="held by this"):
            sky.lock("alone").acquire(timeout=0.01)
        assert sky.barrier("alone").wait(100) == 0
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            sky.event("alone").wait(0.05)
        assert time.monotonic() - started >= 0.05


@contextlib.contextmanager
def _no_pool() -> Iterator[None]:
    """As if no pool of another test were open."""
    from skyward import functions

    token, functions.active[:] = functions.current.set(None), []
    try:
        yield
    finally:
        functions.current.reset(token)


def test_handles_travel_by_name() -> None:
    for handle in (sky.dict("a"), sky.queue("a", 3), sky.barrier("a", 2), sky.lock("a", lease=60)):
        copy = pickle.loads(pickle.dumps(handle))
        assert vars(copy) == vars(handle)


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(sky.errors.ConfigurationError, match="on=3 has no shared state"):
        sky.counter("x", on=3).add()
