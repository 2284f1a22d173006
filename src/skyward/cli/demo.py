"""`sky demo`: a model goes to a worker, learns there, comes back and is used here."""

from __future__ import annotations

from typing import Any

import click

from skyward.cli import names, output
from skyward.cli.commands import FAILED, Command

_TRAINING, _TEST = 8000, 1000
_EPOCHS = 5
_EXPECTED = 90.0


@click.command(cls=Command)
@click.option(
    "--pool",
    metavar="NAME",
    shell_complete=names.described_pools,
    help="A pool of skyward.toml; without it, this machine.",
)
def demo(pool: str | None) -> None:
    """Train a model on a worker and evaluate it here.

    The model is an ordinary `nn.Module`: it goes in as an argument and comes back as the result.
    Its data are drawn, so nothing is downloaded. Needs torch.
    """
    # Here, since torch takes seconds to import, and `sky --help` must not.
    import warnings

    # Of a torch without numpy, which the demonstration does not use.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch

    from skyward.cli import digits
    from skyward.compute import Compute
    from skyward.spec import Options

    talk = not output.wants_json()
    settings: dict[str, Any] = {} if talk else {"options": Options(console=False)}
    made = Compute.named(pool, **settings) if pool else Compute(**settings)
    torch.manual_seed(0)
    images, labels = digits.drawn(_TRAINING, seed=1)
    held_out = digits.drawn(_TEST, seed=2)
    model = digits.DigitReader()
    before = digits.accuracy(model, *held_out)
    if talk:
        count = sum(each.numel() for each in model.parameters())
        click.echo(f"A new model of {count:,} parameters reads {before:.1f} % of {_TEST:,} digits.")
    with made as compute:
        trained = digits.train(model, images, labels, _EPOCHS, talk) >> compute
        where = compute.nodes[0].address
    after = digits.accuracy(trained, *held_out)
    if not talk:
        output.as_json({"before": before, "after": after, "node": where})
    else:
        click.echo(f"Trained on a worker and back here, it reads {after:.1f} %.")
        click.echo(f"The program is {digits.__file__}; change it, and make it yours.")
    if after < _EXPECTED:
        click.echo(f"Error: at least {_EXPECTED:.0f} % were expected", err=True)
        click.get_current_context().exit(FAILED)
