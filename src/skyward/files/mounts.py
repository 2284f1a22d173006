"""Mounts: buckets and file servers at a path of the node, with the programs that the node has."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

MOUNT_SECONDS = 30.0
UNMOUNT_SECONDS = 30.0
LOOK_SECONDS = 0.05
FUSE = "/dev/fuse"
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""The packages that fsspec needs for a scheme."""


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """A bucket, or a server's folder, as mounting programs want it."""

    scheme: str
    host: str
    """The bucket, or the server."""
    path: str
    """The path in it, without slashes at its ends."""

    @classmethod
    def of(cls, url: str) -> BucketPlace:
        """Read a URL."""
        parts = urlsplit(url)
        return cls(parts.scheme, parts.netloc, parts.path.strip("/"))


def _mount_s3(place: BucketPlace, at: str, read_only: bool) -> list[str]:
    command = ["mount-s3", place.host, at, "--foreground"]
    command += ["--prefix", f"{place.path}/"] if place.path else []
    return command + (["--read-only"] if read_only else ["--allow-delete", "--allow-overwrite"])


def _s3fs(place: BucketPlace, at: str, read_only: bool) -> list[str]:
    source = f"{place.host}:/{place.path}" if place.path else place.host
    return ["s3fs", source, at, "-f", "-o", "ro" if read_only else "rw"]


def _gcsfuse(place: BucketPlace, at: str, read_only: bool) -> list[str]:
    command = ["gcsfuse", "--foreground", "--implicit-dirs", "-o", "ro" if read_only else "rw"]
    return [*command, *(["--only-dir", place.path] if place.path else []), place.host, at]


def _rclone(place: BucketPlace, at: str, read_only: bool) -> list[str]:
    remote = {"s3": ":s3,env_auth", "gs": ":gcs,env_auth", "gcs": ":gcs,env_auth"}[place.scheme]
    command = ["rclone", "mount", f"{remote}:{place.host}/{place.path}", at]
    return command + (["--read-only"] if read_only else ["--vfs-cache-mode", "writes"])


Writer = Callable[[BucketPlace, str, bool], list[str]]

PROGRAMS: dict[str, tuple[Writer, ...]] = {
    "s3": (_mount_s3, _s3fs, _rclone),
    "gs": (_gcsfuse, _rclone),
    "gcs": (_gcsfuse, _rclone),
}
"""The programs that mount a scheme, the best first; each stays in the foreground."""


class Mount:
    """A file system that is mounted; a program of this node's serves it, unless it is NFS."""

    def __init__(self, at: Path, program: str, process: subprocess.Popen[bytes] | None) -> None:
        self.at, self.program, self._process = at, program, process

    def unmount(self) -> None:
        """Take the file system away; what was written to it is in the bucket afterwards."""
        for command in (["fusermount3", "-u"], ["fusermount", "-u"], ["umount"]):
            if not os.path.ismount(self.at):
                break
            if shutil.which(command[0]) is not None:
                _run([*command, str(self.at)], UNMOUNT_SECONDS)
        if self._process is not None:
            end(self._process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Have a program end, after it has written what it holds."""
    process.terminate()
    try:
        process.wait(UNMOUNT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def mount(url: str, at: Path, *, read_only: bool) -> tuple[Mount | None, list[str]]:
    """Mount a URL with the first program that can; otherwise None, and why each could not."""
    place = BucketPlace.of(url)
    if place.scheme == "nfs":
        return _mount_nfs(place, at, read_only)
    reasons: list[str] = []
    for write in PROGRAMS.get(place.scheme, ()):
        command = write(place, str(at), read_only)
        if shutil.which(command[0]) is None:
            continue
        if not os.path.exists(FUSE):
            reasons.append(f"{command[0]} needs {FUSE}, which the node does not have")
            continue
        mounted, reason = _serve(command, at)
        if mounted is not None:
            return mounted, []
        reasons.append(f"{command[0]}: {reason}")
    return None, reasons


def _mount_nfs(place: BucketPlace, at: Path, read_only: bool) -> tuple[Mount | None, list[str]]:
    if shutil.which("mount.nfs") is None:
        return None, ["the node has no mount.nfs; install it with Image(apt=['nfs-common'])"]
    options = "ro" if read_only else "rw"
    command = ["mount", "-t", "nfs", "-o", options, f"{place.host}:/{place.path}", str(at)]
    status, said = _run(command, MOUNT_SECONDS)
    if status is None:
        return None, [
            f"the server {place.host} did not answer in {MOUNT_SECONDS:g} s; check its name, and "
            "that the node can reach it"
        ]
    if status:
        return None, [f"mount: {said}"]
    return Mount(at, "mount.nfs", None), []


def _run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Run a program to its end: its status, None if it takes too long, and its last line."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            return process.wait(seconds), _last_line(said)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.returncode is None:
                # With those that it has started, such as mount.nfs.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _serve(command: list[str], at: Path) -> tuple[Mount | None, str]:
    # A file: nobody reads what the program says later, and a pipe that is full would stop it.
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
        )
        deadline = time.monotonic() + MOUNT_SECONDS
        while not os.path.ismount(at):
            if process.poll() is not None:
                return None, _last_line(said) or f"it ended with status {process.returncode}"
            if time.monotonic() > deadline:
                end(process)
                return None, f"it mounted nothing within {MOUNT_SECONDS:g} s"
            time.sleep(LOOK_SECONDS)
    return Mount(at, command[0], process), ""


def _last_line(said: IO[bytes]) -> str:
    said.seek(0)
    text = said.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""
