"""A traced graph as a message: written by the client, read by the worker.

Only what is named here travels: operations by their names, numbers, texts, small constants. There
is no code in a message and nothing to unpickle.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, cast

import msgspec

CONSTANT_BYTES = 1 << 20
"""How large a constant of a graph may be; what is larger is an input in any sensible graph."""
FUNCTIONS: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (
            operator,
            "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ not_ "
            "getitem",
        ),
        (math, "ceil floor trunc sqrt"),
        (builtins, "round"),
    )
    for name in names.split()
}
"""What graphs compute with sizes, besides operations of PyTorch."""
SYMBOLIC = ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite", "sym_sqrt")

NAMESPACE = "skyward"
SCHEMAS = (
    # Gives a graph to the worker, as `text` writes it; returns what the worker made of it.
    "ship(Tensor message) -> Tensor",
    # `token` is what `ship` returned: it names the device, also for a graph without inputs.
    # `generation` counts calls of compiled functions, for CUDA graphs that reuse their memory.
    "run(Tensor token, int graph, Scalar generation, Tensor[] read, Tensor(a!)[] written, "
    "int[] numbers) -> Tensor[]",
    "drop(Tensor token, int graph) -> ()",
    # Only on the client: tells its core what `run` will return for these numbers, so that nobody
    # asks the worker. `results` have no memory; without them, the graph is gone.
    "promise(Tensor[]? results, int graph, int[] numbers) -> ()",
    # The place of each rank in a process group of a mesh: within a graph, where no number may
    # stand for it.
    "place(str group, Device device) -> Tensor",
)
"""The operations by which a client ships graphs and runs them: both ends know them by name.

To the device's core they are operations like any other: their arguments and results are slots, and
a call costs one record.
"""


class CannotShipError(Exception):
    """The graph has something that does not travel; the text names it."""


class Tagged(msgspec.Struct, array_like=True):
    """A value that msgpack does not know as what it is."""


class NodeValue(Tagged, tag="node"):
    """The result of an earlier node."""

    name: str


class ListValue(Tagged, tag="list"):
    items: list[Any]


class TupleValue(Tagged, tag="tuple"):
    items: list[Any]


class SliceValue(Tagged, tag="slice"):
    items: list[Any]


class DictValue(Tagged, tag="dict"):
    items: list[tuple[str, Any]]


class TorchValue(Tagged, tag="torch"):
    """A dtype, layout or memory format."""

    kind: str
    name: str


class DeviceValue(Tagged, tag="device"):
    """A device; `kind` is empty for the one that the graph runs on."""

    kind: str


class ComplexValue(Tagged, tag="complex"):
    real: float
    imaginary: float


Special = (
    NodeValue
    | ListValue
    | TupleValue
    | SliceValue
    | DictValue
    | TorchValue
    | DeviceValue
    | ComplexValue
)


class GraphNode(msgspec.Struct, array_like=True):
    """One node: `kind` is "input", "call", "constant", "graph" or "output"."""

    kind: str
    name: str
    target: str = ""
    args: Any = None
    kwargs: Any = None
    content: Any = None
    """An input's or constant's description, or a graph within this one."""


class TensorInput(msgspec.Struct, tag="tensor", array_like=True):
    """Sizes and strides are numbers, or expressions of the message's symbols."""

    dtype: str
    sizes: list[int | str]
    strides: list[int | str]
    on_host: bool


class NumberInput(msgspec.Struct, tag="number", array_like=True):
    expression: int | str


class Constant(msgspec.Struct, array_like=True):
    dtype: str
    sizes: list[int]
    content: bytes
    on_host: bool


class Symbol(msgspec.Struct, array_like=True):
    """A size that is not the same in every call, what it is in this one, and its bounds."""

    name: str
    hint: int
    least: int
    most: int | None


class ShippedGraph(msgspec.Struct):
    """A graph, and how it is to be compiled."""

    number: int
    nodes: list[GraphNode]
    symbols: list[Symbol]
    inputs: list[int]
    """For each input, in the order of the graph: where it comes in a call, among tensors that are
    read, then those that are written, then numbers."""
    outputs: list[str]
    """The nodes whose tensors a call returns."""
    options: dict[str, Any]
    """What differs from Inductor's defaults."""
    static: list[int]
    """Inputs that lie at the same place in every call."""
    visible: list[int]
    """Outputs whose strides the user sees."""
    pair: int
    """The same for the forward and the backward graph of one function."""
    is_backward: bool
    is_inference: bool
    cudagraphs: bool
    libraries: dict[str, tuple[str, ...]] = {}
    """The modules that register the operators of other libraries than PyTorch."""


class Compiled(msgspec.Struct):
    """What the worker made of a graph."""

    strides: list[list[str] | None]
    """Of each of the graph's outputs, if the compiler chose them."""
    was_cached: bool = False
    """Whether the code was there from an earlier time."""
    instead: str = ""
    """Why the graph is not compiled, if it is run as it is."""


