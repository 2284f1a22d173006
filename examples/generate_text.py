"""Write text with a model on a device that is somewhere else: one message for each token.

With a static cache, transformers' `generate` is replayed: the worker makes one token after the
other, and the client hears of them in bunches. A streamer shows them as they come. The model learns
the alphabet in some seconds, so that nothing has to be downloaded, and writes on from "mnop".
"""

import sys
import time

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.generation import BaseStreamer

import skyward as sky

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 100


class Printer(BaseStreamer):
    """Prints letters as they come, without those of the prompt."""

    def __init__(self) -> None:
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self.is_prompt:
            print("".join(LETTERS[token] for token in value.tolist()), end="", flush=True)
        self.is_prompt = False

    def end(self) -> None:
        print(flush=True)


def trained(device: torch.device) -> GPT2LMHeadModel:
    """A small model that knows what follows each letter."""
    shape = {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=len(LETTERS), bos_token_id=None, eos_token_id=None, **shape)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        starts = torch.randint(0, len(LETTERS), (8, 1))
        text = ((starts + torch.arange(128)) % len(LETTERS)).to(device)
        scores = model(input_ids=text, use_cache=False).logits
        loss = nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> int:
    with sky.Compute() as compute:
        device = compute.device("auto")
        model = trained(device)
        prompt = torch.tensor([[LETTERS.index(letter) for letter in "mnop"]]).to(device)
        mask = torch.ones_like(prompt)

        texts = []
        for cache in (None, "static", "static"):
            began, waits = time.perf_counter(), sky.device_stats(device).waits
            found = model.generate(
                prompt,
                attention_mask=mask,
                max_new_tokens=LENGTH,
                do_sample=False,
                cache_implementation=cache,
                streamer=Printer(),
            )
            milliseconds = 1e3 * (time.perf_counter() - began) / LENGTH
            waits = sky.device_stats(device).waits - waits
            name = "a static cache" if cache else "a cache that grows"
            print(f"{name}: {milliseconds:.1f} ms a token, {waits} waits for the device")
            texts.append("".join(LETTERS[token] for token in found[0].tolist()))
    expected = (LETTERS * 6)[LETTERS.index("m") :][: 4 + LENGTH]
    print(f"The alphabet, each time: {texts == [expected] * 3}")
    return 0 if texts == [expected] * 3 else 1


if __name__ == "__main__":
    sys.exit(main())
