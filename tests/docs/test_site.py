"""The site: builds without a warning, has every public name, and fetches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skyward as sky
from skyward import errors, plugins

from ..conftest import ALL
from ..page.chromium import PROGRAM, Chromium
from .snippets import ROOT

pytest.importorskip("material")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built as `make docs` does; a link that leads nowhere ends the build."""
    if not ALL:
        pytest.skip("to build the site takes 20 s of a processor: make docs, make test-all")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    anchors = set(re.findall(r'id="skyward\.([\w.]+)"', text))
    shown = {name.rpartition(".")[2] for name in anchors}
    assert set(sky.__all__) - {"accelerators", "errors", "plugins"} <= shown
    assert {name for name in vars(errors) if name.endswith("Error")} <= shown
    assert set(plugins.__all__) <= shown


def test_examples_in_docstrings_are_shown_as_code(site: Path) -> None:
    for page in (site / "reference").glob("*.html"):
        assert "&gt;&gt;&gt; " not in page.read_text(), page


def test_nothing_is_fetched_from_elsewhere_when_a_page_is_viewed(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', text)
        assert not fetched, page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:", style.read_text()), style


def test_what_a_snippet_needs_is_on_the_page(site: Path) -> None:
    assert '<p class="needs">Needs an AWS account:</p>' in (site / "aws.html").read_text()


def test_llms_txt_lists_every_page_as_markdown(site: Path) -> None:
    listed = re.findall(r"^- \[.+?\]\((.+?\.md)\)", (site / "llms.txt").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(site).with_suffix(".md")) for page in site.rglob("*.html")}
    assert set(listed) == pages - {"404.md"}
    assert "```python" in (site / "guides" / "functions.md").read_text()
    compute = (site / "reference" / "pools.md").read_text()
    assert "### Compute.device" in compute, "the reference as words, not as a reference to them"


def test_charts_are_part_of_their_page_with_the_tables_behind_them(site: Path) -> None:
    text = (site / "benchmarks.html").read_text()
    pictures = list((ROOT / "docs" / "images" / "bench").glob("*.svg"))
    assert text.count('<div class="chart"') == len(pictures) - 1, "all but that of the first page"
    assert text.count("<details") == len(list((ROOT / "bench" / "recorded").glob("*.json")))
    assert '<div class="chart"' in (site / "index.html").read_text()


def test_the_page_of_benchmarks_and_its_charts_are_those_of_the_recorded_rows() -> None:
    program = """
import run
assert run.PAGE.read_text() == run.page()
for name, drawing in run.drawings():
    assert (run.CHARTS / f"{name}.svg").read_text() == drawing, name
"""
    bench = os.environ | {"PYTHONPATH": str(ROOT / "bench")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=bench, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stderr}\nmake them again: python bench/run.py --page"


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")
def test_a_browser_shows_every_page_on_a_phone_and_searches_from_the_disk(site: Path) -> None:
    width = 390
    with Chromium() as browser:
        browser.show(width, 844)
        for page in site.rglob("*.html"):
            browser.open(page.as_uri())
            assert browser.value("document.documentElement.scrollWidth") <= width, page
        browser.open((site / "guides" / "functions.html").as_uri())
        browser.value("document.querySelector('[data-md-toggle=search]').click()")
        field = "document.querySelector('[data-md-component=search-query]')"
        browser.value(f"{field}.value = 'broadcast'")
        browser.value(f"{field}.dispatchEvent(new Event('keyup'))")
        found = "document.querySelectorAll('.md-search-result__item').length"
        assert browser.until(found)
