"""Hanging ranks: which worker of a broadcast failed first, where the others were, and who waits."""

from __future__ import annotations

from collections.abc import Sequence

from skyward.errors import Outcome, TaskCancelledError, TaskError, TaskTimeoutError


def failures_told(outcomes: Sequence[Outcome], first: int) -> str:
    """Lines for the error of a broadcast: which rank failed first, and where each of them was."""
    if len(outcomes) == 1:
        return ""
    late: dict[int, TaskError] = {}
    cancelled: dict[int, TaskError] = {}
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome.error, TaskTimeoutError):
            late[rank] = outcome.error
        elif isinstance(outcome.error, TaskCancelledError):
            cancelled[rank] = outcome.error
    lines = []
    if first not in late and first not in cancelled:
        what = shortened(outcomes[first].error)
        lines.append(f"rank {first} (node {outcomes[first].node}) failed first: {what}")
    lines += [
        f"rank {rank} (node {outcomes[rank].node}) did not answer in time: "
        + (f"it was at {error.place}" if error.place else "where it was is not known")
        for rank, error in late.items()
        if not error.collective
    ]
    waiting = {rank: error for rank, error in late.items() if error.collective}
    lines += [f"{ranks}{where}" for ranks, where in _by_place(waiting)]
    lines += [f"cancelled: {ranks}{where}" for ranks, where in _by_place(cancelled)]
    done = [rank for rank, outcome in enumerate(outcomes) if outcome.ok]
    known = {first, *late, *cancelled, *done}
    failed = [rank for rank in range(len(outcomes)) if rank not in known]
    lines += [f"{in_words(done)} returned"] if done else []
    lines += [f"{in_words(failed)} failed, too"] if failed else []
    return ":\n" + "\n".join(f"  {line}" for line in lines)


def _by_place(errors: dict[int, TaskError]) -> list[tuple[str, str]]:
    """The ranks that were at the same place, and what they did there, in words."""
    places: dict[str, list[int]] = {}
    for rank, error in errors.items():
        where = f" at {error.place}" if error.place else ", where is not known"
        if error.collective:
            where = f" waited in the collective {error.collective},{where}"
        places.setdefault(where, []).append(rank)
    return [(in_words(ranks), where) for where, ranks in places.items()]


def shortened(problem: BaseException | None) -> str:
    """An error in one line."""
    return f"{type(problem).__name__}: {problem}".partition("\n")[0]


def in_words(ranks: Sequence[int]) -> str:
    """Ranks in words, with ranges: "ranks 0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    text = ", ".join("-".join(map(str, part)) for part in parts)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
