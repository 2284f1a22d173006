"""Exclusions: every sample of PyTorch's op_db that a sky device is not held to, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Why samples of an operation are not compared in full.

    A sample counts as excluded only when it fails with exactly this error. Wrong values cannot be
    excluded; where there are no right ones, `values` is false and the rest is still compared; where
    PyTorch itself computes less precisely off the CPU, `rtol` holds instead of its own tolerance.
    """

    op: str
    reason: str
    error: str = ""
    dtypes: str = "all"
    values: bool = True
    rtol: float | None = None


_EMPTY = "returns memory as it was; dtype, shape, strides and place are compared"
_SPARSE = "a sky device holds dense tensors only, and says so"
_SPARSE_INPUT = "its samples are sparse and not moved; on the device it raises NotImplementedError"

EXCLUSIONS = (
    Exclusion("empty", _EMPTY, values=False),
    Exclusion("empty_like", _EMPTY, values=False),
    Exclusion("empty_permuted", _EMPTY, values=False),
    Exclusion("empty_strided", _EMPTY, values=False),
    Exclusion("new_empty", _EMPTY, values=False),
    Exclusion("new_empty_strided", _EMPTY, values=False),
    Exclusion("to_sparse", _SPARSE, error="cannot live on a sky device"),
    Exclusion("sparse.sampled_addmm", _SPARSE_INPUT, error="Cannot access storage of Sparse"),
    Exclusion("sparse.mm", _SPARSE_INPUT, error="Cannot access storage of Sparse"),
    Exclusion(
        "nn.functional.linear_cross_entropy",
        "PyTorch accumulates in bfloat16 off the CPU and in float32 on it, by its acc_policy"
        ' "auto"; bit-equal when the policy is the same; compared with a tolerance of 0.1, since '
        "a processor without instructions for bfloat16 rounds more often",
        dtypes="bfloat16",
        rtol=0.1,
    ),
    Exclusion(
        "tensor_split",
        "PyTorch itself wants the indices on the CPU, for every accelerator",
        error="expected tensor_indices_or_sections to be on cpu",
    ),
)


def exclusion_of(name: str, dtype: str) -> Exclusion | None:
    """The exclusion of an operation, by its name in op_db and that of a dtype."""
    return next((e for e in EXCLUSIONS if e.op == name and e.dtypes in ("all", dtype)), None)
