"""The client's side: a traced graph becomes a message, and its calls become one operation each."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from skyward.device import operators
from skyward.device.graphs import calls, promises
from skyward.device.graphs.promises import Promises, UnknownError
from skyward.device.graphs.sizes import Following, expression_of
from skyward.device.graphs.text import (
    CannotShipError,
    Compiled,
    GraphNode,
    NumberInput,
    ShippedGraph,
    Symbol,
    Writer,
    name_of,
    object_of,
    shipping_library,
)
from skyward.device.library import Core
from skyward.errors import DeviceError

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


def compile_fx(
    core: Core, original: Callable[..., Any], model: Any, inputs: Any, **given: Any
) -> Any:
    """Compile a traced function whose tensors are on a sky device.

    Inductor's own passes run here; the graphs that they end with are compiled by the worker.
    """
    import torch._functorch.config as functorch

    compiler = _Compiler(core)
    # Its cache keeps code, and there is none here; the worker has a cache of its own.
    with functorch.patch(enable_autograd_cache=False):
        made = original(model, inputs, inner_compile=compiler, **given)
    return calls.short(made, core, compiler.shipped)


class _Compiler:
    """Stands where Inductor calls its code generator."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.shipped: list[_Shipped] = []

    def __call__(self, graph: Any, inputs: Sequence[Any], **options: Any) -> Any:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            try:
                shipped = _Shipped(self._core, graph, inputs, options)
                self.shipped.append(shipped)
                return _output_code(shipped, inputs)
            except CannotShipError as problem:
                why = f"it has {problem}"
            except RuntimeError as problem:
                why = f"the worker says: {problem}"
        _say(f"torch.compile: a graph runs operation by operation, since {why}")
        return _output_code(_Plain(graph), inputs)


def _say(what: str) -> None:
    warnings.warn(what, stacklevel=2)


class _Plain:
    """A graph that runs here, each operation on its own."""

    strides = None

    def __init__(self, graph: Any) -> None:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        self._run = make_boxed_func(graph.forward)

    def __call__(self, inputs: list[Any]) -> Any:
        return self._run(inputs)


