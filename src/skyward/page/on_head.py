"""The page on a head node: a process that serves the page of its pool on the node's loopback.

The agent starts it, and carries the connections of those who look. It prints its port and token.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from types import FrameType

from skyward.errors import SkywardError
from skyward.nodes import keeping
from skyward.page.gathering import Gathering
from skyward.page.server import PageServer


def main() -> None:
    """Serve the page of the pool that the argument names, until a signal."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)
    name = sys.argv[1]
    try:
        keeping.read(name)
    except SkywardError as problem:
        sys.exit(str(problem))
    gathering = Gathering([name])
    server = PageServer(gathering, forwarded=True)
    print(json.dumps({"port": server.port, "token": server.token}), flush=True)
    ended.wait()
    server.close()
    gathering.close()


if __name__ == "__main__":
    main()
