"""Hugging Face's libraries: where they choose a device by themselves, it is an open sky device."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from skyward.device.libraries import Choice, wrap, wrap_property

# accelerate: `Accelerator` and `PartialState` choose a device, `device_map="auto"` its memory.
# Its checkpoints also keep the state of the device's generator, in a file of its own.

ACCELERATE_RNG_FILE = "sky_random_state.pt"
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
            save_generator(choice, Path(output_dir) / ACCELERATE_RNG_FILE)
            return result

        return with_the_generator

    def load(original: Callable[..., Any]) -> Callable[..., Any]:
        def with_the_generator(input_dir: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(input_dir, *args, **kwargs)
            load_generator(choice, Path(input_dir) / ACCELERATE_RNG_FILE)
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


# transformers: its arguments and pipelines find the device, its Trainer saves the generator.

TRANSFORMERS_RNG_FILE = "rng_state_sky.pth"
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
            save_generator(choice, Path(output_dir) / TRANSFORMERS_RNG_FILE)

        return with_the_generator

    def load(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def with_the_generator(self: Any, checkpoint: Any) -> None:
            original(self, checkpoint)
            if checkpoint is not None:
                load_generator(choice, Path(checkpoint) / TRANSFORMERS_RNG_FILE)

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


# diffusers: asks `torch.accelerator` once and remembers, though devices are opened and closed.


def _diffusers(module: ModuleType, choice: Choice) -> None:
    def detect(original: Callable[[], str]) -> Callable[[], str]:
        def by_choice() -> str:
            import torch

            if choice.device() is not None:
                return "sky"
            # Sky devices stay `torch.accelerator`'s after they were closed.
            return "cuda" if torch.cuda.is_available() else "cpu"

        return by_choice

    wrap(module.TorchDeviceBackend, "_detect_device_type", detect)


# peft: adapters are loaded to the device that it finds.


def _peft(module: ModuleType, choice: Choice) -> None:
    def infer_device(original: Callable[[], str]) -> Callable[[], str]:
        return lambda: str(choice.device() or original())

    wrap(module, "infer_device", infer_device)


# safetensors: its own code knows a list of devices, so tensors are read here and then moved.


class _Moving:
    """An open file, or a slice of one, whose tensors go to a device as they are read."""

    def __init__(self, opened: Any, device: str) -> None:
        self._opened, self._device = opened, device

    def __enter__(self) -> _Moving:
        self._opened.__enter__()
        return self

    def __exit__(self, *problem: Any) -> Any:
        return self._opened.__exit__(*problem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __getitem__(self, where: Any) -> Any:
        return self._opened[where].to(self._device)

    def get_tensor(self, name: str) -> Any:
        return self._opened.get_tensor(name).to(self._device)

    def get_tensors(self) -> dict[str, Any]:
        return {name: self.get_tensor(name) for name in self._opened.keys()}  # noqa: SIM118

    def get_slice(self, name: str) -> _Moving:
        return _Moving(self._opened.get_slice(name), self._device)


def _safe_open(module: ModuleType, choice: Choice) -> None:
    def safe_open(original: Any) -> Callable[..., Any]:
        class OpeningType(type):
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, (original, _Moving))

        class Opening(metaclass=OpeningType):
            def __new__(
                cls, filename: Any, framework: Any, device: Any = "cpu", **more: Any
            ) -> Any:
                name = str(device)
                if name.partition(":")[0] != "sky":
                    return original(filename, framework, device, **more)
                return _Moving(original(filename, framework, "cpu", **more), name)

        # A function that uses it names it so when it travels to a node.
        Opening.__module__, Opening.__name__ = module.__name__, "safe_open"
        Opening.__qualname__, Opening.__doc__ = "safe_open", original.__doc__
        return Opening

    wrap(module, "safe_open", safe_open)


PATCHES: dict[str, Callable[..., None]] = {
    "accelerate.state": _state,
    "accelerate.accelerator": _accelerator,
    "accelerate.utils.imports": _imports,
    "accelerate.utils.modeling": _modeling,
    "accelerate.checkpointing": _checkpointing,
    "transformers.training_args": _training_args,
    "transformers.utils.import_utils": _import_utils,
    "transformers.trainer": _trainer,
    "transformers.pipelines.base": _pipelines,
    "transformers.quantizers.auto": _quantizers,
    "diffusers.utils.torch_utils": _diffusers,
    "peft.utils.other": _peft,
    "safetensors": _safe_open,
}
