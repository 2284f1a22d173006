"""The reach of providers and pools: whether each answers, by one quick and free question."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from dataclasses import replace
from pathlib import Path

from skyward.cli.health import Finding
from skyward.compute.attaching import reach
from skyward.compute.configured import arguments_of
from skyward.errors import ConfigurationError, SkywardError
from skyward.nodes import keeping
from skyward.nodes.journal import Journal
from skyward.providers import Provider, answers, find_provider
from skyward.settings import read_settings


def provider(name: str) -> list[Finding]:
    """Ask a provider as the environment describes it."""
    if name == "ssh":
        return [_ssh()]
    try:
        made = find_provider(name)()
    except ImportError as problem:
        return [Finding(name, "problem", "its package cannot be imported", str(problem))]
    except TypeError:
        return [Finding(name, "ok", "it needs arguments, so pools of skyward.toml are checked")]
    except ConfigurationError as problem:
        return [Finding(name, "not set up", "see below", str(problem))]
    return [_answer(name, made)]


def _answer(check: str, provider: Provider) -> Finding:
    if not answers(provider):
        return Finding(check, "ok", "it has no question to ask")
    try:
        return Finding(check, "ok", asyncio.run(provider.ping()))
    except ConfigurationError as problem:
        return Finding(check, "not set up", "see below", str(problem))
    except SkywardError as problem:
        return Finding(check, "problem", "it does not answer as it should", str(problem))


def _ssh() -> Finding:
    """What logins would use; which hosts there are only a pool of the settings says."""
    if importlib.util.find_spec("asyncssh") is None:
        advice = "pip install 'skyward-torch[ssh]'"
        return Finding("ssh", "not set up", "asyncssh is missing", advice)
    folder = Path.home() / ".ssh"
    keys = [each.stem for each in sorted(folder.glob("id_*.pub"))]
    agent = os.environ.get("SSH_AUTH_SOCK")
    ways = [f"keys {', '.join(keys)}"] * bool(keys) + ["an ssh agent"] * bool(agent)
    if not ways:
        return Finding(
            "ssh",
            "not set up",
            f"no ssh agent, and no key in {folder}",
            "ssh-keygen makes a key, and ssh-copy-id HOST brings it to a host",
        )
    return Finding("ssh", "ok", f"{' and '.join(ways)}; hosts are checked with their pools")


def described_pools() -> list[str]:
    """The pools of the settings file; a file that cannot be read is one pool that cannot be."""
    try:
        settings = read_settings()
    except ConfigurationError:
        return ["?"]
    return [] if settings is None else sorted(settings.pools)


def described(name: str) -> list[Finding]:
    """A pool of the settings file: its arguments, and its provider's answer."""
    check = f"pool {name}"
    try:
        arguments = arguments_of(name)
    except ConfigurationError as problem:
        return [Finding(check, "problem", "its settings cannot be used", str(problem))]
    if "provider" not in arguments:
        return [Finding(check, "ok", "on this machine")]
    answer = _answer(check, arguments["provider"])
    # Whoever describes a pool means to use it.
    return [replace(answer, state="problem") if answer.state == "not set up" else answer]


def kept(name: str) -> list[Finding]:
    """A pool that stays: whether the agent of each of its nodes answers."""
    check = f"kept {name}"
    try:
        with reach(name) as pool:
            for node in pool.nodes:
                with pool.service(node, "about") as service:
                    service.ask("facts")
            count = len(pool.nodes)
    except SkywardError as problem:
        advice = str(problem)
        if "`sky down" not in advice:
            advice += f"; `sky down {name}` removes it"
        return [Finding(check, "problem", "it stays, but does not answer", advice)]
    return [Finding(check, "ok", f"stays, and answers: {count} node{'s' * (count != 1)}")]


def recorded() -> list[Finding]:
    """The pools that have machines, from the journal."""
    pools = Journal().pools()
    left = [pool for pool in pools if pool.client == "gone" and keeping.find(pool.id) is None]
    if not left:
        return [Finding("pools", "ok", f"{len(pools) or 'none'} on record, none left behind")]
    names = ", ".join(pool.name for pool in left)
    advice = f"`sky down` removes what was left behind ({names}); `sky ps` lists it"
    return [Finding("pools", "problem", f"{len(left)} left behind of {len(pools)}", advice)]
