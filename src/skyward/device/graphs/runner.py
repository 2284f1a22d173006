"""The worker's side: compiles the graphs of its client for its own device, and runs them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from skyward.device import operators
from skyward.device.graphs.sizes import KNOWN_MAX, Recent, parsed
from skyward.device.graphs.text import (
    Compiled,
    GraphReader,
    NumberInput,
    ShippedGraph,
    TensorInput,
    shipping_library,
)

UNBOUNDED = 1 << 62


def install(device: str) -> Programs:
    """Have this process carry out the operations of graphs, for the device that it serves."""
    programs = Programs(device)
    library = shipping_library()
    for name in ("ship", "run", "drop", "place"):
        library.impl(name, getattr(programs, name), "CompositeExplicitAutograd")
    return programs


class Programs:
    """The graphs that the client has shipped, by their numbers."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        self._programs: dict[int, Program] = {}
        self._pairs: dict[int, Any] = {}

    def ship(self, message: Any) -> Any:
        """Take a graph and compile it."""
        import torch

        _choose_cache_folder()
        _load_compiler()
        content = bytes(message.cpu().tolist())
        shipped = msgspec.msgpack.decode(content, type=ShippedGraph)
        program = Program(shipped, self._device, self._pairs)
        answer = program.compile()
        self._programs[shipped.number] = program
        told = bytearray(msgspec.msgpack.encode(answer))
        return torch.frombuffer(told, dtype=torch.uint8).to(self._device)

    def run(
        self,
        token: Any,
        number: int,
        generation: int,
        read: list[Any],
        written: list[Any],
        numbers: list[int],
    ) -> list[Any]:
        """Run a graph."""
        return self._programs[number](generation, [*read, *written, *numbers])

    def place(self, group: str, device: Any) -> Any:
        """This rank's place in a process group of its mesh."""
        import torch
        from torch.distributed import distributed_c10d

        c10d: Any = distributed_c10d
        return torch.tensor(c10d._resolve_process_group(group).rank(), device=device)

    def forget(self) -> None:
        """Forget all graphs: the client has left, and the next one has its own."""
        self._programs.clear()
        self._pairs.clear()
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is not None:
            # What a GPU has recorded holds memory of its own.
            trees.reset_cudagraph_trees()

    def drop(self, token: Any, number: int) -> None:
        """Forget a graph, and what it shared with its counterpart if that is gone as well."""
        program = self._programs.pop(number, None)
        if program and all(other.pair != program.pair for other in self._programs.values()):
            self._pairs.pop(program.pair, None)


def _load_compiler() -> None:
    """Import the compiler, and all that a graph may name.

    On the thread that runs graphs: the manager of CUDA graphs belongs to the thread that imports
    it.
    """
    import torch._higher_order_ops
    import torch._inductor.compile_fx
    import torch._inductor.cudagraph_trees
    import torch._inductor.inductor_prims  # noqa: F401


