"""`sky demo`: the round trip of a model, also from a wheel in a fresh environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from skyward.bootstrap import wheel

from ..conftest import only_in_all

SECONDS = 250


def test_a_model_learns_on_a_worker_and_comes_back(run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "skyward.toml").write_text("[pools.here]\nprovider = 'local'")
    monkeypatch.chdir(tmp_path)

    assert run("demo", "--pool", "nosuch", code=1).stdout == ""
    told = run("demo", "--pool", "here").stdout.splitlines()

    assert "A new model of 34,186 parameters reads" in told[0]
    assert "node 0] epoch 5/5: loss" in told[-3]
    assert float(told[-2].rpartition("reads ")[2].removesuffix(" %.")) > 90


@only_in_all
def test_an_installed_wheel_needs_no_checkout(tmp_path: Path) -> None:
    """A fresh environment, which borrows only what wheels of others bring, torch above all."""
    made = wheel.own_wheel()
    (tmp_path / made.name).write_bytes(made.data)
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = [str(python), "-m", "pip", "-q", "install", "--no-deps", "--no-index"]
    subprocess.run([*install, str(tmp_path / made.name)], check=True, timeout=SECONDS)
    # Appended, so that the wheel's own skyward comes first.
    own = next((home / "lib").glob("python*/site-packages"))
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (own / "numpy.py").write_text("raise ModuleNotFoundError('not here')\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SKYWARD"))}

    def sky(*args: str) -> str:
        done = subprocess.run(
            [home / "bin" / "sky", *args],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr
        assert "NumPy" not in done.stderr, "torch's warning, which helps nobody here"
        return done.stdout

    told = sky("demo")

    assert f"The program is {own.resolve()}" in told
    assert str(Path(sys.prefix).resolve()) not in told
    assert '"ok": true' in sky("doctor", "--json")
