"""Every snippet of README and docs/ runs, or says what it needs and names what exists."""

from __future__ import annotations

import builtins
import os
import re
from pathlib import Path
from typing import Any

import pytest

import skyward as sky

from ..conftest import only_in_all
from .given import given
from .snippets import ROOT, Snippet, chains, pages, snippets, written_chains

ALL = {page: snippets(page) for page in pages()}
RUN = {
    str(page.relative_to(ROOT)): [each for each in found if each.needs is None]
    for page, found in ALL.items()
    # tests/test_examples.py runs it.
    if page.name != "README.md"
}
OTHERS = {
    "docs/plugins.md": {"sky.plugins.timing"},  # The plugin that the page makes.
    "docs/skytorch.md": {"compute.namespace"},  # A compute of skytorch.client.
}
MADE_OR_EXACT = ("benchmarks.md", "cli.md", "device-coverage.md", "index.md", "wire.md")
"""Pages that are written by a program, or describe all of something exactly."""
NEEDING = [each for found in ALL.values() for each in found if each.needs is not None]


SLOW = (
    "docs/device.md",
    "docs/guides/broadcast.md",
    "docs/guides/first-steps.md",
    "docs/guides/functions.md",
    "docs/guides/round-trip.md",
    "docs/index.md",
    "docs/mesh.md",
    "docs/plugins.md",
    "docs/state.md",
)
"""torch.compile and training take long, and the tests of the device, of functions, of plugins and
of shared objects run what the pages show; the round trip of the first pages is that of `sky demo`
and of `tests/test_model_roundtrip.py`."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[only_in_all] if page in SLOW else [])
        for page, found in RUN.items()
        if found
    ],
)
def test_the_snippets_of_a_page_run(page: str, tmp_path: Path, monkeypatch: Any) -> None:
    """In order, in one namespace, as the script of a user; with a pool where the page has one.

    Nothing is given to the first: a page begins with a program that runs as it stands.
    """
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    monkeypatch.delenv("SKYWARD_CONFIG", raising=False)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    with given(page) as new_names:
        # The name of a script: functions of it travel by value.
        names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        for snippet in RUN[page]:
            names |= new_names() if snippet is not ALL[ROOT / page][0] else {}
            exec(compile(snippet.tree(), str(snippet), "exec"), names)


def exists(chain: tuple[str, ...]) -> bool:
    """Whether a chain of attributes leads somewhere; what a call returns is not followed."""
    root, *rest = chain
    at: Any = sky if root == "sky" else sky.Compute
    for name in rest:
        if not hasattr(at, name):
            return False
        at = getattr(at, name)
        if root == "compute":
            break
    return True


@pytest.mark.parametrize("snippet", NEEDING, ids=str)
def test_a_snippet_that_needs_more_compiles_and_names_what_exists(snippet: Snippet) -> None:
    missing = [chain for chain in chains(snippet.tree()) if not exists(chain)]
    assert not missing, f"{snippet} names what does not exist"


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in ALL])
def test_the_text_of_a_page_names_what_exists(page: str) -> None:
    if page == "docs/coming-from-skyward.md":
        pytest.skip(
            "its left columns are names of the other Skyward; tests/test_former.py has them"
        )
    found = set(written_chains((ROOT / page).read_text()))
    assert not {".".join(chain) for chain in found if not exists(chain)} - OTHERS.get(page, set())


def test_what_a_snippet_needs_is_something_that_tests_cannot_have() -> None:
    """A list to look at: a new entry is a decision, not a way around a failure."""
    reasons = {each.needs for each in NEEDING}
    assert reasons, "some snippets are for clouds"
    assert all(os.linesep not in (reason or "") for reason in reasons)


GUIDES = [page for page in ALL if page.parent.name == "docs" and page.name not in MADE_OR_EXACT]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.name))
def test_a_page_says_first_what_its_reader_does(page: Path) -> None:
    """Before its first section, a page shows a program, a command, or a table of what to write."""
    first = re.split(r"^## ", page.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    assert re.search(r"^(```|\||    \S)", first, re.MULTILINE), first
