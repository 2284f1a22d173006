"""Programs written for gabfssilva/skyward: what goes on working, and errors that say our way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import former
from skyward.errors import ConfigurationError

QUIET = sky.Options(console=False)
Sharing = Callable[[sky.Compute], AbstractContextManager[sky.Compute]]


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[sky.Compute]:
    with sharing(sky.Compute(nodes=2, options=QUIET)) as compute:
        yield compute


@sky.function
def double(x: int) -> int:
    return 2 * x


@sky.function
def forever() -> None:
    import threading

    threading.Event().wait()


@sky.stdout(only=sky.is_head)
@sky.function
def place() -> tuple[int, bool]:
    info = sky.instance_info()
    return info.node, sky.is_head(info)


class TestCalls:
    def test_gather_returns_what_can_be_unpacked_indexed_and_counted(
        self, pool: sky.Compute
    ) -> None:
        calls = sky.gather(*[double(i) for i in range(3)])

        results = calls >> pool

        assert len(calls) == 3
        assert len(list(calls)) == 3
        assert tuple(results) == (0, 2, 4)
        assert results[-1] == 4

    def test_a_gather_takes_more_calls(self, pool: sky.Compute) -> None:
        assert (sky.gather(double(1)) & double(2) & (double(3) & double(4))) >> pool == [2, 4, 6, 8]

    def test_the_name_sky_of_the_module_is_a_target(self, pool: sky.Compute) -> None:
        from skyward import sky as target

        assert double(4) >> target == 8

    def test_current_nodes_counts_ready_nodes(self, pool: sky.Compute) -> None:
        assert pool.current_nodes() == 2

    def test_is_head_is_a_predicate(self, pool: sky.Compute) -> None:
        assert place() @ pool == [(0, True), (1, False)]

    def test_a_call_gets_another_timeout(self, pool: sky.Compute) -> None:
        with pytest.raises(sky.TaskTimeoutError, match=r"0\.2"):
            forever().with_timeout(0.2) >> pool
        with pytest.raises(sky.TaskTimeoutError):
            sky.gather(forever(), double(1)).with_timeout(0.2) >> pool
        with pytest.raises(sky.TaskTimeoutError):
            (forever() & double(1)).with_timeout(0.2) >> pool
        assert double(3).with_timeout(60) >> pool == 6
        assert forever.timeout is None

    @pytest.mark.parametrize("seconds", [0, -1, True, "1"])
    def test_a_timeout_that_is_none_is_refused(self, seconds: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"with_timeout\(.*give seconds above 0"):
            double(1).with_timeout(seconds)


class TestResultsOfMap:
    def test_they_are_a_list_for_those_who_index(self, pool: sky.Compute) -> None:
        results = pool.map(lambda x: x + 1, [1, 2, 3])

        assert len(results) == 3
        assert results[0] == 2
        assert results[1:] == [3, 4]
        assert max(results) == 4
        assert sum(results) == 9
        assert results == [2, 3, 4]
        assert repr(results) == "[2, 3, 4]"

    def test_they_come_one_by_one_for_those_who_loop(self, pool: sky.Compute) -> None:
        results = pool.map(double, iter([1, 2]))

        assert next(results) == 2
        assert list(results) == [4]

    def test_a_second_loop_is_an_error_and_not_empty(self, pool: sky.Compute) -> None:
        results = pool.map(double, [1, 2])
        assert sum(results) == 6

        with pytest.raises(ConfigurationError, match=r"2 results of map were taken.*list\("):
            max(results)
        with pytest.raises(ConfigurationError, match="not kept"):
            results[0]

    def test_an_unknown_length_says_so(self, pool: sky.Compute) -> None:
        results = pool.map(double, iter([1]))

        with pytest.raises(TypeError, match=r"not known.*list\(compute\.map"):
            len(results)
        assert results
        assert list(results) == [2]
        assert not pool.map(double, [])


class TestNames:
    def test_names_that_are_here_under_another_name_go_on_working(self) -> None:
        assert sky.PendingFunction is sky.Pending
        assert isinstance(double(1) & double(2), sky.PendingFunctionGroup)

    @pytest.mark.parametrize("name", sorted(former.NAMES))
    def test_a_name_that_is_not_here_says_our_way(self, name: str) -> None:
        assert name not in sky.__all__, "it is here by now: take it out of the table"
        with pytest.raises(AttributeError) as caught:
            getattr(sky, name)
        assert former.NAMES[name] in str(caught.value)
        assert "coming-from" in str(caught.value)

    def test_an_import_says_so_too(self) -> None:
        with pytest.raises(ImportError, match=r"has no attribute 'App'; .*coming-from"):
            from skyward import App  # noqa: F401

    @pytest.mark.parametrize("name", sorted(former.PLUGINS))
    def test_so_does_a_name_of_plugins(self, name: str) -> None:
        with pytest.raises(AttributeError, match=f"skyward.plugins has no attribute '{name}'; .*"):
            getattr(sky.plugins, name)

    @pytest.mark.parametrize("name", sorted(former.METHODS))
    def test_so_does_an_attribute_of_a_compute(self, name: str) -> None:
        with pytest.raises(AttributeError, match=f"Compute has no attribute '{name}'; .*"):
            getattr(sky.Compute(), name)

    @pytest.mark.parametrize("name", sorted(former.SHARED))
    def test_so_does_an_attribute_of_a_shared_object(self, name: str) -> None:
        with pytest.raises(AttributeError, match=f"sky.counter has no attribute '{name}'; .*"):
            getattr(sky.counter("n"), name)

    def test_the_page_has_every_name_and_argument(self) -> None:
        page = (Path(__file__).parents[1] / former.GUIDE.split()[0]).read_text()
        words = set(re.findall(r"\w+", page))
        arguments = {name for ways in former.ARGUMENTS.values() for name in ways if name != "*"}

        assert {*former.NAMES, *former.PLUGINS, *former.METHODS, *arguments} <= words

    def test_any_other_attribute_is_simply_missing(self) -> None:
        with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
            sky.Compute().nothing


class TestArguments:
    @pytest.mark.parametrize(
        ("kind", "name"),
        [(kind, name) for kind, ways in former.ARGUMENTS.items() for name in ways if name != "*"],
    )
    def test_an_argument_that_is_not_taken_says_our_way(self, kind: str, name: str) -> None:
        required = {"Spec": [sky.Local()], "Volume": ["/data"]}.get(kind, [])

        with pytest.raises(ConfigurationError) as caught:
            getattr(sky, kind)(*required, **{name: "x"})

        assert str(caught.value).startswith(f"{kind}({name}='x'): {former.ARGUMENTS[kind][name]}")

    def test_specs_go_to_any(self) -> None:
        spec = sky.Spec(sky.Local())
        with pytest.raises(ConfigurationError, match=r"Compute\.any\("):
            sky.Compute(spec)
        with pytest.raises(ConfigurationError, match=r"Compute\.any\("):
            sky.Compute(spec, spec)  # type: ignore[call-arg, misc]

    def test_any_other_argument_is_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
            sky.Options(nothing=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"'ndoes'; did you mean 'nodes'\? it takes provider, "):
            sky.Compute(ndoes=2)  # type: ignore[call-arg]


@sky.function
def their_collections() -> tuple[Any, ...]:
    import queue

    counter = sky.counter("theirs", consistency="eventual")
    counter.increment(10)
    counter.decrement(3)
    counted = counter.value
    counter.reset()
    jobs: sky.queue[str] = sky.queue("theirs")
    jobs.put("job")
    taken = jobs.get(timeout=100)
    try:
        jobs.get(timeout=0.01)
    except queue.Empty as none:
        advice = str(none)
    cache: sky.dict[str, int] = sky.dict("theirs", consistency="strong")
    cache["a"] = 1
    with sky.lock("theirs", 30):
        return counted, int(counter), taken, "catch this as queue.Empty" in advice, cache.pop("a")


@sky.function
def meet_as_they_do() -> int:
    sky.barrier("theirs", n=sky.instance_info().total_nodes).wait()
    return sky.instance_info().node


class TestCollections:
    def test_they_are_used_as_theirs(self, pool: sky.Compute) -> None:
        assert their_collections() >> pool == (7, 0, "job", True, 1)
        assert meet_as_they_do() @ pool == [0, 1]

    def test_what_would_mean_something_else_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"get\(0\.5\): write get\(timeout=0\.5\)"):
            sky.queue("q").get(0.5)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="two names of one number"):
            sky.barrier("b", 2, n=3)
        with pytest.raises(ConfigurationError, match=r"consistency='weak'.*'strong' here"):
            sky.dict("d", consistency="weak")  # type: ignore[arg-type]


class TestPlugins:
    def test_the_builders_have_their_names(self) -> None:
        plugin = (
            sky.Plugin.create("theirs")
            .with_image_transform(lambda image, cluster: image)
            .with_decorator(lambda function: function)
        )

        assert plugin.transform is not None
        assert plugin.decorate is not None

    def test_a_launcher_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"no command starts a worker.*around_process"):
            sky.Plugin.create("theirs").with_launcher(print)

    def test_around_client_takes_the_compute_alone(self) -> None:
        def around(pool: Any, cluster: Any) -> Any: ...

        with pytest.raises(ConfigurationError, match=r"two arguments.*def around\(compute\)"):
            sky.Plugin.create("theirs").with_around_client(around)  # type: ignore[arg-type]