class Program:
    """One graph, compiled once for each set of sizes that the compiler tells apart."""

    def __init__(self, message: ShippedGraph, device: Any, pairs: dict[int, Any]) -> None:
        from torch._dynamo.mutation_guard import GenerationTracker

        self._calls = GenerationTracker
        self._message, self._device, self._pairs = message, device, pairs
        self.pair = message.pair
        self._order = message.inputs
        self._outputs: list[int] = []
        self._variants: list[tuple[Callable[[list[int]], bool], Callable[[list[Any]], Any]]] = []
        self._compiled: list[Any] = []
        self._known: Recent[tuple[int, ...], Callable[[list[Any]], Any]] = Recent(KNOWN_MAX)
        self._numbers = [
            at for at, node in enumerate(self._inputs()) if isinstance(node, NumberInput)
        ]

    def __call__(self, generation: int, sent: list[Any]) -> list[Any]:
        inputs = [sent[at] for at in self._order]
        sizes = tuple(inputs[at] for at in self._numbers)
        run = self._known.find(sizes)
        if run is None:
            run = self._known.keep(sizes, self._variant(sizes))
        if generation:
            self._calls.generation = generation
        results = run(inputs)
        return [results[at] for at in self._outputs]

    def _variant(self, sizes: tuple[int, ...]) -> Callable[[list[Any]], Any]:
        """The code for these sizes, of which the compiler may have assumed something."""
        for fits, run in self._variants:
            if fits(list(sizes)):
                return run
        self.compile(sizes)
        return self._variants[-1][1]

    def _inputs(self) -> list[TensorInput | NumberInput]:
        return [
            msgspec.convert(node.content, TensorInput | NumberInput)
            for node in self._message.nodes
            if node.kind == "input"
        ]

    def compile(self, sizes: tuple[int, ...] | None = None) -> Compiled:
        """Compile for the sizes of the message, or others."""
        answer: list[Compiled | BaseException] = []

        def work() -> None:
            try:
                answer.append(self._compile(sizes))
            except BaseException as problem:
                answer.append(problem)

        # The thread that serves the client has settings for running operations, and none of them
        # is meant for the tracing that a compiler does.
        thread = threading.Thread(target=work, name="skyward-compile")
        thread.start()
        thread.join()
        if isinstance(answer[0], BaseException):
            raise answer[0]
        return answer[0]

    def _compile(self, sizes: tuple[int, ...] | None) -> Compiled:
        import torch
        from torch._dynamo.utils import preserve_rng_state

        with contextlib.ExitStack() as stack:
            # A compiler that tries code fills tensors at random, and the user's numbers must not
            # depend on whether it did.
            stack.enter_context(preserve_rng_state())
            if self._device.type == "cuda":
                stack.enter_context(torch.cuda.device(self._device))
            for name, modules in self._message.libraries.items():
                operator, _, overload = name.partition(".")
                if why := operators.bring(operator, overload, modules):
                    raise ValueError(f"{operator} is not known to the worker: {why}")
            reader = GraphReader(self._device)
            module = reader.module(self._message.nodes)
            output = next(node for node in module.graph.nodes if node.op == "output")
            names = [getattr(result, "name", None) for result in output.args[0]]
            self._outputs = [names.index(name) for name in self._message.outputs]
            try:
                return self._by_inductor(reader, module, output, sizes)
            except Exception as problem:
                # No compiler on this machine, or a graph that Inductor does not know.
                from torch._functorch._aot_autograd.utils import make_boxed_func

                plain = reader.module(self._message.nodes)
                self._variants.append((lambda _: True, make_boxed_func(plain.forward)))
                return Compiled([], instead=_first_line(problem))

    def _by_inductor(
        self, reader: GraphReader, module: Any, output: Any, sizes: tuple[int, ...] | None
    ) -> Compiled:
        from torch._dynamo.utils import counters
        from torch._inductor import compile_fx, config
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex
        from torch._inductor.fx_passes import joint_graph
        from torch._inductor.utils import BoxedBool

        message = self._message
        output.meta["user_visible_output_idxs"] = message.visible
        example = _Example(reader, message, self._inputs(), sizes)
        example.describe_within(module)
        hits = counters["inductor"]["fxgraph_cache_hit"]
        forward = self._pairs.get(message.pair)
        if forward is None:
            forward = self._pairs[message.pair] = BoxedDeviceIndex(None)
        with example.tracing(), config.patch(_known(config, message.options)):
            if self._device.type == "cuda":
                example.describe(module)
                # Where these passes ran before, no tensor was on a GPU; some are for GPUs only, as
                # the padding of matrices whose sizes are odd.
                joint_graph.joint_graph_passes(module)
            compiled = compile_fx.compile_fx_inner(
                module,
                example.inputs,
                static_input_idxs=message.static,
                cudagraphs=BoxedBool(message.cudagraphs),
                is_backward=message.is_backward,
                is_inference=message.is_inference,
                graph_id=message.pair,
                boxed_forward_device_index=forward,
            )
        # Straight to the code: around it there is only what measures a process that compiles. The
        # object must live, since it takes its CUDA graphs along.
        self._compiled.append(compiled)
        fits = example.fits(getattr(compiled, "guards_expr", None))
        self._variants.append((fits, getattr(compiled, "current_callable", compiled)))
        was_cached = counters["inductor"]["fxgraph_cache_hit"] > hits
        return Compiled(example.strides(getattr(compiled, "output_strides", None)), was_cached)


