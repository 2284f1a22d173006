"""What travels as a node's own files, and what does not."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from skyward.errors import ImageError
from skyward.files import includes


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(*paths: Path, text: str = "x") -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(bundle: includes.Bundle) -> set[str]:
    return {entry.name for entry in bundle.entries if entry.kind != tarfile.DIRTYPE}


def unpacked(bundle: includes.Bundle, folder: Path) -> Path:
    data, digest = bundle.archive()
    assert digest == bundle.digest
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        # Pythons before 3.11.4 have no filters.
        tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        tar.extractall(folder)
    return folder


def test_paths_below_the_working_directory_keep_their_place(here: Path, tmp_path: Path) -> None:
    write(here / "src/mine/a.py", here / "data.csv", tmp_path / "lib/tools.py")
    bundle = includes.find(["src/mine", "./data.csv", "../lib"])
    assert names(bundle) == {"src/mine/a.py", "data.csv", "lib/tools.py"}
    there = unpacked(bundle, tmp_path / "there")
    assert (there / "src/mine/a.py").read_text() == "x"
    assert (there / "lib/tools.py").is_file()


def test_the_working_directory_itself_can_be_included(here: Path) -> None:
    write(here / "a.py", here / "sub/b.py")
    assert names(includes.find(["."])) == {"a.py", "sub/b.py"}


def test_caches_environments_and_build_outputs_stay_here(here: Path) -> None:
    for unwanted in (".git", ".venv", "node_modules", "__pycache__", ".mypy_cache", "build"):
        write(here / "app" / unwanted / "x.py")
    write(here / "app/a.pyc", here / "app/pyproject.toml", here / "app/a.py")
    write(here / "app/inner/build/kept.py")
    assert names(includes.find(["app"])) == {
        "app/a.py",
        "app/pyproject.toml",
        "app/inner/build/kept.py",
    }


def test_what_is_named_outright_is_sent_whatever_it_is_called(here: Path) -> None:
    write(here / "build/a.py")
    assert names(includes.find(["build"])) == {"build/a.py"}


@pytest.mark.parametrize(
    ("pattern", "gone"),
    [
        ("*.bin", {"app/a.bin", "app/deep/b.bin"}),
        ("app/deep", {"app/deep/b.bin", "app/deep/c.py"}),
        ("deep/", {"app/deep/b.bin", "app/deep/c.py"}),
        ("**/c.py", {"app/deep/c.py"}),
        ("deep/*.py", {"app/deep/c.py"}),
        ("app/deep/**", {"app/deep/b.bin", "app/deep/c.py"}),
    ],
)
def test_excludes_are_globs_of_names_or_paths(here: Path, pattern: str, gone: set[str]) -> None:
    everything = {"app/a.bin", "app/a.py", "app/deep/b.bin", "app/deep/c.py"}
    write(*(here / name for name in everything))
    assert names(includes.find(["app"], [pattern])) == everything - gone


def test_a_missing_path_is_an_error_that_says_where_it_looked(here: Path) -> None:
    with pytest.raises(ImageError, match=r"includes=\['nowhere'\].*there is no .*project"):
        includes.find(["nowhere"])


def test_links_inside_stay_links(here: Path, tmp_path: Path) -> None:
    write(here / "app/real/a.py")
    (here / "app/link").symlink_to(here / "app/real")
    there = unpacked(includes.find(["app"]), tmp_path / "there")
    assert os.readlink(there / "app/link") == "real"
    assert (there / "app/link/a.py").is_file()


def test_links_that_lead_outside_are_refused_unless_left_out(here: Path) -> None:
    write(here / "app/a.py")
    (here / "app/secrets").symlink_to("/etc")
    with pytest.raises(ImageError, match=r"link to '/etc', outside.*excludes=\['secrets'\]"):
        includes.find(["app"])
    assert names(includes.find(["app"], ["secrets"])) == {"app/a.py"}


def test_links_that_lead_to_themselves_are_refused_unless_left_out(here: Path) -> None:
    write(here / "app/a.py")
    (here / "app/loop").symlink_to("loop")
    with pytest.raises(ImageError, match=r"link to 'loop', .*nowhere.*excludes=\['loop'\]"):
        includes.find(["app"])
    assert names(includes.find(["app"], ["loop"])) == {"app/a.py"}
    with pytest.raises(ImageError, match=r"there is no .*loop"):
        includes.find(["app/loop"])


def test_a_link_to_a_folder_above_it_is_not_followed(here: Path, tmp_path: Path) -> None:
    write(here / "app/deep/a.py")
    (here / "app/deep/up").symlink_to("..")
    there = unpacked(includes.find(["app"]), tmp_path / "there")
    assert os.readlink(there / "app/deep/up") == ".."


def test_a_file_that_vanishes_meanwhile_is_not_missed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here / "app/a.py")
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*listed(path), "gone.tmp"])
    assert names(includes.find(["app"])) == {"app/a.py"}


def test_a_file_that_is_cut_off_while_it_is_read_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here / "app/log.txt", text="x" * 100)
    bundle = includes.find(["app"])
    monkeypatch.setattr(includes._Reading, "read", lambda self, size=-1: b"")
    with pytest.raises(ImageError, match=r"log\.txt was cut off.*excludes=\['log\.txt'\]"):
        bundle.archive()


def test_names_may_hold_anything_a_file_system_takes(here: Path, tmp_path: Path) -> None:
    odd = ["with space", "it's", 'a "quote"', "$HOME", "-rf", "zeile\nzwei", "größe", "*"]
    write(*(here / "app" / name for name in odd))
    there = unpacked(includes.find(["app"]), tmp_path / "there")
    assert sorted(os.listdir(there / "app")) == sorted(odd)


def test_an_include_that_is_a_link_brings_what_it_leads_to(here: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere/a.csv")
    (here / "data").symlink_to(tmp_path / "elsewhere")
    assert names(includes.find(["data"])) == {"data/a.csv"}


def test_two_paths_that_would_be_one_on_the_node_are_refused(here: Path, tmp_path: Path) -> None:
    write(tmp_path / "one/lib/a.py", tmp_path / "two/lib/a.py")
    with pytest.raises(ImageError, match=r"both would be 'lib/a\.py'"):
        includes.find(["../one/lib", "../two/lib"])


def test_the_same_files_give_the_same_bytes_at_any_time(here: Path) -> None:
    write(here / "app/a.py", here / "app/b.py")
    first = includes.find(["app"]).archive()
    os.utime(here / "app/a.py", (1, 1))
    assert includes.find(["app"]).archive() == first
    write(here / "app/b.py", text="y")
    assert includes.find(["app"]).digest != first[1]


def test_a_file_that_changed_and_kept_its_length_is_read_again(here: Path) -> None:
    write(here / "app/a.py", text="x = 1")
    before = includes.find(["app"]).digest
    write(here / "app/a.py", text="x = 2")
    # A second write within the clock's resolution would leave the time as it was.
    os.utime(here / "app/a.py", (1, 1))
    assert includes.find(["app"]).digest != before


def test_files_keep_their_modes(here: Path, tmp_path: Path) -> None:
    modes = {"run.sh": 0o750, "key.pem": 0o600, "fixed.txt": 0o444, "note.txt": 0o664}
    for name, mode in modes.items():
        write(here / name)
        (here / name).chmod(mode)
    there = unpacked(includes.find(list(modes)), tmp_path / "there")
    assert {name: os.stat(there / name).st_mode & 0o777 for name in modes} == modes


def test_a_change_of_mode_is_a_change(here: Path) -> None:
    write(here / "app/key.pem")
    before = includes.find(["app"]).digest
    (here / "app/key.pem").chmod(0o600)
    assert includes.find(["app"]).digest != before


def test_a_folder_that_nobody_may_write_to_can_be_filled_there(here: Path, tmp_path: Path) -> None:
    write(here / "app/a.py")
    (here / "app").chmod(0o555)
    try:
        there = unpacked(includes.find(["app"]), tmp_path / "there")
    finally:
        (here / "app").chmod(0o755)
    assert os.stat(there / "app").st_mode & 0o777 == 0o755


def test_the_size_is_told_and_the_largest_named_when_it_is_much(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here / "app/small.py", here / "app/data/big.bin", text="x" * 1500)
    assert includes.find(["app"]).describe() == "includes: 2 files, 3.0 kB"
    write(here / "app/data/big.bin", text="x" * 9000)
    monkeypatch.setattr(includes, "MUCH", 5000)
    told = includes.find(["app"]).describe()
    assert "app/data (9.0 kB), app/small.py (1.5 kB)" in told
    assert "excludes=[...]" in told
