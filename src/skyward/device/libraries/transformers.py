"""transformers: its arguments and pipelines find the device, its Trainer saves the generator."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from skyward.device.libraries.accelerate import load_generator, save_generator
from skyward.device.libraries.choice import Choice
from skyward.device.libraries.patches import wrap, wrap_property

RNG_FILE = "rng_state_sky.pth"
"""Beside `rng_state.pth`, which has the states of the other generators."""
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
NEEDS_CUDA = ("bitsandbytes", "gptq", "awq", "hqq", "fp8", "mxfp4")


def _training_args(module: ModuleType, choice: Choice) -> None:
    def setup_devices(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def with_an_open_device(self: Any) -> Any:
            device, ours = original(self), choice.device()
            is_alone = str(self.distributed_state.distributed_type).endswith("NO")
            if ours is None or self.use_cpu or not is_alone:
                return device
            if "ACCELERATE_TORCH_DEVICE" in os.environ:
                return device
            # One: a number above makes Trainer use DataParallel.
            self._n_gpu = 1
            return ours

        return with_an_open_device

    wrap_property(module.TrainingArguments, "_setup_devices", setup_devices)


def _import_utils(module: ModuleType, choice: Choice) -> None:
    def is_bf16_available(original: Callable[[], bool]) -> Callable[[], bool]:
        def on_the_device() -> bool:
            import torch

            device = choice.device()
            if device is None:
                return original()
            return bool(torch.sky.get_device_properties(device).is_bf16_supported)  # type: ignore[attr-defined]

        return on_the_device

    wrap(module, "is_torch_bf16_gpu_available", is_bf16_available)


def _trainer(module: ModuleType, choice: Choice) -> None:
    def save(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def with_the_generator(self: Any, output_dir: Any) -> None:
            original(self, output_dir)
            save_generator(choice, Path(output_dir) / RNG_FILE)

        return with_the_generator

    def load(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def with_the_generator(self: Any, checkpoint: Any) -> None:
            original(self, checkpoint)
            if checkpoint is not None:
                load_generator(choice, Path(checkpoint) / RNG_FILE)

        return with_the_generator

    wrap(module.Trainer, "_save_rng_state", save)
    wrap(module.Trainer, "_load_rng_state", load)


def _pipelines(module: ModuleType, choice: Choice) -> None:
    def init(original: Callable[..., None]) -> Callable[..., None]:
        def on_the_device(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            import torch

            ours, wanted = choice.device(), kwargs.get("device")
            if ours is not None and getattr(model, "hf_device_map", None) is None:
                if wanted is None:
                    kwargs["device"] = ours
                elif isinstance(wanted, int) and wanted >= 0:
                    kwargs["device"] = torch.device("sky", wanted)
            original(self, model, *args, **kwargs)

        return on_the_device

    wrap(module.Pipeline, "__init__", init)


def _quantizers(module: ModuleType, choice: Choice) -> None:
    def get_quantizer(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def with_a_reason(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            device = _target(given.get("device_map"), choice)
            wanted = given.get("quantization_config")
            if wanted is None:
                wanted = getattr(given.get("config"), "quantization_config", None)
            method = _method(wanted)
            if device is not None and any(name in method for name in NEEDS_CUDA):
                raise ValueError(
                    f"{method} computes with kernels for a GPU of this machine, and {device} is "
                    "not one; load the model in bfloat16, or call a @sky.function that loads it"
                )
            return original(*args, **kwargs)

        return with_a_reason

    wrap(module, "get_hf_quantizer", get_quantizer)


def _target(device_map: Any, choice: Choice) -> Any:
    """The sky device that a `device_map` leads to, if there is one."""
    if isinstance(device_map, str) and device_map in AUTOMATIC:
        return choice.device()
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    return next((place for place in places if str(place).startswith("sky")), None)


def _method(config: Any) -> str:
    named = config.get("quant_method") if isinstance(config, dict) else config
    named = getattr(named, "quant_method", named)
    return str(getattr(named, "value", named))


PATCHES: dict[str, Callable[..., None]] = {
    "transformers.training_args": _training_args,
    "transformers.utils.import_utils": _import_utils,
    "transformers.trainer": _trainer,
    "transformers.pipelines.base": _pipelines,
    "transformers.quantizers.auto": _quantizers,
}
