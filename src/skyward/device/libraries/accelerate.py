"""accelerate: `Accelerator` and `PartialState` choose a device, `device_map="auto"` its memory.

Its checkpoints also keep the state of the device's generator, in a file of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from skyward.device.libraries.choice import Choice
from skyward.device.libraries.patches import wrap, wrap_property

RNG_FILE = "sky_random_state.pt"
FP16_REFUSED = "fp16 mixed precision requires a device in"
"""How accelerate refuses fp16 on a device that is not in its list."""


def _state(module: ModuleType, choice: Choice) -> None:
    partial, shared = module.PartialState, module.AcceleratorState

    def default_device(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda self: choice.device() or original(self)

    def init(original: Callable[..., None]) -> Callable[..., None]:
        def with_an_open_device(self: Any, *args: Any, **kwargs: Any) -> None:
            _refresh(partial, choice, in_use=bool(shared._shared_state))
            original(self, *args, **kwargs)

        return with_an_open_device

    wrap_property(partial, "default_device", default_device)
    wrap(partial, "__init__", init)


def _refresh(partial: Any, choice: Choice, *, in_use: bool = False) -> None:
    """Choose the device again if a device was opened or closed since accelerate chose one.

    While an Accelerator is in use, only a closed device is replaced.
    """
    kept = partial._shared_state
    if "device" not in kept or kept.get("_cpu") or "ACCELERATE_TORCH_DEVICE" in os.environ:
        return
    is_alone = str(kept.get("distributed_type")).endswith("NO")
    is_closed = choice.is_closed(kept["device"])
    if is_alone and (is_closed or (not in_use and choice.device() is not None)):
        kept["device"] = partial.default_device.fget(None)


def _accelerator(module: ModuleType, choice: Choice) -> None:
    def init(original: Callable[..., None]) -> Callable[..., None]:
        def on_the_device(self: Any, *args: Any, **kwargs: Any) -> None:
            _refresh(module.PartialState, choice)
            device = None if kwargs.get("cpu") else choice.device()
            if device is not None and kwargs.get("mixed_precision") == "fp8":
                raise ValueError(
                    f"mixed_precision='fp8' computes with libraries for a GPU of this machine, and "
                    f"{device} is not one; use 'bf16' or 'fp16'"
                )
            try:
                original(self, *args, **kwargs)
            except ValueError as problem:
                if FP16_REFUSED not in str(problem) or self.device.type != "sky":
                    raise
                module.AcceleratorState._shared_state["_mixed_precision"] = "no"
                original(self, *args, **{**kwargs, "mixed_precision": "no"})
                _allow_fp16(self)

        return on_the_device

    wrap(module.Accelerator, "__init__", init)


def _allow_fp16(accelerator: Any) -> None:
    """Set up what an Accelerator has for fp16 on the devices of its list."""
    import torch

    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    handler = accelerator.scaler_handler
    options = handler.to_kwargs() if handler is not None else {}
    accelerator.scaler = torch.amp.GradScaler("sky", **options)


def _imports(module: ModuleType, choice: Choice) -> None:
    def is_bf16_available(original: Callable[..., bool]) -> Callable[..., bool]:
        def on_the_device(*args: Any, **kwargs: Any) -> bool:
            import torch

            device = choice.device()
            if device is None:
                return original(*args, **kwargs)
            return bool(torch.sky.get_device_properties(device).is_bf16_supported)  # type: ignore[attr-defined]

        return on_the_device

    wrap(module, "is_bf16_available", is_bf16_available)


def _modeling(module: ModuleType, choice: Choice) -> None:
    def get_max_memory(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_the_device(max_memory: Any = None) -> Any:
            import psutil
            import torch

            device = choice.device()
            if device is None:
                return original(max_memory)
            if max_memory is None:
                # One device alone: a layer's output cannot go from one sky device to another.
                free, _ = torch.sky.mem_get_info(device)  # type: ignore[attr-defined]
                return {device.index: free, "cpu": psutil.virtual_memory().available}
            for where, size in max_memory.items():
                # In place, as accelerate does: its callers read the numbers from their own dict.
                if isinstance(size, str):
                    max_memory[where] = module.convert_file_size_to_int(size)
            known = (device.index, "cpu", "disk")
            unknown = [where for where in max_memory if where not in known]
            if unknown:
                raise ValueError(
                    f"max_memory names {unknown[0]!r}; a model is placed on one sky device, so "
                    f"name {device.index} for {device}, 'cpu' and 'disk'"
                )
            return {where: max_memory[where] for where in known if where in max_memory}

        return on_the_device

    wrap(module, "get_max_memory", get_max_memory)


def _checkpointing(module: ModuleType, choice: Choice) -> None:
    def save(original: Callable[..., Any]) -> Callable[..., Any]:
        def with_the_generator(output_dir: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(output_dir, *args, **kwargs)
            save_generator(choice, Path(output_dir) / RNG_FILE)
            return result

        return with_the_generator

    def load(original: Callable[..., Any]) -> Callable[..., Any]:
        def with_the_generator(input_dir: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(input_dir, *args, **kwargs)
            load_generator(choice, Path(input_dir) / RNG_FILE)
            return result

        return with_the_generator

    wrap(module, "save_accelerator_state", save)
    wrap(module, "load_accelerator_state", load)


def save_generator(choice: Choice, file: Path) -> None:
    """Write the state of the chosen device's generator, if there is such a device."""
    import torch

    device = choice.device()
    if device is not None:
        torch.save(torch.sky.get_rng_state(device), file)  # type: ignore[attr-defined]


def load_generator(choice: Choice, file: Path) -> None:
    """Set the generator of the chosen device, if a state was written for one of its kind."""
    import torch

    device = choice.device()
    if device is not None and file.exists():
        state = torch.load(file, weights_only=True)
        if len(state) == len(torch.sky.get_rng_state(device)):  # type: ignore[attr-defined]
            torch.sky.set_rng_state(state, device)  # type: ignore[attr-defined]


PATCHES: dict[str, Callable[..., None]] = {
    "accelerate.state": _state,
    "accelerate.accelerator": _accelerator,
    "accelerate.utils.imports": _imports,
    "accelerate.utils.modeling": _modeling,
    "accelerate.checkpointing": _checkpointing,
}
