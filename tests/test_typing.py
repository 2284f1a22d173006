"""The expectations of types, which `make check` reads, notice a wrong type."""

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
def test_the_check_notices_a_wrong_type(tmp_path: Path) -> None:
    """Slow: a cold mypy reads the standard library's stubs first.

    Without this test a surface of `Any` would pass every expectation.
    """
    right = "assert_type(train(model, 3) >> compute, Model)"
    assert right in EXPECTED.read_text()
    source = EXPECTED.read_text().replace(right, right.replace("Model", "int"))
    broken = tmp_path / "operators.py"
    broken.write_text(source)

    done = mypy(broken)

    assert done.returncode == 1
    assert 'Expression is of type "Model", not "int"' in done.stdout
