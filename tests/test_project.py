"""The user's project on nodes: what is sent, what is not, and how nodes follow its changes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import skyward as sky
from skyward.errors import ConfigurationError, ProtocolError
from skyward.files.items import FileItem, decode, encode
from skyward.files.scanner import Scanner
from skyward.files.transfer import Synced, pieces
from skyward.files.tree import Tree

QUIET = sky.Options(console=False)
Sharing = Callable[[sky.Compute], AbstractContextManager[sky.Compute]]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYWARD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a module, a script, a link, and files that git ignores."""
    root = tmp_path_factory.mktemp("project")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".gitignore").write_text("secret.txt\nruns/\n")
    (root / "secret.txt").write_text("hidden")
    (root / "runs").mkdir()
    (root / "runs" / "log").write_text("long")
    (root / "lib").mkdir()
    (root / "lib" / "numbers.txt").write_text("1 2 3")
    (root / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "run.sh").chmod(0o755)
    (root / "latest").symlink_to("lib/numbers.txt")
    (root / "empty").touch()
    return root


@pytest.fixture(scope="module")
def pool(sharing: Sharing, project: Path) -> Iterator[sky.Compute]:
    with sharing(sky.Compute(nodes=2, project=str(project), options=QUIET)) as compute:
        yield compute


@sky.function
def listed() -> dict[str, str]:
    found = {}
    for folder, _, names in os.walk("."):
        for name in names:
            path = Path(folder) / name
            found[path.as_posix()] = path.read_text()
    return found


@sky.function
def shell(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


class TestNodes:
    @pytest.fixture(autouse=True)
    def as_before(self, pool: sky.Compute, project: Path) -> Iterator[None]:
        """The next test finds the project and the nodes as this one did."""
        yield
        for name in ("lib/new.txt", "moved.sh", "taken"):
            (project / name).unlink(missing_ok=True)
        (project / "empty").touch()
        shell("rm -rf out taken") @ pool
        pool.sync()

    def test_every_node_has_the_files_that_git_does_not_ignore(self, pool: sky.Compute) -> None:
        first, second = listed() @ pool

        assert first == second
        assert sorted(first) == [".gitignore", "empty", "latest", "lib/numbers.txt", "run.sh"]
        assert first["latest"] == "1 2 3"
        assert shell("./run.sh") >> pool == "ran\n"

    def test_sync_sends_what_changed_and_removes_what_is_gone(
        self, pool: sky.Compute, project: Path
    ) -> None:
        (project / "lib" / "new.txt").write_text("new")
        (project / "moved.sh").write_bytes((project / "run.sh").read_bytes())
        (project / "empty").unlink()

        done = pool.sync()

        # Two nodes; the bytes of the copy are there already.
        assert (done.files, done.removed, done.bytes) == (4, 2, 6)
        assert all(
            found["lib/new.txt"] == "new" and "moved.sh" in found and "empty" not in found
            for found in listed() @ pool
        )
        assert pool.sync() == Synced(0, 0, 0)

    def test_a_file_that_a_function_changed_is_replaced_and_its_own_files_stay(
        self, pool: sky.Compute
    ) -> None:
        shell("echo spoilt > lib/numbers.txt; mkdir -p out; echo 1 > out/result") @ pool

        assert pool.sync().files == 2

        assert shell("cat lib/numbers.txt out/result") @ pool == ["1 2 31\n", "1 2 31\n"]

    def test_nodes_that_join_later_have_the_files_before_their_first_task(
        self, pool: sky.Compute
    ) -> None:
        pool.resize(3)

        assert len(listed() @ pool) == 3
        assert "lib/numbers.txt" in (listed() @ pool)[2]
        pool.resize(2)

    def test_a_folder_that_functions_filled_is_not_replaced_by_a_file(
        self, pool: sky.Compute, project: Path
    ) -> None:
        shell("mkdir taken; touch taken/theirs") @ pool
        (project / "taken").write_text("ours")

        with pytest.raises(
            sky.errors.PoolError, match=r"node \d did not get .*taken is a folder with"
        ):
            pool.sync()


def test_a_change_is_there_before_every_call_if_asked(tmp_path: Path) -> None:
    (tmp_path / "value").write_text("1")
    project = sky.Project(str(tmp_path), before_calls=True)

    with sky.Compute(project=project, options=QUIET) as compute:
        assert shell("cat value") >> compute == "1"
        (tmp_path / "value").write_text("2")
        assert shell("cat value") >> compute == "2"


class TestRefusals:
    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"there is no folder .*nothing; paths are"):
            sky.Compute(project=str(tmp_path / "nothing"))

    def test_the_home_folder_is_no_project(self) -> None:
        with pytest.raises(ConfigurationError, match="name the project's own folder"):
            sky.Compute(project="~")

    def test_another_kind_of_value_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"project=3\): expected the path of a folder"):
            sky.Compute(project=3)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a//b", "a/../b", "", "a\0b"])
    def test_names_that_lead_out_of_the_folder_are_refused(self, name: str) -> None:
        with pytest.raises(ProtocolError, match="no path below a folder"):
            decode(encode([FileItem(name, "file")]))

    def test_items_below_a_link_are_refused(self) -> None:
        link = FileItem("a", "link", content=b"/home")
        with pytest.raises(ProtocolError, match="'a/keys' is below 'a', which is a link"):
            decode(encode([link, FileItem("a/keys", "file")]))

    def test_nothing_is_written_through_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "root").mkdir()
        (tmp_path / "root" / "a").symlink_to(tmp_path / "outside")
        tree = Tree(tmp_path / "root")
        tree.compare([FileItem("a", "folder"), FileItem("a/file", "file")])

        with pytest.raises(FileExistsError, match=r"root/a is a link or a file, so 'a/file'"):
            tree.finish()

        assert not list((tmp_path / "outside").iterdir())

    @pytest.mark.parametrize("data", [b"", b"\xc1", encode([]) + b"x", b"\x91\x01"])
    def test_bytes_that_are_no_list_are_refused(self, data: bytes) -> None:
        with pytest.raises(ProtocolError, match="not a list of files"):
            decode(data)


