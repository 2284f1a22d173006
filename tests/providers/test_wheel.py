"""The wheel of this install: whole, installable and always the same."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import skyward
from skyward.bootstrap import wheel
from skyward.errors import ImageError


def members(made: wheel.Wheel) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(made.data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_it_holds_both_packages_with_their_sources_and_no_caches() -> None:
    inside = members(wheel.own_wheel())
    home = Path(skyward.__file__).parent
    assert inside["skyward/__init__.py"] == (home / "__init__.py").read_bytes()
    assert {"skyward/py.typed", "skytorch/__init__.py"} <= inside.keys()
    assert any(name.startswith("skyward/device/csrc/") for name in inside)
    assert not [name for name in inside if "__pycache__" in name or name.endswith((".pyc", ".so"))]


def test_its_metadata_names_what_skyward_requires() -> None:
    made = wheel.own_wheel()
    version = metadata.version("skyward-torch")
    assert version == skyward.__version__, "pyproject.toml and the code say the same"
    text = members(made)[f"skyward_torch-{version}.dist-info/METADATA"].decode()
    for requirement in metadata.requires("skyward-torch") or ():
        assert f"Requires-Dist: {requirement}\n" in text
    assert made.name == f"skyward_torch-{version}-py3-none-any.whl"


def test_every_hint_names_the_distribution() -> None:
    """`skyward[aws]` would be an extra of another project."""
    home = Path(skyward.__file__).parents[2]
    files = [*home.glob("src/**/*.py"), *home.glob("docs/**/*.md"), *home.glob("*.md")]
    wrong = re.compile(r"(?<![\w-])skyward\[[a-z]|pip install skyward\b(?!-torch)")
    assert not [str(file) for file in files if wrong.search(file.read_text())]


def test_its_record_lists_every_file_with_its_hash() -> None:
    inside = members(wheel.own_wheel())
    record = next(name for name in inside if name.endswith("/RECORD"))
    rows = list(csv.reader(inside[record].decode().splitlines()))
    assert {row[0] for row in rows} == inside.keys()
    for name, digest, size in rows:
        if name == record:
            continue
        expected = base64.urlsafe_b64encode(hashlib.sha256(inside[name]).digest()).rstrip(b"=")
        assert digest == f"sha256={expected.decode()}"
        assert int(size) == len(inside[name])


def test_the_same_code_gives_the_same_bytes() -> None:
    first = wheel.own_wheel()
    wheel.own_wheel.cache_clear()
    assert wheel.own_wheel() == first
    assert hashlib.sha256(first.data).hexdigest().startswith(first.digest)


def test_what_it_holds_can_be_imported_from_it_alone(tmp_path: Path) -> None:
    """Made of this source tree, whether it is installed in the interpreter or not."""
    with zipfile.ZipFile(io.BytesIO(wheel.own_wheel().data)) as archive:
        archive.extractall(tmp_path)
    code = "import skyward.worker.agent, skytorch, importlib.metadata as m\n"
    code += "print(skyward.__file__, skyward.__path__, m.version('skyward-torch'))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(str(tmp_path))


def test_a_skyward_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    wheel.own_wheel.cache_clear()
    with pytest.raises(ImageError, match="pip install -e"):
        wheel.own_wheel()


def test_it_is_the_same_for_machines_of_every_kind() -> None:
    """Compiled parts are left here and made there, so that an arm64 laptop serves x86 hosts."""
    made = wheel.own_wheel()
    inside = members(made)
    text = inside[next(name for name in inside if name.endswith(".dist-info/WHEEL"))].decode()
    assert "Root-Is-Purelib: true" in text
    assert "Tag: py3-none-any" in text
    assert not [name for name, data in inside.items() if data[:4] == b"\x7fELF"]