# Writing, on the client.


class Writer:
    """Writes the nodes of one graph module."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def nodes(self, graph: Any) -> list[GraphNode]:
        """All nodes of a graph but its inputs and its output."""
        return [
            self._node(graph, node)
            for node in graph.graph.nodes
            if node.op not in ("placeholder", "output") and object_of(graph, node) is None
        ]

    def value(self, value: Any) -> Any:
        """An argument of a node."""
        import torch

        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.fx.Node):
            if (found := object_of(value.graph.owning_module, value)) is not None:
                raise CannotShipError(f"an operation that takes a {type(found).__name__}")
            return NodeValue(value.name)
        if isinstance(value, list | tuple):
            items = [self.value(item) for item in value]
            return ListValue(items) if isinstance(value, list) else TupleValue(items)
        if isinstance(value, slice):
            return SliceValue([self.value(v) for v in (value.start, value.stop, value.step)])
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return DictValue([(key, self.value(item)) for key, item in value.items()])
        if isinstance(value, complex):
            return ComplexValue(value.real, value.imag)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return TorchValue(type(value).__name__, str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return DeviceValue(self.place(value))
        raise CannotShipError(f"an argument of type {type(value).__name__}")

    def place(self, device: Any) -> str:
        """A device as the worker finds it."""
        if device.type == "sky":
            if device.index not in (None, self._device.index):
                raise CannotShipError(f"tensors of both {self._device} and {device}")
            return ""
        if device.type in ("cpu", "meta"):
            return str(device.type)
        raise CannotShipError(f"a tensor on {device}")

    def input(self, value: Any) -> TensorInput | NumberInput:
        """What is known of an input before there is one."""
        import torch

        if isinstance(value, int | torch.SymInt):
            return NumberInput(_size(value))
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            kind = getattr(value, "layout", None) or type(value).__name__
            raise CannotShipError(f"an input of type {kind}")
        dtype = str(value.dtype).removeprefix("torch.")
        sizes, strides = ([_size(n) for n in numbers] for numbers in (value.shape, value.stride()))
        return TensorInput(dtype, sizes, strides, bool(self.place(value.device)))

    def _node(self, graph: Any, node: Any) -> GraphNode:
        if node.op == "get_attr":
            return self._attribute(node.name, operator.attrgetter(node.target)(graph))
        if node.op != "call_function":
            raise CannotShipError(f"a node of kind {node.op}")
        kwargs = {key: self.value(value) for key, value in node.kwargs.items()}
        args = [self.value(value) for value in node.args]
        return GraphNode("call", node.name, name_of(node.target), args, kwargs)

    def _attribute(self, name: str, value: Any) -> GraphNode:
        import torch

        if isinstance(value, torch.fx.GraphModule):
            return GraphNode("graph", name, content=self._within(value))
        if not isinstance(value, torch.Tensor) or type(value) is not torch.Tensor:
            raise CannotShipError(f"an attribute of type {type(value).__name__}")
        if value.nbytes > CONSTANT_BYTES:
            raise CannotShipError(f"a constant of {value.nbytes} bytes")
        host = value.detach().cpu().contiguous()
        content = bytes(host.flatten().view(torch.uint8).tolist())
        dtype = str(value.dtype).removeprefix("torch.")
        constant = Constant(dtype, list(host.shape), content, bool(self.place(value.device)))
        return GraphNode("constant", name, content=constant)

    def _within(self, graph: Any) -> list[GraphNode]:
        """A graph that a node of another takes as an argument."""
        inputs = [
            GraphNode("input", n.name, content=self.input(n.meta.get("val")))
            for n in graph.graph.nodes
            if n.op == "placeholder"
        ]
        result = next(n for n in graph.graph.nodes if n.op == "output").args[0]
        return [*inputs, *self.nodes(graph), GraphNode("output", "output", args=self.value(result))]


def object_of(graph: Any, node: Any) -> Any:
    """The mesh or the process group that a node stands for, if it does: none of them travels.

    What a graph takes from one, such as the name of a group, is written into it.
    """
    from torch._library.fake_class_registry import FakeScriptObject

    value = getattr(node, "meta", {}).get("val")
    if value is None and getattr(node, "op", "") == "get_attr":
        value = operator.attrgetter(node.target)(graph)
    return value.real_obj if isinstance(value, FakeScriptObject) else None


def _size(size: Any) -> int | str:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else str(expression)


def name_of(target: Any) -> str:
    """The name by which the worker finds what a node calls."""
    import torch

    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        # These keep what they call in tables of this process.
        name = str(target._name)
        if "triton" in name or "opaque" in name:
            raise CannotShipError(f"{name}, which is code of this process")
        return f"higher_order::{name}"
    for name, function in FUNCTIONS.items():
        if target is function:
            return name
    for name in SYMBOLIC:
        if target is getattr(torch, name, None):
            return f"torch.{name}"
    raise CannotShipError(f"a call of {getattr(target, '__name__', target)!r}")


# Reading, on the worker.


class GraphReader:
    """Makes a graph module of nodes, for one real device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def module(self, nodes: Iterable[GraphNode]) -> Any:
        """The graph module; the last node is its output."""
        import torch

        root: dict[str, Any] = {}
        graph, made = torch.fx.Graph(), dict[str, Any]()
        for node in nodes:
            if node.kind == "input":
                made[node.name] = graph.placeholder(node.name)
                made[node.name].meta["described"] = node.content
            elif node.kind == "call":
                arguments = [self._value(value, made) for value in node.args or ()]
                named = {k: self._value(v, made) for k, v in (node.kwargs or {}).items()}
                made[node.name] = graph.create_node(
                    "call_function",
                    function_of(node.target),
                    tuple(arguments),
                    named,
                    name=node.name,
                )
            elif node.kind == "output":
                graph.output(self._value(node.args, made))
            elif node.kind in ("constant", "graph"):
                root[node.name] = self._attribute(node)
                made[node.name] = graph.get_attr(node.name)
            else:
                raise ValueError(f"a node of kind {node.kind!r}")
        module = torch.nn.Module()
        for name, value in root.items():
            if isinstance(value, torch.nn.Module):
                module.add_module(name, value)
            else:
                module.register_buffer(name, value)
        return torch.fx.GraphModule(module, graph)

    def dtype(self, name: str) -> Any:
        """The dtype of that name."""
        return self._torch("dtype", name)

    def device(self, kind: str) -> Any:
        """The device that a message means."""
        import torch

        return torch.device(kind) if kind else self._device

    def _attribute(self, node: GraphNode) -> Any:
        import torch

        if node.kind == "graph":
            return self.module(msgspec.convert(node.content, list[GraphNode]))
        constant = msgspec.convert(node.content, Constant)
        flat = torch.frombuffer(bytearray(constant.content or b"\0"), dtype=torch.uint8)
        whole = flat[: len(constant.content)].view(self.dtype(constant.dtype))
        return whole.view(constant.sizes).to("cpu" if constant.on_host else self._device)

    def _value(self, value: Any, made: Mapping[str, Any]) -> Any:
        """What `Writer.value` wrote: an array of msgpack is one of the values with a tag."""
        if not isinstance(value, list):
            return value
        special: Special = msgspec.convert(value, Special)
        match special:
            case NodeValue(name):
                return made[name]
            case ListValue(items):
                return [self._value(item, made) for item in items]
            case TupleValue(items):
                return tuple(self._value(item, made) for item in items)
            case SliceValue(items):
                return slice(*(self._value(item, made) for item in items))
            case DictValue(pairs):
                return {key: self._value(item, made) for key, item in pairs}
            case TorchValue(kind, name):
                return self._torch(kind, name)
            case DeviceValue(kind):
                return self.device(kind)
            case ComplexValue(real, imaginary):
                return complex(real, imaginary)

    def _torch(self, kind: str, name: str) -> Any:
        import torch

        found = getattr(torch, name, None)
        if type(found).__name__ != kind:
            raise ValueError(f"this worker's PyTorch {torch.__version__} has no {kind} {name!r}")
        return found


