"""Commands for a container with a shell: ones that can be ended, and ones that need Python."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence

Output = Callable[[bytes], None] | None

_PYTHON = """\
node=${2#unix:}
node=${node%/*}/python
if [ -x "$node" ]; then exec "$node" -c "$@"; fi
exec "$0" -c "$@"
"""
"""Where the bootstrap installed Python, the node's folder has a link to it."""


MARKS = "/tmp/.skyward-"


def new_mark() -> str:
    """A file in a container that will hold the process id of a command."""
    return f"{MARKS}{uuid.uuid4().hex}"


async def run(
    execute: Callable[[Sequence[str], bytes, Output], int],
    command: Sequence[str],
    input: bytes,
    output: Output,
) -> int:
    """Run a command on a thread with `execute`; a cancellation ends it in the container too."""
    mark = new_mark()
    work = asyncio.create_task(asyncio.to_thread(execute, marked(mark, command), input, output))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await asyncio.to_thread(execute, killing(mark), b"", None)
        with contextlib.suppress(Exception):
            await work
        raise


def marked(mark: str, command: Sequence[str]) -> list[str]:
    """The command, which leaves its process id in `mark` while it runs."""
    script = f'echo "$$" >{mark}; trap "rm -f {mark}" EXIT; "$@"'
    return ["sh", "-c", script, "sh", *command]


def killing(mark: str) -> list[str]:
    """A command that kills the marked one and its children."""
    script = (
        f'pid=$(cat {mark}) || exit 0; pids=$pid; next=$pid; while [ -n "$next" ]; do '
        "found=; for one in $next; do for stat in /proc/[0-9]*/stat; do "
        'read -r line <"$stat" 2>/dev/null || continue; rest=${line##*) }; set -- $rest; '
        '[ "$2" = "$one" ] && found="$found ${line%% *}"; done; done; '
        f'pids="$pids $found"; next=$found; done; kill -9 $pids; rm -f {mark}'
    )
    return ["sh", "-c", script]


def python(interpreter: str | None, script: str, endpoint: str) -> list[str]:
    """A command that runs a script, with the endpoint of a node's socket as its argument."""
    return ["sh", "-c", _PYTHON, interpreter or "python3", script, endpoint]
