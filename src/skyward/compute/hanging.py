"""Hanging ranks: which workers of a broadcast did not answer in time, where, and who waits."""

from __future__ import annotations

from collections.abc import Sequence

from skyward.errors import Outcome, TaskTimeoutError


def timeouts_told(outcomes: Sequence[Outcome]) -> str:
    """Lines for the error of a broadcast: where each rank was; empty if none took too long."""
    late = {
        rank: outcome.error
        for rank, outcome in enumerate(outcomes)
        if isinstance(outcome.error, TaskTimeoutError)
    }
    if not late:
        return ""
    lines = [
        f"rank {rank} (node {outcomes[rank].node}) did not answer in time: "
        + (f"it was at {error.place}" if error.place else "where it was is not known")
        for rank, error in late.items()
        if not error.collective
    ]
    waiting: dict[tuple[str, str], list[int]] = {}
    for rank, error in late.items():
        if error.collective:
            waiting.setdefault((error.collective, error.place), []).append(rank)
    lines += [
        f"{_ranks(ranks)} waited in the collective {collective}, at {place}"
        for (collective, place), ranks in waiting.items()
    ]
    done = [rank for rank, outcome in enumerate(outcomes) if outcome.ok]
    failed = [rank for rank, o in enumerate(outcomes) if not o.ok and rank not in late]
    lines += [f"{_ranks(done)} returned"] if done else []
    lines += [f"{_ranks(failed)} raised"] if failed else []
    return ":\n" + "\n".join(f"  {line}" for line in lines)


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, with ranges: "ranks 0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    text = ", ".join("-".join(map(str, part)) for part in parts)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