def function_of(name: str) -> Callable[..., Any]:
    """What a node calls, by the name that `name_of` gave it."""
    import torch

    if name in FUNCTIONS:
        return cast(Callable[..., Any], FUNCTIONS[name])
    room, _, rest = name.partition("::")
    try:
        if rest:
            operation, _, overload = rest.partition(".")
            found = getattr(getattr(torch.ops, room), operation)
            return cast(Callable[..., Any], getattr(found, overload) if overload else found)
        if name.removeprefix("torch.") in SYMBOLIC:
            return cast(Callable[..., Any], getattr(torch, name.removeprefix("torch.")))
    except AttributeError:
        pass
    raise ValueError(
        f"{name} is not known to this worker's PyTorch {torch.__version__}; "
        "import the package that defines it on the worker, or use the client's version there"
    )


@cache
def shipping_library() -> Any:
    """PyTorch's library of the operations above, which lives as long as the process."""
    import torch

    made: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        made.define(schema)
        # Gradients are AOTAutograd's, which calls these below its own node of the graph.
        name = schema.partition("(")[0]
        made.impl(name, torch.library.fallthrough_kernel, "Autograd")
        made.impl(name, torch.library.fallthrough_kernel, "ADInplaceOrView")

    def place(group: str, device: torch.device) -> torch.Tensor:
        return torch.empty((), dtype=torch.int64, device=device)

    torch.library.register_fake(f"{NAMESPACE}::place", place, lib=made)
    return made
