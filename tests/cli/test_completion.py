"""`sky completion`: what a shell completes, and what that imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "numpy", "rich", "asyncio", "msgspec", "cryptography", "skyward.cli.models"}


def completed(line: str, folder: Path) -> tuple[list[str], set[str]]:
    """What `sky` answers a shell for a line that ends at the cursor, and what it imports."""
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('imported', *sys.modules))\n"
        "sys.argv = ['sky']\n"
        "from skyward.cli.main import main; main()"
    )
    words = line.split(" ")
    asked = {
        "_SKY_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
    )
    assert done.stderr == ""
    answer, _, modules = done.stdout.partition("imported ")
    return [each.partition(",")[2] for each in answer.split()], set(modules.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sky do", ["down", "doctor"]),
        ("sky models pu", ["pull", "push"]),
        ("sky gc --dry", ["--dry-run"]),
        ("sky doctor kub", ["kubernetes"]),
        ("sky offers h1", ["H100"]),
        ("sky demo --pool tr", ["train", "try"]),
        ("sky completion f", ["fish"]),
    ],
)
def test_commands_options_and_names_are_completed(
    tmp_path: Path, line: str, expected: list[str]
) -> None:
    (tmp_path / "skyward.toml").write_text("[pools.train]\n[pools.try]\n[pools.other]")

    assert completed(line, tmp_path)[0] == expected


def test_a_list_of_all_commands_imports_none_of_them(tmp_path: Path) -> None:
    names, modules = completed("sky ", tmp_path)

    assert {"ps", "doctor", "models"} <= set(names)
    assert modules.isdisjoint(HEAVY)


def test_settings_that_cannot_be_read_complete_nothing_and_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "skyward.toml").write_text("[pools")

    assert completed("sky demo --pool t", tmp_path)[0] == []


def test_bash_completes_with_the_script() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = (
        'eval "$(sky completion bash)"; COMP_WORDS=(sky do); COMP_CWORD=1; COMP_TYPE=9; '
        '_sky_completion sky; echo "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    done = subprocess.run(
        [bash, "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )

    assert done.stdout == "down doctor\n", done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_can_read_its_script(run, run_json, shell: str) -> None:
    script = run("completion", shell).stdout
    assert "_SKY_COMPLETE" in script
    assert run_json("completion", shell)["script"].strip() == script.strip()
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_another_shell_is_refused_with_those_there_are(run) -> None:
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in run("completion", "tcsh", code=2).stderr
