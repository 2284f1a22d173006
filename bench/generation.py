"""GPT-2 writes text: `generate` of transformers here, on a device, and replayed there.

python bench/generation.py                  # on the processor: this machine is client and worker
python bench/generation.py --device cuda    # beside the local GPU
python bench/generation.py --link           # a small model over a round trip of 100 ms, here
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from elsewhere import Elsewhere
from measure import Sample, interleave, say
from report import Row, compared, save
from slow_link import far_and_near, slow_link, taken_behind, tell
from training import QUIET

import skyward as sky

PROMPT, ROUND_TRIP = 32, 0.1
SIZES: dict[str, dict[str, int]] = {
    "GPT-2 124M": {},
    "GPT-2 4x256": {"n_layer": 4, "n_embd": 256, "n_head": 4},
}
WAYS: dict[str, dict[str, Any]] = {
    "replayed": {"cache_implementation": "static"},
    "static, not replayed": {"cache_implementation": "static", "disable_compile": True},
    "dynamic": {},
}


class Writing:
    """A model with random weights, and a prompt."""

    def __init__(self, device: torch.device, size: str, rows: int, new: int, kind: str) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        self._model = GPT2LMHeadModel(GPT2Config(**SIZES[size])).eval()
        if kind == "cuda":
            self._model.to(torch.bfloat16)
        self._model.to(device)
        self._prompt = torch.randint(0, 50_000, (rows, PROMPT)).to(device)
        self._mask = torch.ones_like(self._prompt)
        self._new = new

    def text(self, way: str, **more: Any) -> list[list[int]]:
        """The words that it writes."""
        wanted = {"max_new_tokens": self._new, "pad_token_id": 50256, "do_sample": False}
        torch.manual_seed(0)
        made = self._model.generate(
            self._prompt, attention_mask=self._mask, **{**wanted, **WAYS[way], **more}
        )
        return made.tolist()

    def timed(self, way: str, **more: Any) -> float:
        """Seconds for a text."""
        start = time.perf_counter()
        self.text(way, **more)
        return time.perf_counter() - start


def serve(pipe: Connection, kind: str) -> None:
    """Write on the local device, for `Elsewhere`."""
    writing = functools.cache(Writing)
    while (question := pipe.recv()) is not None:
        *made, way, more = question
        try:
            pipe.send(writing(torch.device(kind), *made, kind).timed(way, **more))
        except Exception as problem:
            pipe.send(RuntimeError(repr(problem)))


def rows(kind: str, rounds: int, size: str, new: int) -> Iterator[Row]:
    """Tokens a second for one text and for eight."""
    with sky.Compute(options=QUIET) as compute, Elsewhere(serve, kind) as here:
        device = compute.device(kind)
        for count in (1, 8):
            ours = Writing(device, size, count, new, kind)
            for name, more in {"greedy": {}, "sampled": {"do_sample": True, "top_k": 50}}.items():
                what = f"{size}, {count} x {new} tokens, {name}"
                say(f"  {what}")
                same = ours.text("replayed", **more) == ours.text("static, not replayed", **more)
                same = same and ours.text("replayed", **more) == ours.text("replayed", **more)
                said = "the same tokens" if same else "other tokens"
                yield Row(f"{what}: without replay", said, bar="the same", met=same)
                contenders: dict[str, Callable[[], float]] = {
                    way: functools.partial(ours.timed, way, **more) for way in WAYS
                }
                contenders["local"] = functools.partial(here.ask, size, count, new, "dynamic", more)
                yield from _rates(what, interleave(contenders, rounds=rounds), count * new, kind)


def _rates(what: str, taken: Mapping[str, Sample], tokens: int, kind: str) -> Iterator[Row]:
    rate = {name: sample.per(tokens, "tasks/s") for name, sample in taken.items()}
    what += ": tokens a second"
    bar = ">= 5.0x" if kind == "cuda" else ">= 1.0x"
    if "local" in rate:
        yield compared(what, rate["replayed"], "local", rate["local"], bar)
        yield compared(f"{what}, dynamic", rate["dynamic"], "local", rate["local"])
    for way in ("dynamic", "static, not replayed"):
        yield compared(what, rate["replayed"], f"ours, {way}", rate[way])


def over_a_link(rounds: int) -> Iterator[Row]:
    """A small model behind a delay, and beside."""
    with slow_link(ROUND_TRIP) as ends:
        details = ["--behind", ends.far, ends.far_address, "--rounds", str(rounds)]
        taken = taken_behind(ends, __file__, *details)
    far = {name[4:]: sample for name, sample in taken.items() if name.startswith("far")}
    yield from _rates(f"GPT-2 4x256 over {ROUND_TRIP * 1e3:.0f} ms, 128 tokens", far, 128, "cpu")
    near = taken["near replayed"].per(128, "tasks/s")
    yield compared(
        f"GPT-2 4x256 over {ROUND_TRIP * 1e3:.0f} ms, 128 tokens",
        far["replayed"].per(128, "tasks/s"),
        "replayed without delay",
        near,
    )


def behind(namespace: str, address: str, rounds: int) -> None:
    """Measure seconds for a text, over the link and not, and print the samples."""
    contenders: dict[str, Callable[[], float]] = {}
    with far_and_near(namespace, address) as pools:
        for place, compute in pools.items():
            writing = Writing(compute.device("cpu"), "GPT-2 4x256", 1, 128, "cpu")
            for way in WAYS if place == "far" else ["replayed"]:
                contenders[f"{place} {way}"] = functools.partial(writing.timed, way)
        tell(interleave(contenders, rounds=rounds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="GPT-2 124M", choices=tuple(SIZES))
    parser.add_argument("--new", type=int, default=128, help="tokens of a text")
    parser.add_argument("--link", action="store_true", help="over a round trip of 100 ms")
    parser.add_argument("--behind", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help="write the rows there as JSON, too")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.behind:
        behind(*options.behind, options.rounds)
        sys.exit()
    found = []
    for row in (
        over_a_link(options.rounds)
        if options.link
        else rows(options.device, options.rounds, options.size, options.new)
    ):
        print(" | ".join(row.cells()), flush=True)
        found.append(row)
        if options.rows:
            save(found, options.rows)
