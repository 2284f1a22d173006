"""The script of a pool's job: it starts a keeper on every node, and passes on Slurm's warning."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from skyward.providers.piped import program

WARNING_SECONDS = 120
"""How long before the end of the time limit the warning comes; Slurm may send it 60 s earlier."""
SIGNAL = f"--signal=B:USR1@{WARNING_SECONDS}"
"""To the script alone: a signal to the steps would end the user's processes."""
NO_PYTHON = 78
# The system's own first: what comes first on the path may be a script that looks for a Python.
_START = """\
for python in /usr/bin/python3 python3 /usr/libexec/platform-python python3.13 python3.12 \\
    python3.11 python3.10 python3.9 python3.8 python3.7 python3.6
do
    if command -v "$python" >/dev/null 2>&1; then exec "$python" -I -c "$@"; fi
done
printf 'skyward: there is no Python 3 on %s\\n' "$(uname -n)" >&2
exit 78
"""
_SCRIPT = """\
#!/bin/sh
start={start}
relay={relay}
keeper={keeper}

# Slurm says that it will soon end the job: tell every keeper how much time is left.
warn() {{
    left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%L 2>/dev/null)
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N 2>/dev/null)
    told="{{\\"ask\\": \\"notice\\", \\"left\\": \\"$left\\", \\"reason\\": \\"{reason}\\"}}"
    nodes=${{nodes:-$SLURM_JOB_NODELIST}}
    count=$(scontrol show hostnames "$nodes" | wc -l)
    srun {step} --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$nodes" \\
        sh -c "$start" sh "$relay" keeper "$told" &
}}

trap warn USR1
# The keepers get this signal, too, and need a moment.
trap : TERM
# TMPDIR may name a folder that only the login node has. Without a name, the file leaves nothing.
if words=$(mktemp /tmp/sky.XXXXXX 2>/dev/null); then
    exec 3<>"$words"
    rm -f "$words"
else
    exec 3>/dev/null
fi
srun {launch} sh -c "$start" sh "$keeper" {config} 2>&3 &
keepers=$!
status=0
while :; do
    wait "$keepers"
    status=$?
    kill -0 "$keepers" 2>/dev/null || break
done
if [ "$status" != 0 ] && [ -s /proc/self/fd/3 ]; then
    # The client reads why, where it cannot read a file of this node.
    scontrol update JobId="$SLURM_JOB_ID" Comment="$(tail -c 400 /proc/self/fd/3 | tr '\\n|' '  ')"
fi
exit "$status"
"""


def batch_script(config: dict[str, object], launch: Sequence[str], step: Sequence[str]) -> bytes:
    """The script; `launch` has the options of the keepers' step, `step` those of later ones."""
    text = _SCRIPT.format(
        start=shlex.quote(_START),
        relay=shlex.quote(program("relay")),
        keeper=shlex.quote(program("keeper")),
        reason="Slurm ends the job: its time limit, or a preemption",
        launch=shlex.join(launch),
        step=shlex.join(step),
        config=shlex.quote(json.dumps(config)),
    )
    return text.encode()


def relay_command(*arguments: str) -> list[str]:
    """The command of a step that is a relay."""
    return ["sh", "-c", _START, "sh", program("relay"), *arguments]
