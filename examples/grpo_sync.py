"""Train a policy on one node, and sample on another from a copy that follows every step: GRPO.

The sampler writes replies to prompts and rewards them; the trainer learns from them with group
relative policy optimisation; then the trainer's weights are copied to the sampler. Replies and
weights go from node to node, and nothing but the printed numbers comes to this process.

The task is a toy: a prompt is three digits, and the reply is to be the same digits in reverse. A
reply's reward is the part of its digits that are right: an untrained policy gets one in five.

Exits with an error if the policy does not learn.
"""

import copy
import os
import sys

import torch
from torch import nn

import skyward as sky

# Enough to show that it learns, for the tests: they run every example.
QUICK = bool(os.environ.get("SKYWARD_EXAMPLE_QUICK"))
STEPS = 120 if QUICK else 240
EXPECTED_REWARD = 0.5 if QUICK else 0.7
DIGITS, LENGTH = 5, 3
PROMPTS, GROUP = 32, 8
CLIP = 0.2
VARIETY = 0.1


class Policy(nn.Module):
    """A small transformer over the digits of a prompt and of the reply so far."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.digit = nn.Embedding(DIGITS, width)
        self.place = nn.Parameter(0.02 * torch.randn(2 * LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, DIGITS)
        causal = nn.Transformer.generate_square_subsequent_mask(2 * LENGTH)
        self.register_buffer("causal", causal)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of the digit after each."""
        count = tokens.shape[1]
        hidden = self.digit(tokens) + self.place[:count]
        hidden = self.layers(hidden, mask=self.causal[:count, :count], is_causal=True)
        return nn.functional.log_softmax(self.head(hidden), dim=-1)


def likely(policy: Policy, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of a reply's digits, and those of all digits in their places."""
    said = policy(tokens[:, :-1])[:, LENGTH - 1 :]
    return said.gather(2, tokens[:, LENGTH:, None]).squeeze(2), said


@torch.no_grad()
def sample(policy: Policy, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A group of replies to each prompt, their log-probabilities, and their rewards."""
    prompts = torch.randint(DIGITS, (PROMPTS, LENGTH), device=device)
    tokens = prompts.repeat_interleave(GROUP, dim=0)
    for _ in range(LENGTH):
        chances = policy(tokens)[:, -1].exp()
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    rewards = (tokens[:, LENGTH:] == tokens[:, :LENGTH].flip(1)).float().mean(1)
    return tokens, likely(policy, tokens)[0], rewards


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    before: torch.Tensor,
    rewards: torch.Tensor,
) -> None:
    """Make replies that were better than the others of their group more likely."""
    groups = rewards.reshape(PROMPTS, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    advantages = advantages.reshape(-1, 1)
    for _ in range(2):
        now, said = likely(policy, tokens)
        ratio = (now - before).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        # Without a reward for variety, all replies of a group are soon the same.
        loss = loss + VARIETY * (said.exp() * said).sum(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> int:
    # The model is small, and both nodes are on this machine: more threads would only disturb.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    with sky.Compute(nodes=2) as compute:
        trainer, sampler = compute.devices("auto")
        policy = Policy().to(trainer)
        replica = copy.deepcopy(policy).to(sampler)
        optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
        count = sum(p.numel() for p in policy.parameters())
        print(f"{count:,} parameters learn on {trainer}, their copy samples on {sampler}")

        reached = first = 0.0
        recent = torch.zeros((), device=sampler)
        for step in range(1, STEPS + 1):
            tokens, before, rewards = sample(replica, sampler)
            update(policy, optimizer, *(t.to(trainer) for t in (tokens, before, rewards)))
            for p, ref_p in zip(policy.parameters(), replica.parameters(), strict=True):
                ref_p.data.copy_(p.data)
            recent += rewards.mean()
            if step % (STEPS // 6) == 0:
                reached = recent.item() / (STEPS // 6)
                first = first or reached
                recent.zero_()
                print(f"step {step:3d}/{STEPS}: reward {reached:.3f}")
        moved = sky.device_stats(trainer).bytes_to_devices
        print(f"{moved / 1e6:.0f} MB went from {trainer} to {sampler}")

    if reached < EXPECTED_REWARD or reached < first:
        print(f"expected a reward of at least {EXPECTED_REWARD}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
