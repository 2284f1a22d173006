"""A node's side of the pool: the agent that supervises, the executors that run tasks."""

import gc
import sys

if sys.argv[:1] == ["-m"] and {f"{__name__}.agent", f"{__name__}.executor"} & {*sys.orig_argv}:
    # Python is about to run one of them. What it imports stays: to look for garbage in it took a
    # tenth of the start. Its `main` switches the collector on again.
    gc.disable()