class _Shipped:
    """A graph on a worker: a call is one operation, whose results are tensors of the device."""

    def __init__(
        self, core: Core, graph: Any, inputs: Sequence[Any], options: dict[str, Any]
    ) -> None:
        import torch

        shipping_library()
        self._run = torch.ops.skyward.run.default
        self._dropping: Any = None
        self.is_used = False
        self._core = core
        self._device = _device_of(graph, inputs)
        writer = Writer(self._device)
        shape = _Shape(writer, graph, inputs)
        self._read, self._written, self._numbers = shape.read, shape.written, shape.numbers
        self._places, self.sizes = shape.places, shape.sizes
        self._objects = list(shape.objects.items())
        cudagraphs = options.get("cudagraphs")
        self.generation = _generations() if cudagraphs else int
        message = ShippedGraph(
            number=next(_numbers),
            nodes=[*shape.inputs, *writer.nodes(graph), shape.output],
            symbols=_symbols(inputs),
            inputs=shape.order,
            outputs=shape.outputs,
            options=_options(),
            static=[int(i) for i in options.get("static_input_idxs") or ()],
            visible=[int(i) for i in shape.visible],
            pair=-1 if options.get("graph_id") is None else options["graph_id"],
            is_backward=bool(options.get("is_backward")),
            is_inference=bool(options.get("is_inference")),
            cudagraphs=bool(cudagraphs),
            libraries=_libraries(graph),
        )
        self.number, self.is_backward = message.number, message.is_backward
        self.ends = shape.ends(options)
        self._message = msgspec.msgpack.encode(message)
        answer = self._ship()
        self._say_instead(answer)
        self.strides = answer.strides if not answer.instead else None
        self.promises = self._promised(shape)
        if self.promises is not None and not self._numbers:
            self.promises.make(())

    def promise(self, numbers: Sequence[int]) -> None:
        """See that the core knows what a call with these sizes returns."""
        if numbers and self.promises is not None:
            self.promises.make(numbers)

    def _ship(self) -> Compiled:
        import torch

        start = time.monotonic()
        self.opening = self._core.openings[self._device.index]
        message = torch.frombuffer(bytearray(self._message), dtype=torch.uint8)
        with torch.no_grad():
            self.token = torch.ops.skyward.ship.default(message.to(self._device))
        if self._dropping is not None:
            self._dropping.detach()  # the worker that had the graph is gone
        self._dropping = weakref.finalize(self, _drop, self.token, self.number)
        self._dropping.atexit = False
        answer = _compiled(self.token)
        _log.info(
            "graph %d (%s, %d bytes): %.1f s on the worker of %s%s",
            self.number,
            "backward" if self.is_backward else "forward",
            len(self._message),
            time.monotonic() - start,
            self._device,
            ", from its cache" if answer.was_cached else "",
        )
        return answer

    def _say_instead(self, answer: Compiled) -> None:
        if answer.instead:
            _say(
                f"torch.compile: the worker of {self._device} runs a graph operation by operation, "
                f"since it cannot compile it: {answer.instead}"
            )

    def _ship_again(self) -> None:
        """Give the graph to the new worker of a device that was opened again."""
        answer = self._ship()
        self._say_instead(answer)
        if self.promises is not None:
            self.promises.begin_again()
        if self.strides is None or answer.instead or answer.strides == self.strides:
            return
        # Graphs that take the results were compiled for the strides that the first worker told.
        what = (
            f"the new worker of {self._device} lays out the results of a compiled graph in another "
            "way than the worker that it was compiled for"
        )
        if self.promises is None:
            self.opening = -1  # the next call finds the same
            raise DeviceError(
                f"{what}; call torch.compiler.reset(), and compile the function again"
            )
        _say(
            f"torch.compile: {what}, and copies them to that layout in every call; "
            "torch.compiler.reset() has functions compiled anew"
        )

    def _promised(self, shape: _Shape) -> Promises | None:
        """What calls will return; None where the worker has to be asked."""
        if self.strides is None or len(self.strides) < len(shape.made):
            return None
        strides = [self.strides[at] for at in shape.made]
        try:
            return Promises(self.number, shape.given, shape.results, strides)
        except UnknownError:
            return None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self._core.openings[self._device.index] != self.opening:
            self._ship_again()
        numbers = [inputs[i] for i in self._numbers]
        self.promise(numbers)
        self.is_used = True
        made = self._run(
            self.token,
            self.number,
            self.generation(),
            [inputs[i] for i in self._read],
            [inputs[i] for i in self._written],
            numbers,
        )
        found = [*made, *inputs, *self.sizes(numbers)]
        inputs.clear()
        results = [None if at is None else found[at] for at in self._places]
        for at, each in self._objects:
            results[at] = each
        return results


def _compiled(token: Any) -> Compiled:
    """What the worker made of a graph, or the workers of a mesh.

    Some of these may have found the code that another has just put into a cache of all.
    """
    module: Any = sys.modules.get("skyward.device.mesh")
    mesh = module.mesh_of(token) if module else None
    tokens = mesh.each(token) if mesh else [token.cpu()]
    answers = [msgspec.msgpack.decode(bytes(each.tolist()), type=Compiled) for each in tokens]
    return Compiled(
        answers[0].strides,
        all(answer.was_cached for answer in answers),
        next((answer.instead for answer in answers if answer.instead), ""),
    )


def _drop(token: Any, number: int) -> None:
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    # The garbage may be collected while another graph is traced, whose tensors have no memory. A
    # device that is gone has taken its worker's graphs along.
    with _disable_current_modes(), contextlib.suppress(RuntimeError):
        promises.forget(number)
        torch.ops.skyward.leave.default(token, number)


