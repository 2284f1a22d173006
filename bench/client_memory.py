"""The peak memory of a client that moves one large tensor, watched from outside.

As a program it is that client: it says where it is on stdout and waits for a line on stdin.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

SAMPLE_SECONDS = 0.001
SHARED_MEMORY = ("/memfd:", "/dev/shm/")


def peak_memory(direction: str, transport: str, size: int, times: int) -> int:
    """Bytes held at most beyond what the client held before it had a pool.

    The tensor is moved several times, one after the other and new on every page each time.

    Shared memory counts in full if the client has it open or mapped, whoever made it: what it
    only writes to, with `pwrite`, is in no resident set.
    """
    client = subprocess.Popen(
        [sys.executable, __file__, direction, transport, str(size), str(times)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    try:
        _expect(client.stdout.readline(), "holds the tensor")
        baseline = _held(client.pid)
        peak = baseline
        moved = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not moved.is_set():
                peak = max(peak, _held(client.pid))
                time.sleep(SAMPLE_SECONDS)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            print("go", file=client.stdin, flush=True)
            answer = client.stdout.readline()
        finally:
            moved.set()
            watcher.join()
        _expect(answer, "moved")
        resident = int(answer.split()[1])
        return max(peak - baseline, resident)
    finally:
        client.stdin.close()
        client.wait(timeout=60)


def _expect(answer: str, start: str) -> None:
    if not answer.startswith(start):
        raise RuntimeError(f"the client whose memory is watched said {answer!r}, not {start!r}")


def _held(pid: int) -> int:
    own = _fields(Path(f"/proc/{pid}/status"))
    return own["RssAnon"] + own["RssFile"] + _shared(pid)


def _shared(pid: int) -> int:
    """Bytes of the shared-memory files that a process has open or mapped."""
    files: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(SHARED_MEMORY):
            start, end = (int(edge, 16) for edge in words[0].split("-"))
            files[int(words[4])] = files.get(int(words[4]), 0) + end - start
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # Closed between the listing and now.
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(descriptor).startswith(SHARED_MEMORY):
                found = descriptor.stat()
                files[found.st_ino] = found.st_blocks * 512
    return sum(files.values())


def _fields(path: Path) -> dict[str, int]:
    """The lines of a /proc file that are sizes, in bytes."""
    sizes = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if words[-1] == "kB":
            sizes[words[0].rstrip(":")] = int(words[1]) * 1024
    return sizes


def _client(direction: str, transport: str, size: int, times: int) -> None:
    import torch

    import skyward as sky

    @sky.function
    def read_pages(floats: torch.Tensor) -> float:
        return float(floats[::1024].sum())

    @sky.function
    def new_result(count: int) -> torch.Tensor:
        import torch

        return torch.rand(count)

    own = Path("/proc/self/status")
    tensor = torch.rand(size // 4 if direction == "argument" else 1024)
    before = _fields(own)["VmRSS"]
    print("holds the tensor", flush=True)
    input()
    # "5" resets the high-water mark of the resident set.
    Path("/proc/self/clear_refs").write_text("5")
    provider = sky.Local() if transport == "auto" else sky.Local(transport=transport)
    with sky.Compute(provider, options=sky.Options(console=False)) as compute:
        for _ in range(times):
            if direction == "argument":
                tensor[::1024] += 1
                read_pages(tensor) >> compute
            else:
                new_result(size // 4) >> compute
        print("moved", _fields(own)["VmHWM"] - before, flush=True)


if __name__ == "__main__":
    _client(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