def _first_line(problem: Exception) -> str:
    lines = [line for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"


def _known(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Those options that this version of PyTorch has."""
    names = config.get_config_copy()
    return {name: value for name, value in options.items() if name in names}


def _choose_cache_folder() -> None:
    """Code is kept with what else Skyward keeps on a machine, unless the user has said where."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        cache = os.environ.get("SKYWARD_CACHE") or platformdirs.user_cache_dir("skyward")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache) / "graphs")


class _Example:
    """Inputs without memory to compile a graph with: sizes are numbers, or symbols."""

    def __init__(
        self,
        reader: GraphReader,
        message: ShippedGraph,
        inputs: Sequence[TensorInput | NumberInput],
        sizes: tuple[int, ...] | None,
    ) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._environment = ShapeEnv()
        self._symbols: dict[str, Any] = {}
        hints = {symbol.name: symbol.hint for symbol in message.symbols}
        if sizes is not None:
            numbers = [node.expression for node in inputs if isinstance(node, NumberInput)]
            for name, size in zip(numbers, sizes, strict=True):
                if name in hints:
                    hints[str(name)] = size
        self._reader, self._hints = reader, hints
        for symbol in message.symbols:
            self._symbols[symbol.name] = self._symbol(symbol, hints[symbol.name])
        self._mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        self.inputs = [self._input(node) for node in inputs]

    def describe(self, module: Any) -> None:
        """Give the values of nodes to a graph."""
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        FakeTensorProp(module, mode=self._mode).propagate_dont_convert_inputs(*self.inputs)

    def describe_within(self, module: Any) -> None:
        """Give the values of nodes to the graphs that nodes of this one take as arguments.

        The compiler finds those of the graph itself, and of no graph within it.
        """
        import torch
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        for name, within in module.named_modules():
            if not name or not isinstance(within, torch.fx.GraphModule):
                continue
            places = [node for node in within.graph.nodes if node.op == "placeholder"]
            described = [
                msgspec.convert(place.meta["described"], TensorInput | NumberInput)
                for place in places
            ]
            FakeTensorProp(within, mode=self._mode).propagate_dont_convert_inputs(
                *map(self._input, described)
            )

    def _symbol(self, symbol: Any, hint: int) -> Any:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        made = self._environment.create_symbol(
            hint,
            ConstantSource(symbol.name),
            dynamic_dim=DimDynamic.DYNAMIC,
            do_not_specialize_zero_one=True,
        )
        most = UNBOUNDED if symbol.most is None else symbol.most
        self._environment.constrain_symbol_range(made, compiler_min=symbol.least, compiler_max=most)
        return made

    def _size(self, expression: int | str) -> Any:
        if isinstance(expression, int):
            return expression
        size = parsed(expression, self._symbols)
        value = size.subs({s: self._hints[n] for n, s in self._symbols.items()})
        return self._environment.create_symintnode(size, hint=int(value))

    def _input(self, node: TensorInput | NumberInput) -> Any:
        import torch

        if isinstance(node, NumberInput):
            return self._size(node.expression)
        sizes = [self._size(size) for size in node.sizes]
        strides = [self._size(stride) for stride in node.strides]
        device = self._reader.device("cpu" if node.on_host else "")
        dtype = self._reader.dtype(node.dtype)
        with self._mode:
            return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    def tracing(self) -> Any:
        """What the compiler asks for its symbols; without it, code is not kept for another time."""
        from torch._guards import TracingContext, tracing

        return tracing(TracingContext(self._mode))

    def fits(self, assumed: str | None) -> Callable[[list[int]], bool]:
        """Whether other sizes meet what the compiler has assumed, now or when it was kept."""
        import torch

        numbers = [value for value in self.inputs if isinstance(value, torch.SymInt)]
        if not numbers:
            return lambda _: True
        code = assumed or self._environment.produce_guards_expression(numbers)
        if code is None:
            return lambda _: True
        return lambda sizes: bool(self._environment.evaluate_guards_expression(code, sizes))

    def strides(self, written: Any) -> list[list[str] | None]:
        """The strides of results, in the client's symbols, as Python: the tracer runs them."""
        import sympy  # type: ignore[import-untyped]
        from torch.utils._sympy.printers import PythonPrinter

        if written is None:
            return []
        ours = {str(symbol): symbol for symbol in self._symbols.values()}
        theirs = {
            symbol: sympy.Symbol(name, integer=True) for name, symbol in self._symbols.items()
        }

        def told(stride: str) -> str:
            if stride.isdigit():
                return stride
            return str(PythonPrinter().doprint(parsed(stride, ours).xreplace(theirs)))

        return [None if one is None else [told(stride) for stride in one] for one in written]
