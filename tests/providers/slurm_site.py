"""Executables with the names of Slurm's: a site that says what a test wants it to say."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from skyward.providers import Request
from skyward.spec import Image

WAITING = "42|PENDING|Priority|gpu|2:00:00|N/A||skyward:0-1\n"
RUNNING = "42|RUNNING|None|gpu|1-01:59:59|2026-11-17T02:31:27|n[1-2]|skyward:0-1\n"


def request(**changed: Any) -> Request:
    """A request for a machine, as a pool makes it."""
    given: dict[str, Any] = {
        "accelerator": None,
        "vcpus": None,
        "memory_gb": None,
        "image": Image(),
        "volumes": (),
    }
    return Request(**{**given, **changed})


class Site:
    """Executables with the names of Slurm's, which write down how they were called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        self.answers("sinfo", "slurm 23.11.4")
        self.answers("sbatch", "42")
        self.answers("squeue", RUNNING.strip())
        for name in ("srun", "scontrol", "scancel"):
            self.answers(name, "")

    def answers(self, name: str, output: str, *, error: str = "", status: int = 0) -> None:
        """Have an executable say this."""
        program = self.folder / name
        lines = [
            "#!/bin/sh",
            f'cat >"{self.folder}/{name}.input"' if name == "sbatch" else "",
            # In one piece, because several may run at the same time.
            f'call=$(printf "%s" {name}; for each in "$@"; do printf "\\t%s" "$each"; done)',
            f'call=$(printf "%s" "$call" | tr "\\n" " "); printf "%s\\n" "$call" >>"{self._calls}"',
            f"printf '%s\\n' {shlex.quote(output)}",
            f"printf '%s\\n' {shlex.quote(error)} >&2" if error else "",
            f"exit {status}",
        ]
        program.write_text("\n".join(lines) + "\n")
        program.chmod(0o755)

    def changes(self, name: str, other: str, output: str) -> None:
        """Have the call of an executable change what another one says from then on."""
        now = (self.folder / other).read_text()
        self.answers(other, output)
        (self.folder / other).rename(self.folder / f"{other}.next")
        (self.folder / other).write_text(now)
        (self.folder / other).chmod(0o755)
        with (self.folder / name).open("r+") as program:
            lines = program.read().splitlines()
            program.seek(0)
            move = f'mv "{self.folder}/{other}.next" "{self.folder}/{other}" 2>/dev/null'
            program.write("\n".join([*lines[:-1], move, *lines[-1:]]) + "\n")

    def fails_first(self, name: str, times: int, error: str, unless: str = "") -> None:
        """Have an executable fail some times before it says what it says."""
        program = self.folder / name
        first, rest = program.read_text().split("\n", 1)
        count = f"{self.folder}/{name}.failures"
        fail = (
            f'case "$*" in {unless or "never"}) ;; *) '
            f'echo x >>"{count}"; if [ "$(wc -l <"{count}")" -le {times} ]; then '
            f"echo {shlex.quote(error)} >&2; exit 1; fi ;; esac"
        )
        program.write_text(f"{first}\n{fail}\n{rest}")

    def passes_tests(self) -> None:
        """Have `sbatch` accept what is only a test, and say to all else what it says."""
        program = self.folder / "sbatch"
        first, rest = program.read_text().split("\n", 1)
        program.write_text(f'{first}\ncase "$*" in *--test-only*) exit 0 ;; esac\n{rest}')

    def refuses_tests(self, error: str) -> None:
        """Have `sbatch` refuse what is only a test."""
        program = self.folder / "sbatch"
        refusal = f"*--test-only*) echo {shlex.quote(error)} >&2; exit 1 ;;"
        first, rest = program.read_text().split("\n", 1)
        program.write_text(f'{first}\ncase "$*" in {refusal} esac\n{rest}')

    def calls(self, name: str) -> list[list[str]]:
        """How an executable was called: the arguments of each time."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        found = [line.strip().split("\t") for line in lines]
        return [each[1:] for each in found if each[0] == name]

    def script(self) -> str:
        """The script that `sbatch` got."""
        return (self.folder / "sbatch.input").read_text()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)
