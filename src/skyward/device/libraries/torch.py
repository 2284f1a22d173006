"""torch itself, where it names the devices that it knows or follows a choice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from skyward.device.graphs import backend, client
from skyward.device.libraries import Choice, wrap
from skyward.errors import DeviceError

NOT_TRACED = "compiled_args not implemented: CompiledFunctionOfSkyward"
NO_STREAM = "opt_ready_stream && opt_parent_stream"
"""What the engine asserts of a gradient's streams; it looks for streams of one accelerator only."""


def _accelerator(module: ModuleType, choice: Choice) -> None:
    def set_device_index(original: Callable[..., None]) -> Callable[..., None]:
        def and_note(device: Any, /) -> None:
            original(device)
            # PyTorch's own calls, such as a DataLoader's that pins memory, are no choice.
            if not sys._getframe(1).f_globals["__name__"].startswith("torch."):
                choice.note(module.current_device_index())

        return and_note

    wrap(module, "set_device_index", set_device_index)


def _autograd(module: ModuleType, choice: Choice) -> None:
    def run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def with_a_reason(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(outputs, *args, **kwargs)
            except RuntimeError as problem:
                if NOT_TRACED in str(problem):
                    raise DeviceError(
                        "compiled autograd cannot trace the backward pass of a compiled function "
                        "that was called before it was switched on; call the function within "
                        "torch._dynamo.compiled_autograd, too, or set "
                        "torch._dynamo.config.compiled_autograd before the call"
                    ) from problem
                if NO_STREAM not in str(problem):
                    raise
                devices = [str(getattr(output, "device", "cuda")) for output in outputs]
                local = next((device for device in devices if "sky" not in device), "cuda")
                raise DeviceError(
                    f"backward on {local}: PyTorch's engine knows one accelerator in a process, "
                    "and since compute.device() was called that is sky; use the same GPU through "
                    "a pool: compute = sky.Compute(provider=sky.Local()) and "
                    f"compute.device({local!r})"
                ) from problem

        return with_a_reason

    wrap(module, "_engine_run_backward", run_backward)


def _flex_attention(module: ModuleType, choice: Choice) -> None:
    def validate(original: Callable[..., None]) -> Callable[..., None]:
        def of_others(query: Any, key: Any, value: Any) -> None:
            # Without a compiled kernel, attention is made of plain operations, on any device.
            if query.device.type != "sky":
                original(query, key, value)

        return of_others

    wrap(module, "_validate_device", validate)


def _inductor(module: ModuleType, choice: Choice) -> None:
    def compile_fx(original: Callable[..., Any]) -> Callable[..., Any]:
        def or_ship(model_: Any, example_inputs_: Any, *args: Any, **kwargs: Any) -> Any:
            # AOTInductor passes `inner_compile` and wants a file, and so does the recursion below.
            if (
                args
                or "inner_compile" in kwargs
                or not backend.sky_device_of(model_, example_inputs_)
            ):
                return original(model_, example_inputs_, *args, **kwargs)
            return client.compile_fx(choice.core, original, model_, example_inputs_, **kwargs)

        return or_ship

    wrap(module, "compile_fx", compile_fx)


def _backends(module: ModuleType, choice: Choice) -> None:
    # Installed packages name their backends in their metadata; this is for those that are not.
    if "sky" not in module._COMPILER_FNS and "sky" not in module._BACKENDS:
        module.register_backend(backend.sky)


def _optimizers(module: ModuleType, choice: Choice) -> None:
    def set_capturable(original: Callable[..., None]) -> Callable[..., None]:
        def on_sky_too(self: Any, tx: Any) -> None:
            # As for a GPU: the number of steps is then a tensor of the device, and the compiled
            # step can count it.
            optimizer = self.value
            for group in optimizer.param_groups:
                parameters = group.get("params", [])
                is_new = not any(p in optimizer.state for p in parameters)
                if "capturable" in group and is_new:
                    group["capturable"] |= all(p.device.type == "sky" for p in parameters)
            original(self, tx)

        return on_sky_too

    wrap(module.OptimizerVariable, "_set_capturable", set_capturable)


def _refusing(module: ModuleType, name: str, reason: str) -> None:
    """Have a wrapper of models refuse one that is on a sky device."""

    def init(original: Callable[..., None]) -> Callable[..., None]:
        def with_a_reason(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            device = next((p.device for p in model.parameters() if p.device.type == "sky"), None)
            group = kwargs.get("process_group") or kwargs.get("device_mesh")
            if device is not None and getattr(group, "device", None) != device:
                raise ValueError(reason.format(device=device))
            original(self, model, *args, **kwargs)

        return with_a_reason

    wrap(getattr(module, name), "__init__", init)


def _data_parallel(module: ModuleType, choice: Choice) -> None:
    _refusing(
        module,
        "DataParallel",
        "DataParallel copies a model to several GPUs of this machine, and the model is on "
        "{device}; use the model as it is, keep a copy of it on each of compute.devices(), or "
        "train with DDP in functions of a pool with sky.plugins.torch()",
    )


def _distributed_data_parallel(module: ModuleType, choice: Choice) -> None:
    _refusing(
        module,
        "DistributedDataParallel",
        "DistributedDataParallel wants a process for each copy of a model, and this one process "
        "is the client of {device}; use mesh.replicate(model) of a mesh, compute.mesh(dp=2), or "
        "run the training on every node with `@` and sky.plugins.torch()",
    )


PATCHES: dict[str, Callable[..., None]] = {
    "torch._dynamo.backends.registry": _backends,
    "torch._dynamo.variables.optimizer": _optimizers,
    "torch._inductor.compile_fx": _inductor,
    "torch.accelerator": _accelerator,
    "torch.autograd.graph": _autograd,
    "torch.nn.attention.flex_attention": _flex_attention,
    "torch.nn.parallel.data_parallel": _data_parallel,
    "torch.nn.parallel.distributed": _distributed_data_parallel,
}
