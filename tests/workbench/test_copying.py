"""Copying between this machine and nodes: whole or not at all, with modes, in bounded memory."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.compute.workbench.copying import copy
from skyward.compute.workbench.files import FilesHere, FilesOnNode, FoundEntry
from skyward.errors import ConfigurationError, PoolError, ProtocolError
from skyward.nodes.fleet import Fleet


@pytest.fixture
def running(pool: sky.Compute) -> Fleet:
    return pool._open_fleet


@pytest.fixture
def node(running: Fleet) -> Iterator[FilesOnNode]:
    with contextlib.closing(FilesOnNode(running, 0, "train/0")) as place:
        yield place


def tree(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Everything in a folder: modes, and contents or targets."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = oct(stat.S_IMODE(path.lstat().st_mode))
        if path.is_symlink():
            found[str(path.relative_to(folder))] = ("link", os.readlink(path).encode())
        else:
            found[str(path.relative_to(folder))] = (
                mode,
                b"" if path.is_dir() else path.read_bytes(),
            )
    return found


def test_a_folder_goes_there_and_comes_back(node: FilesOnNode, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    for number in range(70):
        (source / "deep" / f"{number} \u00fc").write_bytes(bytes([number]) * number)
    (source / "run.sh").write_text("#!/bin/sh")
    (source / "run.sh").chmod(0o751)
    (source / "secret").write_text("x")
    (source / "secret").chmod(0o400)
    (source / "link").symlink_to("deep/3 \u00fc")
    (source / "dangling").symlink_to("/nowhere/at all")
    os.mkfifo(source / "pipe")

    there = copy(FilesHere(), str(source), node, str(tmp_path / "there"), recursive=True)
    back = copy(node, str(tmp_path / "there"), FilesHere(), str(tmp_path / "back"), recursive=True)

    (source / "pipe").unlink()
    assert (there.files, there.passed_over, back.passed_over) == (74, 1, 0)
    assert tree(tmp_path / "there") == tree(source) == tree(tmp_path / "back")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["back", "source", "there"]


def test_a_large_file_takes_little_memory(
    node: FilesOnNode, running: Fleet, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(300 << 20)
        file.seek(200 << 20)
        file.write(b"here")
    with running.service(0, "about") as about:
        agent = psutil.Process(about.ask("facts")["pid"])
    told: list[int] = []

    copy(
        FilesHere(),
        str(large),
        node,
        str(tmp_path / "there"),
        begin=told.append,
        advance=told.append,
    )

    assert told[0] == sum(told[1:]) == 300 << 20
    assert (tmp_path / "there").stat().st_size == 300 << 20
    with open(tmp_path / "there", "rb") as file:
        file.seek(200 << 20)
        assert file.read(4) == b"here"
    assert agent.memory_full_info().uss < 150 << 20


def test_a_file_is_copied_into_a_folder_or_to_a_name(node: FilesOnNode, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "box").mkdir()

    for to in ("box", "box/b", "box/b"):
        copy(FilesHere(), str(tmp_path / "a"), node, str(tmp_path / to))

    assert {each.name: each.read_text() for each in (tmp_path / "box").iterdir()} == {
        "a": "new",
        "b": "new",
    }


def test_a_folder_is_merged_into_one_that_is_there_and_never_into_itself(
    node: FilesOnNode, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    (work / "work").mkdir(parents=True)
    (work / "a").write_text("1")
    (work / "work" / "old").write_text("2")

    copy(FilesHere(), str(work), node, str(work), recursive=True)

    assert sorted(str(each.relative_to(work)) for each in work.rglob("*")) == [
        "a",
        "work",
        "work/a",
        "work/old",
    ]


@pytest.mark.parametrize(
    ("source", "to", "message"),
    [
        ("nothing", "x", "there is no .*nothing$"),
        ("folder", "x", "folder is a folder; copy it with all that is in it: -r"),
        ("pipe", "x", "pipe is neither a file nor a folder"),
        ("file", "no/such/place", "there is no folder .*no/such; make it first"),
        ("file", "nowhere/", "there is no folder .*nowhere; make it first, or leave out"),
        ("file", "file", "is the same as the source"),
        ("file", "clash", "clash/file is there already, and is a folder, not a file"),
    ],
)
@pytest.mark.parametrize("up", [True, False])
def test_what_cannot_be_copied_is_refused(
    node: FilesOnNode, tmp_path: Path, source: str, to: str, message: str, up: bool
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "clash" / "file").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    first, second = (FilesHere(), node) if up else (node, FilesHere())

    with pytest.raises(ConfigurationError, match=message):
        copy(first, str(tmp_path / source), second, f"{tmp_path}/{to}")
    assert not [each for each in os.listdir(tmp_path) if each.endswith(".part")]


def test_links_in_a_circle_and_files_that_may_not_be_read_are_named(
    node: FilesOnNode, tmp_path: Path
) -> None:
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(PoolError, match=r"train/0: .*round: its links lead in a circle"):
        copy(node, str(tmp_path / "round"), FilesHere(), str(tmp_path / "x"))


def test_without_room_nothing_is_begun(node: FilesOnNode, tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(ConfigurationError, match=r"no room for train/0:.*: 8\.0 TiB are to be"):
        copy(FilesHere(), str(tmp_path / "huge"), node, str(tmp_path / "x"))
    with pytest.raises(PoolError, match="no room on the disk: needs 8796093022208 bytes"):
        node.write(str(tmp_path / "x"), 1 << 43, 0o644, [])


def test_a_copy_whose_client_leaves_leaves_nothing(
    running: Fleet, tmp_path: Path, eventually
) -> None:
    place = FilesOnNode(running, 0, "train/0")
    place._send("write", path=str(tmp_path / "x"), size=10, mode=0o644, asks_first=False)
    place._send("part", b"half")
    eventually(lambda: os.listdir(tmp_path))
    place.close()
    eventually(lambda: not os.listdir(tmp_path))


class Lying(FilesHere):
    """A place that lists what it likes."""

    def __init__(self, *entries: FoundEntry) -> None:
        super().__init__()
        self._entries = entries

    def walk(self, path: str) -> Iterator[FoundEntry]:
        return iter(self._entries)


@pytest.mark.parametrize(
    "entries",
    [
        [FoundEntry("../outside", "file")],
        [FoundEntry("/etc/outside", "file")],
        [FoundEntry("a/../../outside", "folder")],
        [FoundEntry("unknown/outside", "file")],
        [FoundEntry("a", "link", target="/"), FoundEntry("a", "folder")],
        [FoundEntry("a", "link", target="/"), FoundEntry("a/outside", "file")],
    ],
)
def test_nothing_is_written_outside_whatever_the_other_end_lists(
    tmp_path: Path, entries: list[FoundEntry]
) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(ProtocolError, match="which its folder lacks"):
        copy(
            Lying(*entries),
            str(tmp_path / "source"),
            FilesHere(),
            str(tmp_path / "x"),
            recursive=True,
        )
    assert os.listdir(tmp_path) == ["source"]
