"""A graph in a message: what travels, what a worker makes of it, and what it refuses."""

from __future__ import annotations

import operator

import msgspec
import pytest
import torch

from skyward.device.graphs import runner, sizes, text
from skyward.device.graphs.text import (
    CannotShipError,
    Compiled,
    GraphNode,
    NodeValue,
    NumberInput,
    ShippedGraph,
    Symbol,
    TensorInput,
    TupleValue,
    Writer,
    function_of,
    name_of,
)

from ..conftest import only_in_all, other_case

pytestmark = [
    # Of torch's own, where it imports its compiler.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


def _message(*nodes: GraphNode) -> ShippedGraph:
    """A graph of one input `x` of three numbers; the last node is its result."""
    x = GraphNode("input", "x", content=TensorInput("float32", [3], [1], False))
    output = GraphNode("output", "output", args=TupleValue([NodeValue(nodes[-1].name)]))
    return ShippedGraph(
        number=1,
        nodes=[x, *nodes, output],
        symbols=[],
        inputs=[0],
        outputs=[nodes[-1].name],
        options={},
        static=[],
        visible=[0],
        pair=1,
        is_backward=False,
        is_inference=True,
        cudagraphs=False,
    )


def _bytes(message: ShippedGraph) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(message)), dtype=torch.uint8)


@pytest.fixture(scope="module")
def programs() -> runner.Programs:
    """What a worker keeps of its client's graphs, without a worker."""
    return runner.Programs("cpu")