def test_a_name_that_is_not_utf_8_fails_the_start_and_is_named(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).touch()

    with (
        pytest.raises(sky.errors.PoolError, match=r"caf\\xe9' is not UTF-8; .*excludes"),
        sky.Compute(project=str(tmp_path), options=QUIET),
    ):
        raise AssertionError("started")


class TestScanning:
    def test_a_file_is_read_again_only_if_its_time_or_size_changed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cache"))
        root = tmp_path / "root"
        root.mkdir()
        (root / "old").write_text("old")
        os.utime(root / "old", (1, 1))
        Scanner(root).scan()
        # Behind the scanner's back: the same size and time, so another scanner does not look.
        (root / "old").write_text("new")
        os.utime(root / "old", (1, 1))

        (item,) = Scanner(root).scan().items
        os.utime(root / "old", (2, 2))
        (changed,) = Scanner(root).scan().items

        assert item.content != changed.content

    def test_a_folder_that_has_become_a_file_is_a_file(self, tmp_path: Path) -> None:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        (tmp_path / "was").mkdir()
        (tmp_path / "was" / "inside").touch()
        subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
        (tmp_path / "was" / "inside").unlink()
        (tmp_path / "was").rmdir()
        (tmp_path / "was").write_text("now")

        (item,) = Scanner(tmp_path).scan().items

        assert (item.name, item.kind) == ("was", "file")

    def test_what_tools_leave_behind_stays_here_without_git_too(self, tmp_path: Path) -> None:
        for name in ("code.py", ".venv/bin/python", "__pycache__/code.pyc", "data/big", "note~"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")

        names = {item.name for item in Scanner(tmp_path, ["data", "*~"]).scan().items}

        assert names == {"code.py"}


def test_nodes_that_share_a_folder_do_not_send_each_others_files_again(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("same")
    items = list(Scanner(tmp_path / "here").scan().items)
    trees = [Tree(tmp_path / "shared"), Tree(tmp_path / "shared")]
    # Both miss the file before one of them has put it there.
    assert [tree.compare(items) for tree in trees] == [[0], [0]]
    for tree in trees:
        tree.add(0, b"same", last=True)
        tree.finish()

    assert [tree.compare(items) for tree in trees] == [[], []]
    assert [tree.finish()["written"] for tree in trees] == [0, 0]


CONTENTS = st.sampled_from(["", "a", "b", "cc"])
NAMES = st.sampled_from(["a", "b", "c", "c/d", "c/e", "c/f/g"])
STATES = st.dictionaries(NAMES, CONTENTS, max_size=5)


@settings(max_examples=60, deadline=None)
@given(states=st.lists(STATES, min_size=1, max_size=4))
def test_a_tree_becomes_whatever_the_other_folder_is(
    states: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("law")
    tree = Tree(base / "there")
    for number, state in enumerate(states):
        here = base / f"here-{number}"
        here.mkdir()
        for name, content in sorted(state.items(), reverse=True):
            if (here / name).is_dir():
                continue
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_text(content)
        items = list(Scanner(here).scan().items)
        missing = tree.compare(items)
        for parts, data in pieces(here, items, missing, 2):
            for (number, _, last), piece in zip(parts, data, strict=True):
                tree.add(number, piece, last)
        tree.finish()

        assert list(Scanner(base / "there").scan().items) == items
