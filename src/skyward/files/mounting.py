"""Mounting: buckets and file servers at a path of the node, with the programs that the node has."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

MOUNT_SECONDS = 30.0
UNMOUNT_SECONDS = 30.0
LOOK_SECONDS = 0.05
FUSE = "/dev/fuse"


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

    def __init__(self, at: Path, program: str, process: subprocess.Popen[str] | None) -> None:
        self.at, self.program, self._process = at, program, process

    def unmount(self) -> None:
        """Take the file system away; what was written to it is in the bucket afterwards."""
        for command in (["fusermount3", "-u"], ["fusermount", "-u"], ["umount"]):
            if not os.path.ismount(self.at):
                break
            if shutil.which(command[0]) is not None:
                subprocess.run(
                    [*command, str(self.at)],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=UNMOUNT_SECONDS,
                )
        if self._process is not None:
            end(self._process)


def end(process: subprocess.Popen[str]) -> None:
    """Have a program end, after it has written what it holds."""
    process.terminate()
    try:
        process.wait(UNMOUNT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stderr is not None:
        process.stderr.close()


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
    done = subprocess.run(
        [
            *("mount", "-t", "nfs", "-o", "ro" if read_only else "rw"),
            *(f"{place.host}:/{place.path}", str(at)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MOUNT_SECONDS,
    )
    if done.returncode:
        return None, [f"mount: {_last_line(done.stderr)}"]
    return Mount(at, "mount.nfs", None), []


def _serve(command: list[str], at: Path) -> tuple[Mount | None, str]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + MOUNT_SECONDS
    while not os.path.ismount(at):
        if process.poll() is not None:
            said = _last_line(process.stderr.read() if process.stderr else "")
            end(process)
            return None, said or f"it ended with status {process.returncode}"
        if time.monotonic() > deadline:
            end(process)
            return None, f"it mounted nothing within {MOUNT_SECONDS:g} s"
        time.sleep(LOOK_SECONDS)
    return Mount(at, command[0], process), ""


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""
