"""The project on nodes: a sync after small changes, against rsync over the same loopback."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import interleave, timed
from report import Row, absent, absolute, compared, run_suite

import skyward as sky

CHANGED = 3
START_SECONDS = 10.0


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    files: int


FULL = Size(rounds=9, files=2000)
QUICK = Size(rounds=2, files=200)


@contextlib.contextmanager
def project(files: int) -> Iterator[Path]:
    """A repository of that many files, 8 KB each, that did not change lately."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "project"
        for number in range(files):
            path = root / f"package{number % 40}" / f"module{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(4096).hex().encode())
            os.utime(path, (1, 1))
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        yield root


@contextlib.contextmanager
def rsync_server(program: str, folder: Path) -> Iterator[str]:
    """An rsync daemon on the loopback that serves one folder; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = folder.parent / "rsyncd.conf"
    settings.write_text(
        f"use chroot = no\nport = {port}\naddress = 127.0.0.1\n"
        f"[there]\npath = {folder}\nread only = no\nuid = {os.getuid()}\ngid = {os.getgid()}\n"
    )
    command = [program, "--daemon", "--no-detach", f"--config={settings}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError("rsync's daemon does not listen")
                time.sleep(0.02)
            yield f"rsync://127.0.0.1:{port}/there/"
        finally:
            server.terminate()


def syncs(size: Size) -> Sequence[Row]:
    """A sync after three files have changed, and one after none has."""
    rsync = shutil.which("rsync")
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(project(size.files))
        there = root.parent / "there"
        there.mkdir()
        compute = stack.enter_context(
            sky.Compute(
                sky.Local(transport="tcp"),
                project=str(root),
                options=sky.Options(console=False),
            )
        )

        def change() -> None:
            for number in range(CHANGED):
                path = root / f"package{number}" / f"module{number}.py"
                path.write_text(f"value = {next(numbers)}\n" * 400)

        def after(action: Callable[[], object], changes: bool) -> float:
            if changes:
                change()
            else:
                # The other contender has changed files since the last time.
                action()
            return timed(action)

        measured: dict[str, Callable[[], float]] = {
            "changed": lambda: after(compute.sync, True),
            "unchanged": lambda: after(compute.sync, False),
        }
        if rsync is not None:
            url = stack.enter_context(rsync_server(rsync, there))
            command = [rsync, "-a", "--delete", "--exclude=.git", f"{root}/", url]

            def synced() -> None:
                subprocess.run(command, check=True, capture_output=True)

            synced()
            measured["rsync"] = lambda: after(synced, True)
            measured["rsync, unchanged"] = lambda: after(synced, False)
        samples = interleave(measured, rounds=size.rounds)
    label = f"sync of a project of {size.files:,} files"
    if rsync is None:
        return [absent(label, "rsync", "apt-get install rsync", samples["changed"])]
    return [
        absolute(f"{label}, {CHANGED} changed", samples["changed"], "< 2 s", 2.0),
        compared(
            f"{label}, {CHANGED} changed",
            samples["changed"],
            "rsync -a --delete, its daemon on the loopback",
            samples["rsync"],
            "<= 1.5x",
        ),
        compared(
            f"{label}, none changed",
            samples["unchanged"],
            "the same",
            samples["rsync, unchanged"],
            "<= 1.5x",
        ),
    ]


if __name__ == "__main__":
    run_suite("files on nodes", [syncs], full=FULL, quick=QUICK)
