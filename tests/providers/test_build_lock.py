"""The lock around a build: kept for an owner who lives, taken from one who has fallen silent."""

from __future__ import annotations

import subprocess
from importlib import resources
from pathlib import Path

LOOKS = 150
"""How often in a row the same is seen of an owner elsewhere before it counts as dead."""


def answers(folder: Path, script: str) -> list[str]:
    """What a waiter's script says, given `is_stale` as it is in a build, and `look_until_stale`."""
    build = resources.files("skyward.bootstrap").joinpath("sh/build.sh").read_text()
    start, end = build.index("silence=0"), build.index('mkdir -p "$cache/envs"')
    paths = (
        f"lock={folder}/lock; place=here\n"
        "start_of() { [ $1 = 1 ] && echo 100; }\n"
        "say() { if is_stale $1; then echo stale; else echo alive; fi; }\n"
        "look_until_stale() { looks=1; until is_stale $1; do looks=$((looks + 1)); done; }\n"
    )
    command = ["sh", "-c", paths + build[start:end] + script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    return done.stdout.split()


def test_an_owner_on_this_machine_is_known_to_live_or_not(tmp_path: Path) -> None:
    script = """
        for owner in here:1:100 here:1:99 here:2:100; do
            ln -sfn $owner $lock; say $lock
        done
    """
    assert answers(tmp_path, script) == ["alive", "stale", "stale"]


def test_an_owner_elsewhere_lives_while_it_has_something_new_to_say(tmp_path: Path) -> None:
    script = """
        ln -s there:1:1 $lock; echo one >$lock.beat
        look_until_stale $lock; echo $looks
        echo two >$lock.beat; say $lock
        look_until_stale $lock; echo $((looks + 1))
    """
    assert answers(tmp_path, script) == [str(LOOKS + 1), "alive", str(LOOKS + 1)]


def test_one_who_took_a_dead_owners_lock_over_has_it_though_it_has_said_nothing_yet(
    tmp_path: Path,
) -> None:
    script = """
        ln -s there:1:1 $lock; echo one >$lock.beat
        look_until_stale $lock
        ln -sfn elsewhere:2:2 $lock; say $lock
    """
    assert answers(tmp_path, script) == ["alive"]


def test_who_breaks_a_lock_is_given_as_long_as_who_holds_one(tmp_path: Path) -> None:
    script = """
        ln -s there:1:1 $lock; ln -s elsewhere:2:2 $lock.break
        look_until_stale $lock
        say $lock.break; say $lock
        look_until_stale $lock.break; echo $((looks + 1))
        ln -sfn other:3:3 $lock.break; say $lock.break; say $lock
    """
    assert answers(tmp_path, script) == ["alive", "stale", str(LOOKS + 1), "alive", "stale"]
