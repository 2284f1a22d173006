"""The operators keep their types, as a strict type checker sees them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXPECTED = ROOT / "tests" / "typing" / "operators.py"


def mypy(target: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    config = ROOT / "pyproject.toml"
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(config), str(target)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_operators_have_the_types_the_file_expects() -> None:
    """Slow: a cold mypy reads the standard library's stubs first."""
    done = mypy(EXPECTED)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_check_notices_a_wrong_type(tmp_path: Path) -> None:
    """Slow as above; without it, a surface of `Any` would pass every expectation."""
    source = EXPECTED.read_text().replace(
        "assert_type(train(model, 3) >> compute, Model)",
        "assert_type(train(model, 3) >> compute, int)",
    )
    broken = tmp_path / "operators.py"
    broken.write_text(source)

    done = mypy(broken)

    assert done.returncode == 1
    assert 'Expression is of type "Model", not "int"' in done.stdout