class _Shape:
    """What goes into a graph and what comes out, in the order of a call's arguments."""

    def __init__(self, writer: Writer, graph: Any, inputs: Sequence[Any]) -> None:
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        changed = _changed(graph)
        self.read: list[int] = []
        self.written: list[int] = []
        self.numbers: list[int] = []
        self.inputs: list[GraphNode] = []
        for at, (place, value) in enumerate(zip(places, inputs, strict=True)):
            if object_of(graph, place) is not None:
                continue
            content = writer.input(value)
            if isinstance(content, NumberInput):
                self.numbers.append(at)
            else:
                is_changed = place in changed
                # A number that lies on the host goes along with a call; nothing comes back into it.
                if content.on_host and (content.sizes or is_changed):
                    use = "writes to" if is_changed else "reads"
                    raise CannotShipError(
                        f"a tensor on {value.device} of shape {tuple(value.shape)} that it {use}"
                    )
                (self.written if is_changed else self.read).append(at)
            self.inputs.append(GraphNode("input", place.name, content=content))
        sent = [*self.read, *self.written, *self.numbers]
        self.order = [sent.index(at) for at in sorted(sent)]
        self.names = [place.name for place in places]
        self.dense = [_is_dense(value) for value in inputs]
        self.given = [inputs[at] for at in self.numbers]
        self.sizes = Following(self.given)
        self._results(writer, graph, places)

    def _results(self, writer: Writer, graph: Any, inputs: list[Any]) -> None:
        """Each distinct tensor comes back once. An input that is returned does not travel, nor a
        number, which follows from the sizes of inputs.
        """
        output = next(node for node in graph.graph.nodes if node.op == "output")
        results = list(output.args[0])
        self.result_names = [getattr(result, "name", None) for result in results]
        objects = {at: object_of(graph, result) for at, result in enumerate(results)}
        self.objects = {at: each for at, each in objects.items() if each is not None}
        """Results that are the same in each call."""
        self.visible = output.meta.get("user_visible_output_idxs", ())
        self.output = GraphNode(
            "output",
            "output",
            args=writer.value(
                tuple(None if at in self.objects else result for at, result in enumerate(results))
            ),
        )
        tensors = [node for node in results if _is_tensor(node) and node not in inputs]
        distinct = {node.name: node for node in tensors}
        self.outputs = list(distinct)
        self.results = [node.meta["val"] for node in distinct.values()]
        self.made = [results.index(node) for node in distinct.values()]
        """Where the tensors that come back are among all results."""
        self.places: list[int | None] = []
        """For each result, where it is among the tensors that come back, the inputs, the sizes."""
        for at, result in enumerate(results):
            if result is None or at in self.objects:
                self.places.append(None)
            elif result in inputs:
                self.places.append(len(self.outputs) + inputs.index(result))
            elif _is_tensor(result):
                self.places.append(self.outputs.index(result.name))
            else:
                wanted = expression_of(getattr(result, "meta", {}).get("val", result))
                size = self.sizes.add(wanted)
                if size is None:
                    raise CannotShipError(
                        f"the result {wanted}, which does not follow from its sizes"
                    )
                self.places.append(len(self.outputs) + len(inputs) + size)

    def ends(self, options: dict[str, Any]) -> calls.Ends:
        """What a call without AOTAutograd's Python goes by."""
        from torch._guards import TracingContext

        context = TracingContext.try_get()
        return calls.Ends(
            inputs=self.names,
            dense=self.dense,
            read=self.read,
            written=self.written,
            numbers=self.numbers,
            results=self.result_names,
            places=self.places,
            made=len(self.outputs),
            metadata=getattr(context, "fw_metadata", None),
            is_recorded=bool(options.get("cudagraphs")),
        )


def _is_dense(value: Any) -> bool:
    """Whether a traced tensor is contiguous for all sizes, so that any other can be made so."""
    import torch

    if not isinstance(value, torch.Tensor):
        return False
    expected = expression_of(1)
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if expression_of(size) != 1 and expression_of(stride) != expected:
            return False
        expected = expected * expression_of(size)
    return True


