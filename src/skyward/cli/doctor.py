"""`sky doctor`: whether this machine, the providers and the pools would work, and what to do."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import click

from skyward.cli import names, output
from skyward.cli.commands import FAILED, Command

if TYPE_CHECKING:
    from skyward.cli.health import Check, Finding

_PROVIDER_SECONDS = 30.0
_ALL_SECONDS = 150.0
"""The longest check of this machine ends by itself before."""


@click.command(cls=Command)
@click.argument("providers", nargs=-1, metavar="[PROVIDER]...", shell_complete=names.providers)
def doctor(providers: tuple[str, ...]) -> None:
    """Check this machine, the providers, and the pools, and say what to do.

    With PROVIDERs, checks only these. Asks providers only quick questions that cost nothing. A
    provider that is not set up is no fault. The exit code is 1 if `sky.Compute()` would not work
    on this machine, or a PROVIDER that was named.
    """
    from skyward.providers import provider_names

    for name in providers:
        if name not in provider_names():
            known = ", ".join(provider_names())
            raise click.UsageError(f"no provider is called {name!r}; there are {known}")
    found = list(_ordered(_checks(providers)))
    unusable = [
        each
        for each in found
        if each.state == "broken" or (each.check in providers and each.state != "ok")
    ]
    if output.wants_json():
        document = {"ok": not unusable, "checks": [asdict(each) for each in found]}
        output.as_json(document)
    else:
        _tell(found)
    if unusable:
        click.get_current_context().exit(FAILED)


def _tell(found: Sequence[Finding]) -> None:
    rows = [(each.check, each.state, each.found) for each in found]
    output.table(("check", "state", "found"), rows, right=(), wraps=True)
    advised = [each for each in found if each.advice]
    for title, these in (
        ("To do", [each for each in advised if each.state in ("problem", "broken")]),
        ("To use more", [each for each in advised if each.state == "not set up"]),
    ):
        if these:
            click.echo(f"\n{title}:")
        for each in these:
            output.item(f"{each.check}: {output.clean(each.advice)}")


def _checks(named: Sequence[str]) -> dict[str, tuple[Check, float]]:
    """What is to be checked, by name, and for how long at most."""
    from skyward.cli import health
    from skyward.nodes import records
    from skyward.providers import provider_names

    machine = {name: (check, _ALL_SECONDS) for name, check in health.machine_checks().items()}
    if named:
        checks = {name: each for name, each in machine.items() if name in named}
    else:
        checks = machine
        checks["pools"] = (health.recorded, _PROVIDER_SECONDS)
        checks |= {
            f"kept {name}": (partial(health.kept, name), _PROVIDER_SECONDS)
            for name in records.names()
        }
        checks |= {
            f"pool {name}": (partial(health.described, name), _PROVIDER_SECONDS)
            for name in health.described_pools()
        }
    for name in named or provider_names():
        if name != "local":
            checks[name] = (partial(health.provider, name), _PROVIDER_SECONDS)
    return checks


def _ordered(checks: Mapping[str, tuple[Check, float]]) -> Iterator[Finding]:
    """Run all checks at once; their findings in the order of the checks."""
    from skyward.cli.health import Finding

    done: dict[str, queue.SimpleQueue[list[Finding]]] = {}
    for name, (check, _) in checks.items():
        done[name] = queue.SimpleQueue()
        # Daemons: a question that is never answered must not keep the process.
        threading.Thread(
            target=_run, args=(name, check, done[name]), name=f"doctor {name}", daemon=True
        ).start()
    began = time.monotonic()
    for name, (_, seconds) in checks.items():
        try:
            yield from done[name].get(timeout=max(0.0, began + seconds - time.monotonic()))
        except queue.Empty:
            yield Finding(
                name, "problem", f"no answer in {seconds:g} s", "see whether it is in reach"
            )


def _run(name: str, check: Check, done: queue.SimpleQueue[list[Finding]]) -> None:
    from skyward.cli.health import Finding

    try:
        done.put(check())
    except Exception as problem:
        # A check that fails is a finding as well; the other checks go on.
        told = f"{type(problem).__name__}: {problem}"
        done.put([Finding(name, "problem", "the check failed", told)])
