"""Nested values as JSON: tensors by number, everything else by value, and never a pickle."""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyward.errors import SerializationError, StoreDamagedError
from skyward.store.format.manifest import ITEM_SIZES

if TYPE_CHECKING:
    import torch

DEPTH_LIMIT = 100
_EXACT = 1 << 53
"""A reader of JSON may use doubles, which hold whole numbers exactly up to this one."""


def encode(value: object) -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    """The tree of a value, and its tensors in order, each with the path to it."""
    tensors: list[tuple[str, torch.Tensor]] = []
    return _encode(value, "", tensors, 0), tensors


def _encode(value: Any, path: str, tensors: list[tuple[str, torch.Tensor]], depth: int) -> Any:
    import torch

    if depth > DEPTH_LIMIT:
        raise SerializationError(
            f"{path[:80]}...: nested more than {DEPTH_LIMIT} deep, or contains itself; flatten it"
        )

    def inside(items: Iterable[Any]) -> list[Any]:
        return [
            _encode(item, f"{path}[{index}]", tensors, depth + 1)
            for index, item in enumerate(items)
        ]

    def pairs(items: Iterable[tuple[Any, Any]]) -> list[list[Any]]:
        return [
            [_key(key, path), _encode(item, _join(path, key), tensors, depth + 1)]
            for key, item in items
        ]

    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append((path or "the tensor", value))
        return {"tensor": len(tensors) - 1}
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text(value, path)
    if kind is int:
        return value if -_EXACT <= value <= _EXACT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return inside(value)
    if kind is tuple:
        return {"tuple": inside(value)}
    if kind is torch.Size:
        return {"size": list(value)}
    if isinstance(value, dict):
        if kind is not OrderedDict:
            return {"dict": pairs(value.items())}
        described = getattr(value, "_metadata", None)
        if described is None:
            return {"ordered": pairs(value.items())}
        about = _encode(described, f"{path}._metadata", tensors, depth + 1)
        return {"state": pairs(value.items()), "about": about}
    if kind is complex:
        return {"complex": [_encode(x, path, tensors, depth) for x in (value.real, value.imag)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _encode(value.item(), path, tensors, depth + 1)
    advice = "leave it out, or turn it into tensors and plain values"
    if kind.__module__ == "numpy":
        advice = "turn it into a tensor with torch.from_numpy"
    elif isinstance(value, torch.nn.Module):
        advice = "save its state_dict()"
    raise SerializationError(
        f"{path or 'the value'}: a {kind.__module__}.{kind.__qualname__} cannot be stored, "
        f"only tensors, dicts, lists, tuples and plain values can; {advice}"
    )


def _key(key: Any, path: str) -> Any:
    if type(key) is str:
        return _text(key, path)
    if key is None or type(key) in (bool, int, float):
        return _encode(key, path, [], 0)
    raise SerializationError(
        f"{path or 'the value'}: the key {key!r} cannot be stored; use text or a number"
    )


def _text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SerializationError(
            f"{path or 'the value'}: the text {text[:80]!r} is not valid Unicode; "
            "store it as bytes instead"
        ) from None
    return text


def _join(path: str, key: object) -> str:
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


@dataclass(frozen=True, slots=True)
class Number:
    """Stands for a tensor that has not been read."""

    index: int


def outline(tree: Any, count: int, where: str, *, values: bool = True) -> Any:
    """The value that a tree describes, with a `Number` in place of each of its `count` tensors.

    Without `values`, a value that JSON has no type for stays in its written form, and torch is not
    needed.
    """

    def take(index: int) -> Number:
        if not 0 <= index < count:
            raise ValueError(f"tensor {index} of {count}")
        return Number(index)

    return _decoded(tree, take, where, _decode_plain if values else _as_written)


def numbers(
    outlined: Any, path: str = "", join: Callable[[str, object], str] = _join
) -> Iterator[tuple[str, int]]:
    """The path to every tensor of an outline, and its number."""
    if isinstance(outlined, Number):
        yield path or "the tensor", outlined.index
        return
    if isinstance(outlined, dict):
        inner: Iterable[tuple[Any, Any]] = outlined.items()
    elif isinstance(outlined, list | tuple):
        inner = enumerate(outlined)
    else:
        return
    for key, value in inner:
        yield from numbers(value, join(path, key), join)


_Plain = Callable[[str, Any], Any]
"""Makes a value that is neither a tensor nor a container from its kind and its content."""


def decode(tree: Any, tensor: Callable[[int], Any], where: str) -> Any:
    """The value that a tree describes; `tensor` returns the tensor with a given number."""
    return _decoded(tree, tensor, where, _decode_plain)


def _decoded(tree: Any, tensor: Callable[[int], Any], where: str, plain: _Plain) -> Any:
    try:
        return _decode(tree, tensor, plain, 0)
    except (_MalformedError, ValueError, TypeError, binascii.Error) as problem:
        raise StoreDamagedError(
            f"{where}: the manifest is damaged: its tree has {str(problem)[:200]}; "
            "load another version, or delete this one and save the model again"
        ) from None


class _MalformedError(Exception):
    """The tree has an entry that `encode` never writes."""


def _decode(node: Any, tensor: Callable[[int], Any], plain: _Plain, depth: int) -> Any:
    if depth > DEPTH_LIMIT + 1:
        raise _MalformedError(f"more than {DEPTH_LIMIT} levels")
    if node is None or isinstance(node, bool | str | int | float):
        return node
    if isinstance(node, list):
        return [_decode(item, tensor, plain, depth + 1) for item in node]
    if not isinstance(node, dict) or not node:
        raise _MalformedError("an entry that is no value")
    kind, content = next(iter(node.items()))
    if list(node) != (["state", "about"] if kind == "state" else [kind]):
        raise _MalformedError("an entry of two kinds")
    if kind == "tensor" and type(content) is int:
        return tensor(content)
    if kind == "tuple" and isinstance(content, list):
        return tuple(_decode(item, tensor, plain, depth + 1) for item in content)
    if kind in ("dict", "ordered", "state") and isinstance(content, list):
        made: dict[Any, Any] = {} if kind == "dict" else OrderedDict()
        for pair in content:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _MalformedError("a dict entry that is no pair")
            made[_decode(pair[0], tensor, plain, depth + 1)] = _decode(
                pair[1], tensor, plain, depth + 1
            )
        if kind == "state":
            made._metadata = _decode(node["about"], tensor, plain, depth + 1)  # type: ignore[attr-defined]
        return made
    return plain(kind, content)


def _as_written(kind: str, content: Any) -> Any:
    return content


def _decode_plain(kind: str, content: Any) -> Any:
    import torch

    if kind == "int" and isinstance(content, str):
        return int(content, 16)
    if kind == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind == "complex" and isinstance(content, list) and len(content) == 2:
        real, imaginary = (_decode(part, lambda _: None, _decode_plain, 0) for part in content)
        return complex(real, imaginary)
    if kind == "bytes" and isinstance(content, str):
        return base64.b64decode(content, validate=True)
    if kind == "size" and isinstance(content, list):
        return torch.Size(content)
    if kind == "dtype" and content in ITEM_SIZES:
        return getattr(torch, content)
    if kind == "device" and isinstance(content, str):
        try:
            return torch.device(content)
        except RuntimeError:
            raise _MalformedError(f"the unknown device {content[:40]!r}") from None
    raise _MalformedError(f"an entry of unknown kind {kind[:40]!r}")
