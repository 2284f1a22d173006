"""Wrong arguments: refused where they are given, with the value and what to write instead."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest

import skyward as sky


@sky.function
def echo(value: Any) -> Any:
    return value


def refused(action: Callable[[], object], *words: str) -> None:
    """It raises at once, saying all of these."""
    with pytest.raises(sky.errors.ConfigurationError) as caught:
        action()
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"provider": "local"}, ["Compute(provider='local')", "expected sky.Local()"]),
        ({"provider": sky.Local}, ["provider=", "give an instance, not the class"]),
        ({"provider": "AWS"}, ["provider='AWS'", "expected sky.AWS()"]),
        ({"provider": sky.SSH}, ["expected sky.SSH(...)"]),
        ({"provider": "nonsense"}, ["expected a provider; one of sky.Local, sky.Container, sky.S"]),
        ({"provider": "slrum"}, ["did you mean sky.Slurm()? There are sky.Local, "]),
        ({"nodes": 0}, ["desired=0"]),
        ({"nodes": -3}, ["desired=-3"]),
        ({"nodes": 1.5}, ["desired=1.5"]),
        ({"nodes": "2"}, ["desired='2'"]),
        ({"nodes": True}, ["desired=True"]),
        ({"nodes": (4, 2)}, ["min=4", "max=2", "write min=2, max=4"]),
        ({"nodes": (1, 2, 3)}, ["nodes=(1, 2, 3)", "a pair means (min, max)"]),
        ({"accelerator": "A100"}, ["accelerator='A100'", "sky.accelerators.A100()"]),
        ({"accelerator": "a100-40gb:2"}, ["sky.accelerators.A100(count=2, memory='40GB')"]),
        (
            {"accelerator": "Z9"},
            ["(accelerator='Z9'): no model called 'Z9'; the catalog has K80, "],
        ),
        ({"accelerator": "Z9"}, ["any other. Write it as sky.accelerators.A100()"]),
        ({"accelerator": sky.accelerators.L4}, ["a model; write sky.accelerators.L4()"]),
        ({"accelerator": 3}, ["Compute(accelerator=3)", "expected sky.accelerators.A100()"]),
        ({"vcpus": 0}, ["Compute(vcpus=0)", "give a number above 0"]),
        ({"vcpus": "4"}, ["Compute(vcpus='4')", "give a number above 0"]),
        ({"memory_gb": -1}, ["Compute(memory_gb=-1)", "give a number above 0"]),
        ({"memory_gb": math.nan}, ["Compute(memory_gb=nan)", "give a number above 0"]),
        ({"image": {"pip": ["numpy"]}}, ["image=", "expected sky.Image(...)"]),
        ({"image": sky.Image}, ["image=", "give an instance, not the class"]),
        ({"worker": 4}, ["Compute(worker=4)", "expected sky.Worker(...)"]),
        ({"options": {"console": False}}, ["options=", "expected sky.Options(...)"]),
        ({"volumes": sky.Volume("/tmp")}, ["volumes=", "give a list of volumes"]),
        ({"volumes": ["/tmp"]}, ["volumes='/tmp'", "expected sky.Volume(...)"]),
        ({"volumes": 5}, ["volumes=5", "give a list of volumes"]),
        ({"name": ""}, ["Compute(name='')", "give a name"]),
        ({"name": 7}, ["Compute(name=7)", "give a name"]),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_argument_of_compute_is_refused_at_construction(
    arguments: dict[str, Any], words: list[str]
) -> None:
    refused(lambda: sky.Compute(**arguments), *words)


def test_a_misspelt_argument_of_compute_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="node"):
        sky.Compute(node=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"timeout": 0}, ["function(timeout=0)", "give seconds above 0, or None"]),
        ({"timeout": -1.0}, ["function(timeout=-1.0)"]),
        ({"timeout": math.nan}, ["function(timeout=nan)"]),
        ({"timeout": "5"}, ["function(timeout='5')", "give seconds above 0, or None"]),
        ({"retries": -1}, ["function(retries=-1)", "give a whole number, 0 or more"]),
        ({"retries": 1.5}, ["function(retries=1.5)", "give a whole number, 0 or more"]),
        ({"retries": None}, ["function(retries=None)", "give a whole number, 0 or more"]),
        ({"name": 5}, ["function(name=5)", "give a name"]),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_argument_of_function_is_refused_where_it_decorates(
    arguments: dict[str, Any], words: list[str]
) -> None:
    refused(lambda: sky.function(**arguments)(len), *words)


def test_what_cannot_be_called_cannot_be_a_function() -> None:
    refused(lambda: sky.function(7), "@sky.function on 7", "not callable")  # type: ignore[call-overload]


def test_sending_what_is_no_call_says_what_to_write(pool: sky.Compute) -> None:
    for action in (
        lambda: pool.run(echo),  # type: ignore[arg-type]
        lambda: pool.submit(echo.local(1)),  # type: ignore[arg-type]
        lambda: pool.broadcast(len),  # type: ignore[arg-type]
        lambda: sky.gather(echo(1), 2),  # type: ignore[arg-type]
        lambda: pool.run_all([echo(1), "two"]),  # type: ignore[list-item]
        lambda: echo(1) & 2,  # type: ignore[operator]
    ):
        with pytest.raises(TypeError, match=r"is not a call of a @sky.function; write f\(x\)"):
            action()


def test_sending_a_call_nowhere_says_where_it_could_go(pool: sky.Compute) -> None:
    with pytest.raises(TypeError, match=r"5 cannot run functions; use a sky\.Compute"):
        echo(1) >> 5  # type: ignore[operator]
    with pytest.raises(TypeError, match="the module 'math' cannot run functions; did you mean sky"):
        echo(1) >> math
    with pytest.raises(TypeError, match="has not run, so it is neither true nor false"):
        bool(echo(1))


@pytest.mark.parametrize("on", [2, -1, "tail", 1.0, True, (0,)], ids=repr)
def test_a_wrong_node_is_refused_with_those_there_are(pool: sky.Compute, on: Any) -> None:
    for way in (pool.run, pool.submit):
        refused(
            functools.partial(way, echo(1), on=on),
            f"on={on!r}",
            "give 'head' or a node from 0 to 1",
        )


def test_a_broadcast_on_one_node_is_refused(pool: sky.Compute) -> None:
    refused(
        lambda: pool.broadcast(echo(1), on=1),  # type: ignore[arg-type]
        "broadcast(on=1)",
        "a broadcast runs everywhere; use run",
    )


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", True, None], ids=repr)
def test_a_wrong_size_is_refused_and_nothing_changes(pool: sky.Compute, count: Any) -> None:
    refused(lambda: pool.resize(count), f"resize({count!r})", "give a whole number of nodes")
    assert len(pool.nodes) == 2


def test_a_map_over_nothing_or_of_nothing_is_refused(pool: sky.Compute) -> None:
    refused(lambda: pool.map(echo), "map: give at least one iterable")
    refused(lambda: pool.map("echo", [1]), "'echo'", "not callable")  # type: ignore[arg-type]
    refused(lambda: pool.map(echo, 5), "map", "5", "not iterable")  # type: ignore[arg-type]
    refused(lambda: pool.map(echo, [1], None), "map", "None", "not iterable")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sign", "apply"),
    [(">>", operator.rshift), (">", operator.gt), ("@", operator.matmul)],
)
def test_a_function_that_is_not_called_says_so(
    sign: str, apply: Callable[[object, object], object]
) -> None:
    with pytest.raises(TypeError) as caught:
        apply(echo, sky)
    assert str(caught.value).startswith(f"echo {sign} ...: echo is a function")
    assert f"write echo(...) {sign} compute" in str(caught.value)


def test_a_pool_whose_arguments_were_refused_can_be_shown() -> None:
    made = sky.Compute.__new__(sky.Compute)
    with pytest.raises(sky.errors.ConfigurationError):
        made.__init__(nodes=0)  # type: ignore[misc]
    assert repr(made) == "<sky.Compute: not made, its arguments were refused>"


def test_wrong_arguments_of_the_function_itself_are_its_own_type_error(pool: sky.Compute) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'valeu'"):
        echo(valeu=1) >> pool  # type: ignore[call-arg]


def test_what_does_not_listen_to_output_is_refused() -> None:
    refused(
        lambda: sky.redirect_output(7).__enter__(),  # type: ignore[arg-type]
        "redirect_output(7)",
        "give a function of one line",
    )
    refused(
        lambda: sky.stdout(only="tail"),  # type: ignore[arg-type]
        "sky.stdout(only='tail')",
        "give only='head' or a function of InstanceInfo",
    )


@pytest.mark.parametrize("transport", ["udp", None, 5])
def test_an_unknown_transport_is_refused(transport: Any) -> None:
    refused(
        lambda: sky.Local(transport=transport),
        f"Local(transport={transport!r})",
        "choose 'auto', 'unix' or 'tcp'",
    )