@other_case
def test_a_worker_runs_a_graph_until_it_is_dropped(programs: runner.Programs) -> None:
    token = programs.ship(
        _bytes(_message(GraphNode("call", "y", "aten::mul.Tensor", [NodeValue("x"), 3])))
    )
    (result,) = programs.run(token, 1, 0, [torch.ones(3)], [], [])
    assert result.tolist() == [3, 3, 3]
    programs.drop(token, 1)
    with pytest.raises(KeyError):
        programs.run(token, 1, 0, [torch.ones(3)], [], [])


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor refuses every graph."""
    from torch._inductor import compile_fx

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nand more about it")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", refuse)


@pytest.mark.usefixtures("without_compiler")
def test_a_graph_that_the_compiler_refuses_is_run_as_it_is(programs: runner.Programs) -> None:
    token = programs.ship(
        _bytes(_message(GraphNode("call", "y", "aten::neg.default", [NodeValue("x")])))
    )
    answer = msgspec.msgpack.decode(bytes(token.tolist()), type=Compiled)
    assert answer.instead == "RuntimeError: no compiler"
    assert programs.run(token, 1, 0, [torch.ones(3)], [], [])[0].tolist() == [-1, -1, -1]


def test_a_compiler_that_tries_code_takes_no_random_numbers_of_the_user(
    programs: runner.Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import compile_fx

    tried = []
    compiled = compile_fx.compile_fx_inner

    def try_code(*given: object, **named: object) -> object:
        tried.append(torch.rand(5))
        return compiled(*given, **named)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", try_code)
    before = torch.get_rng_state()
    programs.ship(_bytes(_message(GraphNode("call", "y", "aten::abs.default", [NodeValue("x")]))))
    assert len(tried) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("without_compiler")
def test_a_worker_keeps_nothing_of_graphs_that_are_dropped() -> None:
    programs = runner.Programs("cpu")
    doubled = _message(GraphNode("call", "y", "aten::mul.Tensor", [NodeValue("x"), 2]))
    for pair in range(3):
        forward, backward = (
            msgspec.structs.replace(doubled, number=2 * pair + at, pair=pair) for at in (0, 1)
        )
        token = programs.ship(_bytes(forward))
        programs.drop(programs.ship(_bytes(backward)), backward.number)
        assert list(programs._pairs) == [pair]  # the forward graph may get another backward one
        programs.drop(token, forward.number)
    assert not programs._pairs
    assert not programs._programs


@pytest.mark.usefixtures("without_compiler")
def test_very_many_sizes_of_a_graph_do_not_fill_the_memory_of_the_worker() -> None:
    programs = runner.Programs("cpu")
    inputs = [
        GraphNode("input", "n", content=NumberInput("s0")),
        GraphNode("input", "x", content=TensorInput("float32", ["s0"], [1], False)),
    ]
    doubled = _message(GraphNode("call", "y", "aten::mul.Tensor", [NodeValue("x"), 2]))
    message = msgspec.structs.replace(
        doubled,
        nodes=[*inputs, *doubled.nodes[1:]],
        symbols=[Symbol("s0", 5, 0, None)],
        inputs=[1, 0],
    )
    token = programs.ship(_bytes(message))
    for size in range(2 * sizes.KNOWN_MAX):
        (result,) = programs.run(token, 1, 0, [torch.ones(size)], [], [size])
        assert result.sum() == 2 * size
    assert len(programs._programs[1]._known) == sizes.KNOWN_MAX


def test_numbers_that_follow_from_sizes_are_kept_for_the_last_ones_only() -> None:
    import sympy

    n = sympy.Symbol("n", integer=True, positive=True)
    following = sizes.Following([n])
    assert following.add(3 * n + 1) == following.add(3 * n + 1) == 0
    assert following.add(sympy.Symbol("other")) is None
    for size in range(1, 2 * sizes.KNOWN_MAX):
        assert following([size]) == [3 * size + 1]
    assert len(following._known) == sizes.KNOWN_MAX


def test_what_was_used_last_is_kept() -> None:
    kept = sizes.Recent[str, int](2)
    kept.keep("a", 1)
    kept.keep("b", 2)
    assert kept.find("a") == 1
    kept.keep("c", 3)
    assert (kept.find("a"), kept.find("b"), kept.find("c")) == (1, None, 3)


def test_a_worker_names_an_operation_that_it_does_not_know(programs: runner.Programs) -> None:
    with pytest.raises(ValueError, match=r"elsewhere::spin.default is not known to this worker"):
        programs.ship(
            _bytes(_message(GraphNode("call", "y", "elsewhere::spin.default", [NodeValue("x")])))
        )


@pytest.mark.parametrize(
    "node",
    [
        GraphNode("call", "y", "os.system", ["true"]),
        GraphNode("call", "y", "builtins.eval", ["1"]),
        GraphNode("call", "y", "operator.attrgetter", ["x"]),
        GraphNode("code", "y"),
    ],
)
def test_a_worker_calls_nothing_but_operations(programs: runner.Programs, node: GraphNode) -> None:
    with pytest.raises(ValueError, match=r"is not known to this worker|a node of kind 'code'"):
        programs.ship(_bytes(_message(node)))


@only_in_all
def test_a_message_that_is_none_costs_the_worker_nothing(device: torch.device) -> None:
    text.shipping_library()
    with pytest.raises(RuntimeError):
        torch.ops.skyward.ship.default(torch.zeros(100, dtype=torch.uint8, device=device))
    assert torch.ones(2, device=device).sum().item() == 2


@pytest.mark.parametrize(
    "text",
    [
        "os.system(s0)",
        "math.exp(s0)",
        "__import__('os')",
        "s0.real",
        "[s0]",
        "unknown",
        "s0 if s0 else 1",
    ],
)
def test_a_size_is_arithmetic_and_nothing_else(text: str) -> None:
    import sympy

    with pytest.raises(ValueError, match="a size cannot be"):
        sizes.parsed(text, {"s0": sympy.Symbol("s0")})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("2*s0 + 1", 15), ("(s0//2)", 3), ("Max(s0, 9)", 9), ("-s0 + 8", 1)],
        *[("32*CeilToInt(IntTrueDiv(s0, 32))", 32), ("FloorToInt(1.5*ToFloat(s0))", 10)],
        *[("TruncToInt(IntTrueDiv(s0, 2))", 3), ("CeilToInt(FloatTrueDiv(ToFloat(s0), 2.0))", 4)],
        *[("8*max(1, 32*math.ceil(s0 / 32))", 256), ("min(s0, math.floor(1.5 * s0 / 2))", 5)],
        *[("abs(-s0) ** 2", 49), ("math.trunc(float(s0) / 2)", 3)],
    ],
)
def test_sizes_are_computed_as_they_are_written(text: str, value: int) -> None:
    import sympy

    symbol = sympy.Symbol("s0", integer=True, positive=True)
    assert sizes.parsed(text, {"s0": symbol}).subs({symbol: 7}) == value


@pytest.mark.parametrize(
    "target",
    [torch.ops.aten.add.Tensor, torch.ops.aten.relu.default, operator.getitem, torch.sym_max],
)
def test_what_a_node_calls_has_the_same_name_at_both_ends(target: object) -> None:
    assert function_of(name_of(target)) is target


def test_a_function_of_the_users_own_does_not_travel() -> None:
    with pytest.raises(CannotShipError, match="a call of 'test_a_function"):
        name_of(test_a_function_of_the_users_own_does_not_travel)
    with pytest.raises(CannotShipError, match="an argument of type Generator"):
        Writer(torch.device("cpu")).value(torch.Generator())
