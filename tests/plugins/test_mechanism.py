"""Plugins: hooks in order, entered once, left always, and named when they fail."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.calls.lane import Preparation
from skyward.calls.scheduler import Load
from skyward.nodes.briefing import Preparer
from skyward.plugins.plugin import Cluster

from ..conftest import only_in_all
from ..waiting import wait_for

QUIET = sky.Options(console=False)


def logging_plugin(name: str, log: Path) -> sky.Plugin:
    """Writes a line when it is entered, around every call, and when it is left."""

    def write(*words: object) -> None:
        with log.open("a") as file:
            print(name, *words, file=file)

    @contextlib.contextmanager
    def around_process(info: sky.InstanceInfo) -> Iterator[None]:
        write("entered", info.node, os.getpid())
        try:
            yield
        finally:
            write("left", info.node, os.getpid())

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            write("before")
            try:
                return function(*args, **kwargs)
            finally:
                write("after")

        return wrapped

    return sky.Plugin.create(name).with_around_process(around_process).with_decorate(decorate)


@sky.function
def pid() -> int:
    return os.getpid()


@sky.function
def fail() -> None:
    raise ValueError("on purpose")


def test_a_process_is_entered_once_and_left_at_shutdown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with sky.Compute(nodes=2, plugins=[logging_plugin("a", log)], options=QUIET) as compute:
        pids = pid() @ compute
        pid() @ compute
        with pytest.raises(sky.BroadcastError):
            fail() @ compute
    lines = log.read_text().splitlines()
    for node, process in enumerate(pids):
        assert lines.count(f"a entered {node} {process}") == 1
        assert lines.count(f"a left {node} {process}") == 1
    assert lines.index("a before") > max(i for i, line in enumerate(lines) if "entered" in line)


def test_plugins_compose_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    plugins = [logging_plugin("a", log), logging_plugin("b", log)]
    with sky.Compute(plugins=plugins, options=QUIET) as compute:
        pid() >> compute
    lines = [
        line.rsplit(" ", 2)[0] if " 0 " in line else line for line in log.read_text().splitlines()
    ]
    assert lines == [
        "a entered",
        "b entered",
        "a before",
        "b before",
        "b after",
        "a after",
        "b left",
        "a left",
    ]


def test_a_generator_function_is_a_context_too() -> None:
    def seeded(info: sky.InstanceInfo) -> Iterator[None]:
        os.environ["SEEDED"] = str(info.node)
        yield

    @sky.function
    def read() -> str:
        return os.environ["SEEDED"]

    plugin = sky.Plugin.create("seeded").with_around_process(seeded)
    with sky.Compute(nodes=2, plugins=[plugin], options=QUIET) as compute:
        assert read() @ compute == ["0", "1"]


def test_the_image_passes_through_every_transform() -> None:
    seen = []

    def transform(image: sky.Image, cluster: Cluster) -> sky.Image:
        seen.append((image.env.get("WHO"), cluster.spec.nodes.desired))
        return sky.Image(env={**image.env, "WHO": f"{image.env.get('WHO', '')}x"})

    @sky.function
    def who() -> str:
        return os.environ["WHO"]

    plugins = [sky.Plugin.create(name).with_transform(transform) for name in ("one", "two")]
    with sky.Compute(nodes=2, plugins=plugins, options=QUIET) as compute:
        assert who() >> compute == "xx"
    assert seen == [(None, 2), ("x", 2)]


def test_bootstrap_commands_run_on_every_node_before_its_tasks(tmp_path: Path) -> None:
    plugin = sky.Plugin.create("touch").with_bootstrap(f"echo here >> {tmp_path / 'marks'}")

    @sky.function
    def marks() -> str:
        return (tmp_path / "marks").read_text()

    with sky.Compute(nodes=2, plugins=[plugin], options=QUIET) as compute:
        assert marks() >> compute == "here\nhere\n"


def test_around_app_is_entered_once_on_a_node_with_several_workers(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def around(info: sky.InstanceInfo) -> Iterator[None]:
        with log.open("a") as file:
            print("entered", file=file)
        yield
        with log.open("a") as file:
            print("left", file=file)

    plugin = sky.Plugin.create("app").with_around_app(around)
    worker = sky.Worker(per_node=2)
    with sky.Compute(plugins=[plugin], worker=worker, options=QUIET) as compute:
        pid() @ compute
        assert log.read_text() == "entered\n"
    assert log.read_text() == "entered\nleft\n"


@sky.function
def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_what_around_app_changes_in_the_environment_reaches_tasks() -> None:
    def around(info: sky.InstanceInfo) -> Iterator[None]:
        # The image's environment is there, and the plugin has the last word.
        os.environ["SKY_TEST_SEEN"] = os.environ["SKY_TEST_IMAGE"]
        os.environ["SKY_TEST_IMAGE"] = "plugin"
        del os.environ["SKY_TEST_REMOVED"]
        os.environ["PYTHONHASHSEED"] = "7"
        yield

    @sky.function
    def die() -> None:
        os._exit(3)

    @sky.function
    def seen() -> list[Any]:
        names = ("SKY_TEST_SEEN", "SKY_TEST_IMAGE", "SKY_TEST_REMOVED")
        return [*map(os.environ.get, names), hash("a word")]

    plugin = sky.Plugin.create("app").with_around_app(around)
    image = sky.Image(env={"SKY_TEST_IMAGE": "image", "SKY_TEST_REMOVED": "image"})
    with sky.Compute(plugins=[plugin], image=image, options=QUIET) as compute:
        first = seen() >> compute
        with pytest.raises(sky.WorkerDiedError):
            die() >> compute
        again = seen() >> compute

    assert first[:3] == ["image", "plugin", None]
    assert again == first, "a replaced worker, with the same hash seed, sees the same"


def test_without_hooks_on_nodes_the_images_environment_reaches_tasks() -> None:
    with sky.Compute(image=sky.Image(env={"SKY_TEST_IMAGE": "image"}), options=QUIET) as compute:
        assert variable("SKY_TEST_IMAGE") >> compute == "image"


DAEMONS = {
    "in the background": "sleep 1000 & echo $! > {file}",
    "in a session of its own": "setsid sh -c 'echo $$ > {file}; exec sleep 1000' &",
    "forked twice": (
        "'{python}' -c 'import os, time; os.fork() and os._exit(0); os.setsid(); "
        "os.fork() and os._exit(0); "
        'open("{file}", "w").write(str(os.getpid())); time.sleep(1000)\''
    ),
    "deaf to SIGTERM": (
        "setsid sh -c 'trap \"\" TERM; echo $$ > {file}; while :; do sleep 1; done' &"
    ),
}


@pytest.mark.parametrize("how", DAEMONS)
def test_a_daemon_of_a_bootstrap_command_lives_as_long_as_the_pool(
    how: str, tmp_path: Path, eventually: Callable[..., None], nothing_left: None
) -> None:
    file = tmp_path / "pid"
    plugin = sky.Plugin.create("server").with_bootstrap(
        DAEMONS[how].format(file=file, python=sys.executable)
    )
    with sky.Compute(plugins=[plugin], options=QUIET) as compute:
        eventually(lambda: file.exists() and file.read_text())
        daemon = psutil.Process(int(file.read_text()))
        assert pid() >> compute != daemon.pid
        assert daemon.is_running()

    assert not daemon.is_running()


def test_a_daemon_ends_also_when_the_agent_is_killed(
    tmp_path: Path, eventually: Callable[..., None], nothing_left: None
) -> None:
    file = tmp_path / "pid"
    plugin = sky.Plugin.create("server").with_bootstrap(
        DAEMONS["in a session of its own"].format(file=file)
    )

    @sky.function
    def agent() -> int:
        return os.getppid()

    with sky.Compute(plugins=[plugin], options=QUIET) as compute:
        eventually(lambda: file.exists() and file.read_text())
        daemon = psutil.Process(int(file.read_text()))
        os.kill(agent() >> compute, signal.SIGKILL)
        eventually(lambda: not daemon.is_running(), what="the daemon's end")


def test_around_client_is_entered_while_the_pool_is_open() -> None:
    seen: list[Any] = []

    def around(compute: sky.Compute) -> Iterator[None]:
        seen.append(pid() >> compute)
        yield
        seen.append(pid() >> compute)

    plugin = sky.Plugin.create("client").with_around_client(around)
    with sky.Compute(plugins=[plugin], options=QUIET):
        assert len(seen) == 1
    assert seen[0] == seen[1]


def test_a_replaced_worker_is_prepared_too(tmp_path: Path) -> None:
    log = tmp_path / "log"

    @sky.function
    def die() -> None:
        os._exit(3)

    with sky.Compute(plugins=[logging_plugin("a", log)], options=QUIET) as compute:
        first = pid() >> compute
        with pytest.raises(sky.WorkerDiedError):
            die() >> compute
        second = pid() >> compute
    entered = [line for line in log.read_text().splitlines() if "entered" in line]
    assert entered == [f"a entered 0 {first}", f"a entered 0 {second}"]


# How hooks fail.


def broken(_: Any) -> Iterator[None]:
    raise LookupError("no such thing")
    yield


@pytest.mark.parametrize("hook", ["around_process", "around_app"])
def test_a_failing_hook_is_named_with_node_and_traceback(hook: str, nothing_left: None) -> None:
    plugin = getattr(sky.Plugin.create("fragile"), f"with_{hook}")(broken)
    with (
        pytest.raises(
            sky.errors.PluginError,
            match=r"(?s)node 0.*'fragile'.*LookupError: no such thing.*broken",
        ),
        sky.Compute(plugins=[plugin], options=QUIET),
    ):
        pass


def test_a_failing_command_is_shown_with_its_output(nothing_left: None) -> None:
    plugin = sky.Plugin.create("shell").with_bootstrap("echo out; echo err >&2; exit 7")
    with (
        pytest.raises(
            sky.errors.PluginError, match=r"(?s)'shell'.*bootstrap.*exit status 7:\nout\nerr"
        ),
        sky.Compute(plugins=[plugin], options=QUIET),
    ):
        pass


def test_a_failing_around_client_takes_the_pool_down(nothing_left: None) -> None:
    plugin = sky.Plugin.create("fragile").with_around_client(broken)
    with (
        pytest.raises(
            sky.errors.PluginError, match="'fragile': its around_client failed: LookupError"
        ),
        sky.Compute(plugins=[plugin], options=QUIET),
    ):
        pass


def test_a_failing_decorator_fails_the_call_by_name() -> None:
    def decorate(_: Any) -> Any:
        raise LookupError("no such thing")

    plugin = sky.Plugin.create("fragile").with_decorate(decorate)
    with (
        sky.Compute(plugins=[plugin], options=QUIET) as compute,
        pytest.raises(sky.errors.PluginError, match="'fragile': its decorate failed: LookupError"),
    ):
        pid() >> compute


def test_leaving_may_fail_without_hanging(nothing_left: None) -> None:
    def around(_: Any) -> Iterator[None]:
        yield
        raise LookupError("too late")

    plugin = sky.Plugin.create("late").with_around_process(around)
    with sky.Compute(plugins=[plugin], options=QUIET) as compute:
        pid() >> compute


# What is refused.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("torch", "give a list"),
        ([sky.plugins.torch], "call it"),
        ([3], "expected a plugin"),
        ([sky.plugins.torch(), sky.plugins.torch()], "'torch' is there twice"),
    ],
)
def test_what_is_no_list_of_plugins_is_refused(given: Any, words: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=words):
        sky.Compute(plugins=given)


def test_hooks_must_be_functions_and_names_words() -> None:
    with pytest.raises(sky.errors.ConfigurationError, match="decorate is a function, not"):
        sky.Plugin("x", decorate=3)  # type: ignore[arg-type]
    with pytest.raises(sky.errors.ConfigurationError, match="one word"):
        sky.Plugin.create("two words")


def test_a_transform_must_return_an_image() -> None:
    plugin = sky.Plugin.create("x").with_transform(lambda image, cluster: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(sky.errors.ConfigurationError, match="'x' turned the image into"):
        sky.Compute(plugins=[plugin])


def test_a_group_needs_a_network_and_one_process_a_rank() -> None:
    plugin = sky.Plugin.create("group").with_distributed()
    with pytest.raises(sky.errors.ConfigurationError, match=r"cluster=False.*'group' needs one"):
        sky.Compute(plugins=[plugin], options=sky.Options(cluster=False))
    with pytest.raises(sky.errors.ConfigurationError, match=r"write Worker\(per_node=2\)"):
        sky.Compute(plugins=[plugin], worker=sky.Worker(concurrency=2))


# What becomes of a group.


def _member(_: sky.InstanceInfo) -> Iterator[None]:
    yield


@pytest.fixture(scope="module")
def grouped(sharing: Any) -> Iterator[sky.Compute]:
    """Two nodes whose workers are a group, which is formed again in a moment."""
    group = sky.Plugin.create("group").with_around_process(_member).with_distributed()
    options = sky.Options(console=False, fail_grace=0.1)
    with sharing(sky.Compute(nodes=2, plugins=[group], options=options)) as compute:
        yield compute


@sky.function
def die() -> None:
    os._exit(3)


@only_in_all
def test_a_rank_that_lost_its_worker_before_it_began_ends_its_broadcast(
    grouped: sky.Compute, tmp_path: Path
) -> None:
    """It could run in a new group alone, while the others wait for it in the former one."""

    @sky.function
    def dies() -> None:
        (tmp_path / "begun").touch()
        wait_for(tmp_path / "gate")
        os._exit(3)

    @sky.function
    def waits() -> None:
        (tmp_path / "gate").touch()
        threading.Event().wait()

    dying = grouped.submit(dies(), on=1)
    wait_for(tmp_path / "begun")
    with pytest.raises(sky.BroadcastError, match="cannot run in the group of the other ranks"):
        waits() @ grouped
    assert isinstance(dying.exception(), sky.WorkerDiedError)
    assert len(set(pid() @ grouped)) == 2


@pytest.mark.parametrize("ends", ["a broadcast fails", "a worker dies"])
def test_a_task_whose_group_is_over_starts_tasks_but_no_broadcast(
    grouped: sky.Compute, ends: str
) -> None:
    @sky.function
    def one_fails() -> None:
        if sky.instance_info().node == 1:
            raise ValueError("on purpose")

    @sky.function(retries=1)
    def dies_elsewhere() -> None:
        if sky.instance_info().node == 1:
            os._exit(3)

    @sky.function
    def driver() -> tuple[str, int, int, str]:
        try:
            (one_fails() if ends == "a broadcast fails" else dies_elsewhere()) @ sky
        except sky.BroadcastError as problem:
            first = type(problem.exceptions[0]).__name__
        pids = [pid() >> sky, pid() >> sky]
        try:
            pid() @ sky
        except sky.errors.PoolError as problem:
            return first, *pids, str(problem)
        return first, *pids, "it ran"

    first, *pids, text = grouped.submit(driver(), on=0).result()
    assert first == ("ValueError" if ends == "a broadcast fails" else "WorkerDiedError")
    assert len(set(pids)) == 1
    assert "pid cannot run on every worker: the group of this task is over" in text
    assert not set(pids) & set(pid() @ grouped)


class Watched(io.StringIO):
    """Touches a file when a text is written."""

    def __init__(self, text: str, path: Path) -> None:
        super().__init__()
        self._text, self._path = text, path

    def write(self, text: str) -> int:
        if self._text in text:
            self._path.touch()
        return super().write(text)


def test_the_console_says_which_task_keeps_a_new_group_from_forming(
    grouped: sky.Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sky.function(name="lasts")
    def lasts() -> int:
        (tmp_path / "begun").touch()
        wait_for(tmp_path / "told")
        return os.getpid()

    monkeypatch.setattr("skyward.nodes.briefing.HELD_SECONDS", 0.1)
    monkeypatch.setattr(sys, "stderr", Watched("end of lasts on node 0", tmp_path / "told"))
    lasting = grouped.submit(lasts(), on=0)
    wait_for(tmp_path / "begun")
    with pytest.raises(sky.WorkerDiedError):
        grouped.run(die(), on=1)
    assert lasting.result() not in pid() @ grouped


def test_the_console_says_that_workers_are_started_again(
    grouped: sky.Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sky.function
    def one_fails() -> None:
        if sky.instance_info().node == 1:
            raise ValueError("on purpose")

    before = pid() @ grouped
    monkeypatch.setattr(sys, "stderr", Watched("objects in them", tmp_path / "told"))
    with pytest.raises(sky.BroadcastError):
        one_fails() @ grouped
    wait_for(tmp_path / "told")
    assert not set(before) & set(pid() @ grouped)


def test_a_generator_that_fails_ends_those_of_the_other_ranks(
    grouped: sky.Compute, tmp_path: Path
) -> None:
    @sky.function
    def epochs() -> Iterator[int]:
        yield 1
        if sky.instance_info().node == 1:
            wait_for(tmp_path / "gate")
            raise ValueError("boom")
        threading.Event().wait()

    first, second = epochs() @ grouped
    assert (next(first), next(second)) == (1, 1)
    (tmp_path / "gate").touch()
    why = r"was cancelled on node 0, because rank 1 \(node 1\) failed: ValueError: boom"
    with pytest.raises(sky.errors.TaskCancelledError, match=why):
        next(first)
    with pytest.raises(ValueError, match="boom"):
        next(second)
    assert len(pid() @ grouped) == 2


def test_an_exception_of_the_function_is_no_death(grouped: sky.Compute, tmp_path: Path) -> None:
    @sky.function(retries=2)
    def fails() -> None:
        with (tmp_path / str(sky.instance_info().node)).open("a") as log:
            log.write("x")
        for node in "01":  # Else the first failure may end the other before it has begun.
            wait_for(tmp_path / node)
        raise sky.WorkerDiedError("of another call's worker")

    with pytest.raises(sky.BroadcastError, match="of another call's worker"):
        fails() @ grouped
    assert [(tmp_path / node).read_text() for node in "01"] == ["x", "x"]


def test_a_group_that_is_over_does_not_end_again() -> None:
    lane = SimpleNamespace(load=Load(0, 0, 0), preparation=Preparation(begun=True))
    roster = SimpleNamespace(
        lock=threading.Lock(), nodes=[SimpleNamespace(lanes={(0, 0): lane})], closed=False
    )
    hooks = SimpleNamespace(together=True, for_nodes=b"", for_processes=b"x")
    loop: Any = SimpleNamespace(later=lambda *_: None)
    nothing: Any = None
    dispatcher: Any = SimpleNamespace(drain=lambda lane, nested: None)
    preparer = Preparer(
        hooks,  # type: ignore[arg-type]
        loop,
        roster,  # type: ignore[arg-type]
        nothing,
        dispatcher,
        nothing,
    )
    ran: Any = [SimpleNamespace(load=lane.load)]
    lane.preparation.replace()
    assert not preparer.leave(ran, at_next_broadcast=True)
    assert not preparer.begin_broadcast(), "a new group forms already"
    lane.preparation = Preparation(begun=True, replaced=False)
    assert preparer.leave(ran, at_next_broadcast=True)


def test_an_unknown_plugin_names_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no plugin 'tensorfow'.*keras.*torch"):
        sky.plugins.tensorfow


def test_others_register_theirs_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(
        "import skyward as sky\ndef horse():\n    return sky.Plugin.create('horse')\n"
    )
    folder = tmp_path / "theirs-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[skyward.plugins]\nhorse = theirs:horse\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert any(e.name == "horse" for e in metadata.entry_points(group="skyward.plugins"))
    assert sky.plugins.horse().name == "horse"
    assert "horse" in dir(sky.plugins)


def test_a_plugin_shows_its_hooks_and_not_what_they_hold() -> None:
    token = "secret-token"
    plugin = sky.Plugin.create("x").with_around_process(lambda info: contextlib.nullcontext(token))
    assert repr(plugin) == "<sky plugin 'x': around_process>"
    assert token not in repr(sky.Compute(plugins=[plugin]))


def test_a_hook_that_ends_its_process_fails_the_start(nothing_left: None) -> None:
    def dying(_: sky.InstanceInfo) -> Iterator[None]:
        os._exit(11)
        yield

    plugin = sky.Plugin.create("dying").with_around_process(dying)
    with (
        pytest.raises(sky.errors.PluginError, match=r"ended in a plugin's hook.*exit status 11"),
        sky.Compute(plugins=[plugin], options=QUIET),
    ):
        pass


def test_a_command_that_hangs_ends_with_the_pool(
    tmp_path: Path, eventually: Callable[..., None], nothing_left: None
) -> None:
    """Its node is never ready, and the start is given up."""
    started = tmp_path / "pid"
    plugin = sky.Plugin.create("slow").with_bootstrap(f"echo $$ > {started}; exec sleep 1000")
    compute = sky.Compute(plugins=[plugin], options=QUIET)

    def give_up() -> None:
        eventually(lambda: started.exists() and started.read_text())
        compute.close(0)

    closer = threading.Thread(target=give_up)
    closer.start()
    with contextlib.suppress(sky.SkywardError), compute:
        pass
    closer.join()
    pid = int(started.read_text())
    eventually(lambda: not psutil.pid_exists(pid), what="the command's end")


def test_what_cannot_be_sent_or_listed_is_refused_by_name() -> None:
    lock = threading.Lock()
    unsendable = sky.Plugin.create("locked").with_decorate(lambda f: (lock, f)[1])
    with pytest.raises(sky.errors.PluginError, match="plugin 'locked' cannot be sent"):
        sky.Compute(plugins=[unsendable])
    letters = sky.Plugin.create("letters").with_bootstrap(lambda cluster: "mkdir x")
    with pytest.raises(sky.errors.PluginError, match="plugin 'letters': its bootstrap failed"):
        sky.Compute(plugins=[letters])


def test_one_group_a_pool() -> None:
    plugins = [sky.plugins.torch(), sky.plugins.jax()]
    with pytest.raises(
        sky.errors.ConfigurationError, match="'torch' and 'jax' both make the workers"
    ):
        sky.Compute(nodes=2, plugins=plugins)
