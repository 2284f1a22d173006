"""Where PyTorch asks whether a tensor is CUDA, and what a sky tensor does there.

The places are those of ATen's sources (aten/src/ATen/native of 2.11 to 2.13) that ask a tensor for
its kind of device in code that runs above the kernels: such code runs in the client, where a sky
tensor is neither CPU nor CUDA. Code within a kernel runs on the worker and sees the real device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pytest

torch = pytest.importorskip("torch")


class Way(Enum):
    """What is done about a branch."""

    OURS = "a kernel of ours takes CUDA's branch where the worker's device is CUDA"
    WORKER = "the whole operation runs on the worker, which branches by the real device"
    SAME = "PyTorch itself takes CUDA's branch for devices like ours"
    APART = "CUDA's branch is not taken; the reason says what differs"


@dataclass(frozen=True)
class Branch:
    """A composite that branches on the device, and the operation that is looked at for it."""

    where: str
    operation: str
    way: Way
    reason: str = ""


OURS, WORKER, SAME, APART = Way
BRANCHES = [
    # Recurrent layers and cells (RNN.cpp): cuDNN for layers, fused kernels for cells.
    Branch("RNN.cpp, use_cudnn", "aten::cudnn_is_acceptable", OURS),
    Branch("RNN.cpp, LSTMCell", "aten::_thnn_fused_lstm_cell", OURS),
    Branch("RNN.cpp, GRUCell", "aten::_thnn_fused_gru_cell", OURS),
    Branch("cudnn/RNN.cpp, flatten_parameters", "aten::_cudnn_rnn_flatten_weight", OURS),
    Branch("cudnn/AutocastRNN.cpp", "aten::_cudnn_rnn", OURS, "under autocast"),
    Branch("cudnn/RNN.cpp, the layer itself", "aten::_cudnn_rnn", WORKER),
    # Normalization.
    Branch("Normalization.cpp, backend", "aten::_batch_norm_impl_index", OURS),
    Branch("Normalization.cpp, instance_norm", "aten::_batch_norm_impl_index", OURS),
    Branch("group_norm.cpp, memory format", "aten::group_norm", OURS),
    Branch("layer_norm.cpp, rms_norm", "aten::_fused_rms_norm", OURS),
    Branch("layer_norm.cpp, layer_norm", "aten::native_layer_norm", WORKER),
    Branch("WeightNorm.cpp", "aten::_weight_norm_interface", WORKER),
    # Losses, sampling, softmax.
    Branch("LossCTC.cpp, lengths as numbers", "aten::ctc_loss.IntList", OURS),
    Branch("LossCTC.cpp, lengths as tensors", "aten::ctc_loss.Tensor", OURS),
    Branch("GridSampler.cpp", "aten::grid_sampler", OURS),
    Branch("SoftMax.cpp, half to float", "aten::softmax.int", OURS),
    Branch("SoftMax.cpp, half to float", "aten::log_softmax.int", OURS),
    Branch(
        "SoftMax.cpp, out=",
        "aten::softmax.int_out",
        APART,
        "half to float with out= casts first, as on a CPU: one more operation, the same numbers",
    ),
    # Attention.
    Branch("attention.cpp, choice", "aten::scaled_dot_product_attention", OURS),
    Branch("attention.cpp, kernels", "aten::_scaled_dot_product_flash_attention", WORKER),
    Branch("attention.cpp, kernels", "aten::_scaled_dot_product_efficient_attention", WORKER),
    Branch("attention.cpp, kernels", "aten::_scaled_dot_product_cudnn_attention", WORKER),
    Branch("attention.cpp, backward", "aten::_scaled_dot_product_flash_attention_backward", WORKER),
    Branch(
        "transformer.cpp, the encoder's fast path", "aten::_transformer_encoder_layer_fwd", WORKER
    ),
    Branch("attention.cpp, MultiheadAttention's", "aten::_native_multi_head_attention", WORKER),
    # Convolution.
    Branch("Convolution.cpp, backend and layouts", "aten::convolution", WORKER),
    Branch("Convolution.cpp, backward", "aten::convolution_backward", WORKER),
    Branch(
        "Convolution.cpp, double backward",
        "aten::_convolution_double_backward",
        APART,
        "weights are not made contiguous before they are convolved again; that only saves a copy",
    ),
    # Optimisers and scaling of gradients.
    Branch("optim: fused", "aten::_fused_adamw_", WORKER),
    Branch("optim: foreach", "aten::_foreach_add_.List", WORKER),
    Branch("amp: GradScaler", "aten::_amp_foreach_non_finite_check_and_unscale_", WORKER),
    # Indexing, deterministic kernels among them.
    Branch("TensorAdvancedIndexing.cpp, index_put", "aten::_index_put_impl_", WORKER),
    Branch("TensorAdvancedIndexing.cpp, index_add", "aten::index_add", WORKER),
    Branch("TensorAdvancedIndexing.cpp, scatter", "aten::scatter_add", WORKER),
    Branch("TensorAdvancedIndexing.cpp, scatter_reduce", "aten::scatter_reduce.two", WORKER),
    # The rest.
    Branch("Dropout.cpp, fused dropout", "aten::native_dropout", SAME),
    Branch("Onehot.cpp, checks of values", "aten::one_hot", SAME),
    Branch("Distance.cpp, cdist", "aten::_cdist_forward", WORKER),
    Branch("Distance.cpp, pdist", "aten::_pdist_forward", WORKER),
    Branch("BatchLinearAlgebra.cpp, lstsq", "aten::linalg_lstsq", WORKER),
    Branch("BatchLinearAlgebra.cpp, eigh", "aten::_linalg_eigh", WORKER),
    Branch("LinearAlgebra.cpp, matrix_exp", "aten::linalg_matrix_exp", WORKER),
    Branch("ReduceOps.cpp, any and all", "aten::any", WORKER),
    Branch("ReduceOps.cpp, sum of half as float", "aten::sum.dim_IntList", WORKER),
    Branch("ReduceOps.cpp, value_selecting", "aten::aminmax", WORKER),
    Branch("Activation.cpp, log_sigmoid", "aten::log_sigmoid_backward", WORKER),
    Branch(
        "SpectralOps.cpp, half precision",
        "aten::fft_fft",
        APART,
        "PyTorch refuses FFTs of half precision on devices other than CUDA before we are asked",
    ),
    Branch(
        "LinearAlgebra.cpp, frobenius_norm and nuclear_norm",
        "aten::frobenius_norm.dim",
        APART,
        "only a warning that these names are deprecated depends on it",
    ),
    Branch(
        "TensorConversions.cpp, casts of TorchScript's autocast",
        "aten::_autocast_to_reduced_precision",
        APART,
        "scripted code asks for CPU and CUDA by name; autocast of eager code knows our device",
    ),
    Branch(
        "torch/nn/functional.py, max_pool3d when deterministic",
        "aten::max_pool3d_with_indices",
        APART,
        "CUDA decomposes it then; ours is the kernel, which says that it is not deterministic",
    ),
    Branch(
        "torch/nn/functional.py, pad with mode='replicate' when deterministic",
        "aten::replication_pad2d",
        APART,
        "CUDA decomposes it then; ours is the kernel, which says that it is not deterministic",
    ),
]


def has_kernel(operation: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))


@pytest.mark.parametrize("branch", BRANCHES, ids=lambda b: f"{b.where}: {b.operation}")
def test_a_branch_on_the_device_goes_the_way_the_table_says(
    device: torch.device, branch: Branch
) -> None:
    name, _, overload = branch.operation.partition(".")
    assert torch._C._dispatch_find_schema_or_throw(name, overload)
    if branch.way is OURS:
        keys = ("AutogradPrivateUse1", "PrivateUse1", "AutocastPrivateUse1")
        assert any(has_kernel(branch.operation, key) for key in keys)
    elif branch.way is WORKER:
        # Not taken apart above the worker: it has no composite kernel, or ours is in its place.
        in_parts = has_kernel(branch.operation, "CompositeImplicitAutograd")
        assert not in_parts or has_kernel(branch.operation, "PrivateUse1")
    elif branch.way is APART:
        assert branch.reason


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_the_branches_of_layers_give_the_numbers_of_the_worker(device: torch.device) -> None:
    """On a CPU worker all of them must still be the CPU's; bench/parity.py compares a GPU's."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, 8)
    grid = torch.rand(4, 5, 5, 2) * 2 - 1
    logits, targets = torch.randn(20, 4, 9).log_softmax(2), torch.randint(1, 9, (4, 5))
    lengths = torch.full((4,), 20), torch.full((4,), 5)
    norm = torch.nn.BatchNorm2d(6)
    sequences = torch.randn(7, 4, 6)
    layer = torch.nn.LSTM(6, 5, num_layers=2, bidirectional=True, proj_size=3)
    functional = torch.nn.functional

    def all_of(where: torch.device) -> list[torch.Tensor]:
        import copy

        there = copy.deepcopy(norm).to(where)
        here = copy.deepcopy(layer).to(where)
        here.flatten_parameters()
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            sequences.to(where), torch.tensor([7, 5, 3, 2])
        )
        return [
            there(x.to(where)),
            there.eval()(x.to(where)),
            functional.instance_norm(x.to(where)),
            functional.group_norm(x.to(where), 3),
            functional.grid_sample(x.to(where), grid.to(where), align_corners=True),
            functional.ctc_loss(logits.to(where), targets.to(where), *lengths),
            functional.rms_norm(x.to(where), (8,)),
            functional.softmax(x.half().to(where), 1, dtype=torch.float32),
            functional.log_softmax(x.half().to(where), 1, dtype=torch.float32),
            here(sequences.to(where))[0],
            here(packed)[0].data,
        ]

    for ours, theirs in zip(all_of(device), all_of(torch.device("cpu")), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
