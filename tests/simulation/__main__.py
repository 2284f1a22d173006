"""`python -m tests.simulation`: run whole pools with many seeds, or one seed again."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys

ADDR_NO_RANDOMIZE = 0x0040000
MOST_SEEDS = 10_000
"""So many are tried to find a defect."""


def _always_the_same() -> None:
    """Start again with addresses and hashes that are the same in every run."""
    libc = ctypes.CDLL(None)
    before = libc.personality(0xFFFFFFFF)
    if before & ADDR_NO_RANDOMIZE and os.environ.get("PYTHONHASHSEED") == "0":
        return
    libc.personality(before | ADDR_NO_RANDOMIZE)
    os.environ["PYTHONHASHSEED"] = "0"
    if not libc.personality(0xFFFFFFFF) & ADDR_NO_RANDOMIZE:
        return
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, help="how many seeds (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one again, and show its history")
    parser.add_argument("--without", default="", help="leave these faults out: 0.0,2.1")
    parser.add_argument("--twice", action="store_true", help="run each seed twice, and compare")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, help="begin no further seed after so long")
    parser.add_argument("--scenario", help="run this one with all seeds; else the seed chooses")
    parser.add_argument("--until-failure", action="store_true", help="end with the first failure")
    parser.add_argument("--defect", help="put an old defect back (or `all`), and find it")
    given = parser.parse_args()
    if given.defect is not None:
        from . import defect

        more = ["--first", str(given.first), "--jobs", str(given.jobs)]
        more += ["--seeds", str(given.seeds or MOST_SEEDS)]
        more += ["--scenario", given.scenario] if given.scenario else []
        return defect.find(given.defect, more)
    _always_the_same()
    from . import runner

    if given.seed is not None:
        without = [each for each in given.without.split(",") if each]
        return runner.show(given.seed, given.scenario, without)
    seeds = range(given.first, given.first + (given.seeds or 1000))
    if given.until_failure:
        return runner.find(seeds, given.scenario, given.jobs)
    return runner.run(seeds, given.scenario, given.jobs, given.seconds, given.twice)


if __name__ == "__main__":
    sys.exit(main())
