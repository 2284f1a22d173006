"""The tally of op_db samples that passed, were excluded or failed, and the page made of it."""

from __future__ import annotations

import collections

import torch

from .exclusions import EXCLUSIONS

KINDS = ("passed", "excluded", "failed")


class Tally:
    """Counts by dtype."""

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[torch.dtype, str]] = collections.Counter()
        self.operations: set[str] = set()
        self.tested: set[str] = set()
        """Names of tests, which tell apart the variants of an operation."""
        self.passed: set[tuple[str, torch.dtype]] = set()
        self.excluded: set[tuple[str, torch.dtype]] = set()

    def add(self, operation: str, dtype: torch.dtype, kind: str) -> None:
        """One more sample."""
        self.operations.add(operation)
        self.counts[dtype, kind] += 1
        if kind == "passed":
            self.passed.add((operation, dtype))
        elif kind == "excluded":
            self.excluded.add((operation, dtype))

    def share(self) -> float:
        """The share of all samples that passed."""
        passed = sum(n for (_, kind), n in self.counts.items() if kind == "passed")
        return passed / max(sum(self.counts.values()), 1)

    def page(self) -> str:
        """The coverage page of the documentation."""
        rows = []
        for dtype in sorted({dtype for dtype, _ in self.counts}, key=str):
            numbers = [self.counts[dtype, kind] for kind in KINDS]
            share = f"{100 * numbers[0] / sum(numbers):.1f} %"
            cells = [str(dtype).removeprefix("torch."), *map(str, numbers), share]
            rows.append("| " + " | ".join(cells) + " |")
        listed = [f"| `{e.op}` | {e.dtypes} | {e.reason} |" for e in EXCLUSIONS]
        return "\n".join(
            (
                "# What the device can do",
                "",
                "Written by `tests/device/test_ops.py`; do not edit. Samples of PyTorch's own"
                f" `op_db` for {len(self.operations)} operations, on a CPU worker (torch"
                f" {torch.__version__}): values, dtype, shape and strides equal the CPU's, and for"
                " float32 the gradients as well; once when the worker is asked for the result's"
                " shape and once when it is known; with non-contiguous inputs; with `out=`, of the"
                " right size and to be resized; in place.",
                "",
                "| dtype | passed | excluded | failed | share passed |",
                "|---|---|---|---|---|",
                *rows,
                "",
                f"In all, {100 * self.share():.1f} % pass.",
                "",
                "## Exclusions",
                "",
                "| operation | dtypes | why |",
                "|---|---|---|",
                *listed,
                "",
            )
        )
