"""Copying between this machine and nodes: whole or not at all, with modes, in bounded memory."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.errors import ConfigurationError, PoolError, ProtocolError
from skyward.files import scanner, transfer
from skyward.files.items import FileItem, encode
from skyward.files.transfer import FilesHere, FilesOnNode, Give, copy
from skyward.nodes.fleet import Fleet
from skyward.wire.messages import Question


@pytest.fixture
def running(pool: sky.Compute) -> Fleet:
    return pool._open_fleet


@pytest.fixture
def node(running: Fleet) -> FilesOnNode:
    return FilesOnNode(functools.partial(running.service, 0), "train/0")


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


def test_a_copy_whose_client_leaves_leaves_nothing(
    running: Fleet, tmp_path: Path, eventually
) -> None:
    (tmp_path / "there").mkdir()
    folders = [str(tmp_path), str(tmp_path / "there")]
    for root, new in ((tmp_path, "x"), (tmp_path / "there", "")):
        with running.service(0, "files") as connection:
            connection.send("take", root=str(root), new=new, mode=0o755)
            items = [FileItem("a", "file", 10)]
            connection.channel.send(Question("items"), [encode(items)])
            assert connection.next_reply().value == [0]
            connection.channel.send(Question("part", {"parts": [(0, 4, False)]}), [b"half"])
            eventually(lambda: sum(len(names) for _, _, names in os.walk(tmp_path)))
        # Not `rglob`, which fails if a folder goes while it looks.
        eventually(lambda: [each for each, *_ in os.walk(tmp_path)] == folders)


def test_a_file_is_read_once_unless_the_same_may_be_there(
    node: FilesOnNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    digest_of = scanner.digest_of

    def noted(path: Path | str, *size: int) -> bytes:
        read.append(Path(path).name)
        return digest_of(path, *size)

    monkeypatch.setattr(scanner, "digest_of", noted)
    monkeypatch.setattr(transfer, "digest_of", noted)
    (tmp_path / "work").mkdir()
    for name in ("a", "b"):
        (tmp_path / "work" / name).write_text("the same")

    def sent(source: str, to: str) -> list[int]:
        """How many bytes go if it is copied."""
        told: list[int] = []
        whole, to = str(tmp_path / source), str(tmp_path / to)
        copy(FilesHere(), whole, node, to, recursive=True, begin=told.append)
        return told

    assert (sent("work/a", "file"), sent("work", "new"), read) == ([8], [16], [])
    assert (sent("work/a", "file"), read) == ([0], ["a"])
    assert (sent("new", "work"), read) == ([16], ["a"]), "into a new folder of that name"
    assert (sent("new", "work"), read) == ([0], ["a", "a", "b"])


def test_a_file_that_changes_meanwhile_is_copied_again_and_a_growing_one_as_it_was(
    node: FilesOnNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually
) -> None:
    """A log grows while it is copied, and a checkpoint is written again."""
    monkeypatch.setattr(transfer, "PIECE", 4)
    log, checkpoint = tmp_path / "work" / "log", tmp_path / "work" / "latest"
    log.parent.mkdir()
    log.write_text("one\ntwo\n")
    checkpoint.write_text("first of all")
    ages: list[int] = []

    def change(often: bool, count: int) -> None:
        """Called when some bytes of one of them have gone."""
        with log.open("a") as file:
            file.write("three\n")
        if often or checkpoint.read_text() == "first of all":
            checkpoint.write_text("other though")
            # The times of a file system may be as coarse as some milliseconds.
            ages.append(len(ages))
            os.utime(checkpoint, (0, ages[-1]))

    def copied(to: str, often: bool) -> None:
        advance = functools.partial(change, often)
        to = str(tmp_path / to)
        copy(FilesHere(), str(log.parent), node, to, recursive=True, advance=advance)

    copied("there", False)
    assert (tmp_path / "there" / "latest").read_text() == "other though"
    assert re.fullmatch("one\ntwo\n(three\n)*", (tmp_path / "there" / "log").read_text())
    with pytest.raises(PoolError, match=r"latest changed 3 times while being copied"):
        copied("never", True)
    eventually(lambda: sorted(os.listdir(tmp_path)) == ["there", "work"])

    listed = transfer.listed
    monkeypatch.setattr(transfer, "listed", lambda *given: (log.parent, _unlike(listed(*given)[1])))
    with pytest.raises(PoolError, match=r"latest, log changed 3 times while being copied"):
        copied("never", False)


def _unlike(items: list[FileItem]) -> list[FileItem]:
    """Items whose bytes are other ones than they say."""
    return [FileItem(each.name, "file", each.size, content=each.name.encode()) for each in items]


def test_files_go_from_node_to_node(node: FilesOnNode, tmp_path: Path) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True, mode=0o750)
    (tmp_path / "a" / "deep" / "file").write_bytes(os.urandom(100_000))

    done = copy(node, str(tmp_path / "a"), node, str(tmp_path / "b"), recursive=True)

    assert (done.files, done.bytes) == (1, 100_000)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


class Lying(FilesHere):
    """A place that lists what it likes."""

    def __init__(self, *items: FileItem) -> None:
        self._items = list(items)

    @contextlib.contextmanager
    def reading(
        self, path: str, without: str, digests: bool
    ) -> Iterator[tuple[list[FileItem], Give]]:
        yield self._items, lambda missing: iter(())


@pytest.mark.parametrize(
    "items",
    [
        [FileItem("../outside", "file")],
        [FileItem("/etc/outside", "file")],
        [FileItem("a/../../outside", "folder")],
        [FileItem("a", "link", content=b"/"), FileItem("a/outside", "file")],
    ],
)
def test_nothing_is_written_outside_whatever_the_other_end_lists(
    tmp_path: Path, items: list[FileItem]
) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(ProtocolError, match=r"is no path below a folder|which is a link"):
        copy(
            Lying(*items),
            str(tmp_path / "source"),
            FilesHere(),
            str(tmp_path / "x"),
            recursive=True,
        )
    assert os.listdir(tmp_path) == ["source"]