def _is_tensor(node: Any) -> bool:
    import torch

    value = getattr(node, "meta", {}).get("val")
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _changed(graph: Any) -> set[Any]:
    """The inputs that the graph writes to."""
    changed = set[Any]()
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        for argument, value in itertools.zip_longest(schema.arguments, node.args):
            if argument is not None and argument.alias_info and argument.alias_info.is_write:
                given = node.kwargs.get(argument.name) if value is None else value
                changed.update(given if isinstance(given, list | tuple) else [given])
    return {node for node in changed if getattr(node, "op", "") == "placeholder"}


def _symbols(inputs: Sequence[Any]) -> list[Symbol]:
    """The symbols of all sizes."""
    import torch
    from torch.utils._sympy.numbers import int_oo

    found: dict[str, Symbol] = {}
    for value in inputs:
        numbers = [value] if isinstance(value, torch.SymInt) else []
        if isinstance(value, torch.Tensor):
            numbers = [n for n in (*value.shape, *value.stride()) if isinstance(n, torch.SymInt)]
        for number in numbers:
            environment = number.node.shape_env
            hints = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
            for symbol in number.node.expr.free_symbols:
                if symbol not in hints:
                    raise CannotShipError(f"the size {symbol}, which depends on data")
                bounds = environment.var_to_range[symbol]
                most = None if bounds.upper in (int_oo,) else int(bounds.upper)
                least = int(bounds.lower) if bounds.lower not in (-int_oo,) else 0
                found[str(symbol)] = Symbol(str(symbol), int(hints[symbol]), least, most)
    return list(found.values())


def _device_of(graph: Any, inputs: Sequence[Any]) -> Any:
    """The one sky device of the graph."""
    import torch

    made = [node.meta.get("val") for node in graph.graph.nodes]
    values = [v for v in (*inputs, *made) if isinstance(v, torch.Tensor)]
    found = next((value.device for value in values if value.device.type == "sky"), None)
    if found is None:
        raise CannotShipError("no tensor on a sky device")
    return found


def _libraries(graph: Any) -> dict[str, tuple[str, ...]]:
    """The modules that register the operators of other libraries in the graph."""
    import torch

    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    called = {node.target for node in nodes if object_of(graph, node) is None}
    names = {name_of(each) for each in called if isinstance(each, torch._ops.OpOverload)}
    return {
        name: operators.modules_of(name.partition(".")[0])
        for name in names
        if operators.is_foreign(name)
    }


def _options() -> dict[str, Any]:
    """What the user has set of Inductor's options; the worker's own defaults may be others."""
    from torch._inductor import config

    kinds = (bool, int, float, str)
    changed = config._get_dict(skip_default=True)  # type: ignore[attr-defined]
    return {name: value for name, value in changed.items() if isinstance(value, kinds)}


def _generations() -> Callable[[], int]:
    """Counts calls of compiled functions, or the user's own marks of a new step."""
    from torch._dynamo.mutation_guard import GenerationTracker
    from torch._inductor.cudagraph_trees import MarkStepBox

    return lambda: MarkStepBox.mark_step_counter or GenerationTracker.generation


def _output_code(run: _Shipped | _Plain, inputs: Sequence[Any]) -> Any:
    """The graph as Inductor wants its code, and its results' strides where it looks for them."""
    from torch._inductor.output_code import OutputCode
    from torch._inductor.utils import set_tracing_context_output_strides

    class CodeElsewhere(OutputCode):
        """Code that is elsewhere."""

        def __call__(self, given: Any) -> Any:
            return run(given)

        def post_compile(self, *_: Any) -> None:
            """There is nothing to add."""

    code = CodeElsewhere()
    # On the object: PyTorch wraps it in a function, which takes over what the object has.
    code._boxed_call = True  # type: ignore[attr-defined]
    if run.strides is not None:
        code.output_strides = run.strides  # type: ignore[attr-defined]
        set_tracing_context_output_strides(inputs, code)  # type: ignore[arg-type]
    return code
