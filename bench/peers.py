"""Ray and Dask, each in a process of its own that runs from an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from types import TracebackType
from typing import Any

from measure import say

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent / ".bench-venv"
REQUIREMENTS = {"ray": ["ray"], "dask": ["dask", "distributed"]}


class NotInstalled(Exception):
    """A peer cannot be had on this machine; the message says why."""


def install(peer: str) -> Path:
    """The Python that has this peer, installed now if need be."""
    python = ENVIRONMENT / "bin" / "python"
    wanted = REQUIREMENTS[peer]
    if not python.exists():
        say(f"creating {ENVIRONMENT.name} for ray and dask")
        venv.create(ENVIRONMENT, with_pip=True)
        (ENVIRONMENT / ".gitignore").write_text("*\n")
    importable = [python, "-c", f"import {', '.join(wanted)}"]
    if subprocess.run(importable, capture_output=True).returncode == 0:
        return python
    say(f"installing {' and '.join(wanted)} in {ENVIRONMENT.name}")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *wanted]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled(errors[-1].removeprefix("ERROR: ") if errors else "pip failed")
    return python


class Peer:
    """A running peer that measures itself on request."""

    def __init__(self, name: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in __exit__
        self._process = subprocess.Popen(
            # -P: this folder has a ray.py of its own.
            [install(name), "-P", HERE / "peer_server.py", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.name = name
        self.version: str = self._answer()["ready"]

    @property
    def label(self) -> str:
        return f"{self.name.capitalize()} {self.version}"

    def noop(self, calls: int) -> float:
        """Seconds of one call, the p50 of `calls`."""
        return self._ask(do="noop", calls=calls)

    def tiny(self, tasks: int) -> float:
        """Seconds that `tasks` small tasks take together."""
        return self._ask(do="tiny", tasks=tasks)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, **request: object) -> float:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            print(self._log.read(), file=sys.stderr)
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; its log is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def running_peers(stack: Any) -> tuple[dict[str, Peer], dict[str, str]]:
    """Every peer that could be started, entered on `stack`, and why each other one could not."""
    running: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in REQUIREMENTS:
        try:
            running[name] = stack.enter_context(Peer(name))
        except (NotInstalled, RuntimeError) as error:
            missing[name] = str(error)
    return running, missing
