"""The classes that stand for a dtype on a device, such as `torch.sky.FloatTensor`, for old code."""

from __future__ import annotations

from typing import Any

TENSORS = ("Byte", "Char", "Double", "Float", "Int", "Long", "Short", "Half", "Bool", "BFloat16")
"""The dtypes that have such a class on CUDA."""


class _TensorType(type):
    """The class of these classes: tensors are never made of them, and yet count as instances."""

    dtype: Any
    plain: Any
    """The class for the dtype on the CPU."""

    def __instancecheck__(cls, value: object) -> bool:
        import torch

        is_ours = isinstance(value, torch.Tensor) and value.device.type == "sky"
        return is_ours and value.dtype == cls.dtype  # type: ignore[attr-defined]

    def __call__(cls, *values: Any, device: Any = None) -> Any:
        return cls.plain(*values).to("sky" if device is None else device)


def classes() -> dict[str, Any]:
    """Every such class by its name in `torch.sky`."""
    import torch
    from torch.storage import _dtype_to_storage_type_map, _LegacyStorage

    named: dict[str, Any] = {}
    storage_type: Any = type(_LegacyStorage)
    for name in TENSORS:
        plain = getattr(torch, f"{name}Tensor")
        body = {
            "__module__": "torch.sky",
            "__qualname__": f"{name}Tensor",
            "dtype": plain.dtype,
            "plain": plain,
            "layout": torch.strided,
            "is_cuda": False,
            "is_sparse": False,
        }
        # `x.type(...)` takes the whole name from the class.
        named[f"{name}Tensor"] = _TensorType(f"torch.sky.{name}Tensor", (), body)
    for dtype, name in _dtype_to_storage_type_map().items():
        storage = {"__module__": "torch.sky", "dtype": dtype, "_dtype": dtype}
        named[name] = storage_type(name, (_LegacyStorage,), storage)
    return named
