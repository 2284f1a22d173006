"""Output logs: bounded, readable from any position, and honest about what is gone."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.worker import output_log, task_output
from skyward.worker.output_log import OutputLog


def read_all(folder: Path, position: int = 0) -> tuple[int, bytes]:
    start, found = output_log.read(folder, position, 7)
    data = found
    while found:
        at, found = output_log.read(folder, start + len(data), 7)
        assert not found or at == start + len(data)
        data += found
    return start, data


@given(st.lists(st.text("ab\n", max_size=60).map(str.encode), max_size=30))
def test_what_is_kept_is_the_end_of_what_was_written(tmp_path_factory, pieces) -> None:
    folder = tmp_path_factory.mktemp("log")
    log = OutputLog(folder, 80)
    for piece in pieces:
        log.write(piece)
    log.close()
    whole = b"".join(pieces)

    first, end = output_log.bounds(folder)
    start, kept = read_all(folder)

    assert end == len(whole)
    assert (start, kept) == (first, whole[first:]) or not kept == whole[first:] == b""
    assert len(kept) >= min(len(whole), 80)
    assert sum(each.stat().st_size for each in folder.iterdir()) <= 80 * 4


@given(
    st.lists(st.text("ab\n", max_size=60).map(str.encode), max_size=10),
    st.integers(min_value=1, max_value=12),
)
def test_the_last_lines_are_found(tmp_path_factory, pieces, lines) -> None:
    folder = tmp_path_factory.mktemp("log")
    log = OutputLog(folder, 4000)
    for piece in pieces:
        log.write(piece)
    log.close()
    whole = b"".join(pieces)

    position = output_log.position_of_last(folder, lines)

    assert whole[position:] == b"".join(whole.splitlines(keepends=True)[-lines:])


def test_a_log_goes_on_where_another_process_has_left_it(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        log = OutputLog(tmp_path, 100)
        log.write(text)
        log.close()

    assert read_all(tmp_path) == (0, b"one\ntwo\n")


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert output_log.bounds(tmp_path / "none") == (0, 0)
    assert output_log.read(tmp_path / "none", 5, 10) == (5, b"")
    assert output_log.position_of_last(tmp_path / "none", 10) == 0


def test_a_long_line_of_a_task_is_kept_whole(tmp_path: Path) -> None:
    text = "\x00" * 300_000 + "\n"
    task_output.TaskOutput(str(tmp_path), 0, 0).write("stdout", text, "f")
    lines = task_output.TaskOutputReader(tmp_path, None).next_lines()
    assert text.endswith("".join(each.text for each in lines))
    assert sum(len(each.text) for each in lines) > 100_000


def test_a_log_without_room_for_another_file_goes_on_in_the_old_one(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 80)
    with mock.patch.object(output_log.os, "open", side_effect=OSError), pytest.raises(OSError):
        log.write(b"0123456789\n")
    log.write(b"more\n")
    log.close()
    assert read_all(tmp_path) == (0, b"0123456789\nmore\n")
