"""The process that waits for a provider's notice: runs a module, and ends with the agent."""

from __future__ import annotations

import os
import runpy
import sys
import threading


def main() -> None:
    """Run the module that the argument names; its standard output has the notice."""
    threading.Thread(target=_end_with_agent, daemon=True).start()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def _end_with_agent() -> None:
    # The agent holds the other end of the pipe, and never writes to it.
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
