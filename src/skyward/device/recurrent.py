"""Weights of recurrent layers on a sky device: one buffer, laid out as the worker's cuDNN does."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import RNNBase

CUDNN_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
"""How cuDNN numbers the kinds of recurrent layers."""


def flatten_on_sky() -> None:
    """Have `flatten_parameters`, which PyTorch keeps to CUDA, work for sky devices too."""
    import torch

    flatten = torch.nn.RNNBase.flatten_parameters

    @functools.wraps(flatten)
    def flatten_parameters(layer: RNNBase) -> None:
        weights = layer._flat_weights
        if weights and isinstance(weights[0], torch.Tensor) and weights[0].device.type == "sky":
            _flatten(layer, weights)
        else:
            flatten(layer)

    setattr(torch.nn.RNNBase, flatten.__name__, flatten_parameters)


def _flatten(layer: Any, weights: list[Any]) -> None:
    import torch

    first = weights[0]
    whole = len(weights) == len(layer._flat_weights_names)
    alike = all(
        isinstance(weight, torch.Tensor)
        and weight.dtype == first.dtype
        and weight.device == first.device
        for weight in weights
    )
    if not whole or not alike or not torch.cudnn_is_acceptable(first):
        return
    # A weight that occurs twice cannot have two places.
    if len({(weight.data_ptr(), weight.storage_offset()) for weight in weights}) < len(weights):
        return
    with torch.no_grad():
        torch._cudnn_rnn_flatten_weight(
            weights,
            (4 if layer.bias else 2) + (1 if layer.proj_size else 0),
            layer.input_size,
            CUDNN_MODES[layer.mode],
            layer.hidden_size,
            layer.proj_size,
            layer.num_layers,
            layer.batch_first,
            bool(layer.bidirectional),
        )
