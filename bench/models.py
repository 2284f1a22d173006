"""Ordinary models as people train them on a GPU, each a loop that yields its losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Loop = Iterator[torch.Tensor]
"""Endless; every `next` is one training step and gives the loss, still on the device."""


class Bottleneck(nn.Module):
    """The block of ResNet-50: three convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, before: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut = (
            nn.Identity()
            if before == outer and stride == 1
            else nn.Sequential(
                nn.Conv2d(before, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """ResNet-50 for 1,000 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inner, 4 * inner, before, stride if number == 0 else 1))
            before = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def training(
    model: nn.Module,
    device: torch.device,
    loss_of: Callable[[nn.Module], torch.Tensor],
    *,
    cast: torch.dtype | None = None,
) -> Loop:
    """The loop everybody writes: zero, forward, backward, step."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-4)
    while True:
        optimizer.zero_grad(set_to_none=True)
        context: AbstractContextManager[Any] = (
            torch.autocast(device.type, cast) if cast else nullcontext()
        )
        with context:
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def resnet_loop(device: torch.device) -> Loop:
    """ResNet-50, AMP with scaled gradients, channels last."""
    model = resnet50().to(device, memory_format=torch.channels_last)
    x = torch.randn(32, 3, 224, 224).to(device, memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (32,)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type)
    while True:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss.detach()


def cnn_loop(device: torch.device) -> Loop:
    """A small CNN in float32."""
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 64, 128, 256)):
        parts += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        parts += [nn.MaxPool2d(2)]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(256 * 16, 10)).to(device)
    x, y = torch.randn(128, 3, 32, 32).to(device), torch.randint(0, 10, (128,)).to(device)
    return training(model, device, lambda m: functional.cross_entropy(m(x), y))


class Tagger(nn.Module):
    """A recurrent network that names each position of a sequence."""

    def __init__(self, kind: Callable[..., nn.Module], width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.layers = kind(256, width, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(x))[0])


def recurrent_loop(kind: Callable[..., nn.Module]) -> Callable[[torch.device], Loop]:
    """Two layers of an LSTM or a GRU over 64 positions."""

    def loop(device: torch.device) -> Loop:
        model = Tagger(kind).to(device)
        x, y = (torch.randint(0, n, (64, 64)).to(device) for n in (5000, 50))
        return training(
            model, device, lambda m: functional.cross_entropy(m(x).flatten(0, 1), y.flatten())
        )

    return loop


def _tokens(device: torch.device, batch: int, length: int, words: int) -> torch.Tensor:
    return torch.randint(0, words, (batch, length)).to(device)


def gpt_loop(device: torch.device) -> Loop:
    """GPT-2 124M in bfloat16 by autocast."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).to(device)
    x = _tokens(device, 8, 512, 50257)
    return training(model, device, lambda m: m(input_ids=x, labels=x).loss, cast=torch.bfloat16)


def bert_loop(device: torch.device) -> Loop:
    """BERT-base with its dropout, a batch of 16 sequences with padding."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig()).to(device)
    model.train()
    x = _tokens(device, 16, 128, 30522)
    mask = (torch.arange(128) < torch.randint(64, 128, (16, 1))).long().to(device)
    y = torch.randint(0, 2, (16,)).to(device)
    return training(
        model,
        device,
        lambda m: m(input_ids=x, attention_mask=mask, labels=y).loss,
        cast=torch.bfloat16,
    )


def vit_loop(device: torch.device) -> Loop:
    """ViT-base over 16 pictures."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=100)).to(device)
    x, y = torch.randn(16, 3, 224, 224).to(device), torch.randint(0, 100, (16,)).to(device)
    return training(model, device, lambda m: m(pixel_values=x, labels=y).loss, cast=torch.bfloat16)


class LowRank(nn.Module):
    """A frozen linear layer with two small matrices beside it that are trained."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def lora_loop(device: torch.device) -> Loop:
    """A Llama of 16 layers, of which only low-rank matrices are trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj = LowRank(attention.q_proj, 8)
        attention.v_proj = LowRank(attention.v_proj, 8)
    model = model.to(device, torch.bfloat16)
    x = _tokens(device, 4, 256, 8000)
    return training(model, device, lambda m: m(input_ids=x, labels=x).loss)


def generation_loop(device: torch.device) -> Loop:
    """GPT-2 124M writes 32 words; a step is one whole text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).to(device, torch.bfloat16).eval()
    x = _tokens(device, 4, 16, 50257)
    mask = torch.ones_like(x)
    while True:
        written = model.generate(
            x, attention_mask=mask, max_new_tokens=32, do_sample=False, pad_token_id=0
        )
        yield written.float().mean()


def _small_pictures(device: torch.device, batches: Iterable[Sequence[torch.Tensor]]) -> Loop:
    """A small CNN trained on batches of 64 pictures, 3 MiB each, that lie in pinned memory."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, y in batches:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def pinned_loop(device: torch.device) -> Loop:
    """Batches that were pinned once: only the upload counts."""
    x, y = torch.randn(1024, 3, 64, 64), torch.randint(0, 10, (1024,))
    batches = [(x[i : i + 64].pin_memory(), y[i : i + 64].pin_memory()) for i in range(0, 1024, 64)]
    return _small_pictures(device, itertools.cycle(batches))


def loader_loop(device: torch.device) -> Loop:
    """Batches that a DataLoader puts together and pins as they are asked for."""
    data = torch.utils.data.TensorDataset(
        torch.randn(1024, 3, 64, 64), torch.randint(0, 10, (1024,))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=64, pin_memory=True)
    batches = itertools.chain.from_iterable(loader for _ in itertools.count())
    return _small_pictures(device, batches)


LOOPS: dict[str, Callable[[torch.device], Loop]] = {
    "ResNet-50, AMP, channels last": resnet_loop,
    "CNN": cnn_loop,
    "LSTM": recurrent_loop(nn.LSTM),
    "GRU": recurrent_loop(nn.GRU),
    "GPT-2 124M, bf16": gpt_loop,
    "BERT-base with dropout, bf16": bert_loop,
    "ViT-base, bf16": vit_loop,
    "Llama with LoRA, bf16": lora_loop,
    "GPT-2 generation": generation_loop,
    "pinned batches of 3 MiB": pinned_loop,
    "DataLoader, pinned batches of 3 MiB": loader_loop,
}
