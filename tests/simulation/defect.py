"""Old defects, put back one by one: how many seeds it takes to find each of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .runner import FOUND

PATCHES = Path(__file__).with_name("defects")
ROOT = Path(__file__).parents[2]


def names() -> list[str]:
    """The defects that there are."""
    return sorted(each.stem for each in PATCHES.glob("*.patch"))


def copy_sources(folder: Path) -> Path:
    """Copy the sources into a folder; the path of the copy."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "csrc")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    return folder / "src"


def put_back(name: str, folder: Path, *options: str) -> None:
    """Put a defect back into the copy in a folder; with "--check", only see whether it can be."""
    patch = PATCHES / f"{name}.patch"
    command = ["git", "apply", *options, str(patch)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{patch.name} does not apply: make it anew ({done.stderr.strip()})")


def find(name: str, arguments: list[str]) -> int:
    """Run seeds with a defect until one fails; 0 if one has, and nothing else went wrong first."""
    if name == "all":
        return max([find(each, arguments) for each in names()])
    if name not in names():
        sys.exit(f"there is no defect {name!r}; there are: all, {', '.join(names())}")
    with tempfile.TemporaryDirectory() as folder:
        sources = copy_sources(Path(folder))
        put_back(name, Path(folder))
        print(f"{name}: {(PATCHES / f'{name}.patch').read_text().splitlines()[0]}", flush=True)
        command = [sys.executable, "-m", "tests.simulation", "--until-failure", *arguments]
        environment = os.environ | {"PYTHONPATH": str(sources)}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code not in (0, FOUND):
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        print(f"{name}: nothing is known: the seeds ended with {how}, as told above", flush=True)
    return 0 if code == FOUND else 1
