"""The site's pages that are made from the code, and every page as Markdown for llms.txt."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import skyward
from skyward import accelerators, errors, plugins

ROOT = Path(__file__).parents[2]
PAGES = {
    "functions": ("Functions and calls", ("functions", "objects", "calls")),
    "pools": ("Pools", ("compute", "spec", "nodes")),
    "providers": ("Providers", ("providers",)),
    "context": ("On the node", ("context", "shards")),
    "files": ("Files", ("files",)),
    "state": ("Shared state", ("state",)),
    "device": ("The torch device", ("device",)),
    "store": ("The model store", ("store",)),
    "plugins": ("Plugins", ("plugins",)),
    "errors": ("Errors", ("errors",)),
}
"""Pages of the reference: title, and the rooms of the house whose public names it has."""
REST = "more"
_LATER = "---\nsearch: {boost: 0.5}\n---\n"
"""On top of a page that the search lists after those of the guides and the reference."""
_NEEDS = re.compile(r"^<!-- needs: (.+?) -->$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:docker|examples|bench|tests|src|tools)[^)]*\)")
"""Links to files of the repository that have no page; their text stays."""
_CHART = re.compile(r"^!\[[^\]]*\]\((?:\.\./)*(images/bench/[\w-]+\.svg)\)$", re.MULTILINE)
_STYLE = re.compile(r"<style>.*?</style>\n", re.DOTALL)
_REFERENCE = re.compile(r"^::: ([\w.]+)(?:\n    options: .*)?$", re.MULTILINE)
_FIRST_SENTENCE = re.compile(r"^[A-Z`*].*?[.:](?=\s|$)", re.MULTILINE | re.DOTALL)
_sections: dict[str, list[str]] = {}
"""The sections of the site, and the paths of their pages."""
_written: dict[str, str] = {}
"""The pages of this build as Markdown, by their paths."""
_EXAMPLE = re.compile(r"\]\((?:\.\./)+examples/(\w+)\.py\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that nobody writes."""
    for path, text in made_pages():
        files.append(File.generated(config, path, content=text))
    return files


def made_pages() -> Iterator[tuple[str, str]]:
    """Every page that is made, with its path in the site."""
    yield from reference()
    yield from examples()
    for name in ("CHANGELOG", "CONTRIBUTING"):
        text = (ROOT / f"{name}.md").read_text()
        # What these link to in docs/ is beside them on the site.
        yield f"{name.lower()}.md", _LATER + re.sub(r"\]\(docs/", "](", text)


def reference() -> Iterator[tuple[str, str]]:
    """The reference: every public name, on the page of its room."""
    page_of = {room: page for page, (_, rooms) in PAGES.items() for room in rooms}
    names: dict[str, list[str]] = {page: [] for page in (*PAGES, REST)}
    paths = [f"skyward.{name}" for name in skyward.__all__ if name not in skyward._MODULES]
    # What users get and never make is no name of the top, but has a place in the reference.
    paths += [f"skyward.{home}.{name}" for name, home in skyward._MOVED.items() if home != "errors"]
    for path in paths:
        home = pkgutil.resolve_name(path).__module__.removeprefix("skyward.")
        names[page_of.get(home.partition(".")[0], REST)].append(path)
    listed_already = {path.rpartition(".")[2] for path in names["errors"]}
    names["errors"] += [
        f"skyward.errors.{name}"
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and kind.__module__ == errors.__name__
        if name not in listed_already
    ]
    names["plugins"] += [f"skyward.plugins.frameworks.{each}.{each}" for each in plugins.__all__]
    titles = {page: title for page, (title, _) in PAGES.items()} | {REST: "More"}
    listed = []
    for page, public in names.items():
        modules = _modules() if page == REST else []
        if not public and not modules:
            continue
        blocks = "\n\n".join(f"::: {name}" for name in public)
        blocks += "\n\n".join(f"\n\n::: {name}\n    options: {{members: true}}" for name in modules)
        yield f"reference/{page}.md", f"# {titles[page]}\n\n{blocks}\n"
        words = ", ".join(f"`{name.rpartition('.')[2]}`" for name in [*public, *modules])
        listed.append(f"| [{titles[page]}]({page}.md) | {words} |")
    yield "reference/accelerators.md", _accelerators()
    listed.append("| [Accelerators](accelerators.md) | `sky.accelerators` |")
    table = "\n".join(["| page | names |", "|---|---|", *listed])
    head = "# Reference\n\nEvery public name of `import skyward as sky`, from the code's own words."
    yield "reference/index.md", f"{head}\n\n{table}\n"


def _modules() -> list[str]:
    """Public modules that have no page of their own."""
    known = ("accelerators", "errors", "plugins")
    return [f"skyward.{name}" for name in skyward._MODULES if name not in known]


def _accelerators() -> str:
    rows = [
        f"| `sky.accelerators.{model.name}()` | {', '.join(model.memories)} |"
        for model in accelerators.models()
    ]
    table = "\n".join(["| accelerator | memory, the usual one first |", "|---|---|", *rows])
    words = (
        "`count=` says how many each node has, `memory=` which model of several. A settings file "
        "and the command line write `H100`, `H100:8` or `A100-40GB:2`."
    )
    shown = "::: skyward.accelerators.Accelerator"
    return f"# Accelerators\n\n{words}\n\n{table}\n\n{shown}\n"


def examples() -> Iterator[tuple[str, str]]:
    """A page for each example, and a page that lists them."""
    rows = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text()
        words = ast.get_docstring(ast.parse(code)) or ""
        first = words.partition("\n\n")[0].replace("\n", " ")
        yield f"examples/{path.stem}.md", f"{_LATER}# {path.stem}.py\n\n```python\n{code}```\n"
        rows.append(f"| [{path.stem}.py]({path.stem}.md) | {first} |")
    table = "\n".join(["| example | shows |", "|---|---|", *rows])
    words = "Each is a file that runs; the tests run it."
    yield "examples/index.md", f"# Examples\n\n{words}\n\n{table}\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show what a snippet needs, and lead links out of docs/ to their pages on the site."""
    up = "../" * page.file.src_uri.count("/")
    markdown = _NEEDS.sub(r'<p class="needs">Needs \1:</p>', markdown)
    markdown = _EXAMPLE.sub(rf"]({up}examples/\1.md)", markdown)
    for name in ("CHANGELOG", "CONTRIBUTING"):
        markdown = re.sub(rf"\]\((?:\.\./)+{name}\.md", f"]({up}{name.lower()}.md", markdown)
    markdown = _OUTSIDE.sub(r"\1", markdown)
    _written[page.file.src_uri] = _REFERENCE.sub(_documented, markdown)
    return _CHART.sub(_inline, markdown)


def _inline(match: re.Match[str]) -> str:
    """A chart as part of its page, where it is as wide as the text and has the page's colours."""
    drawing = _STYLE.sub("", (ROOT / "docs" / match[1]).read_text())
    drawing = drawing.replace('width="640"', 'width="100%"').replace("\n", "")
    return f'<div class="chart" data-search-exclude>{drawing}</div>'


def on_config(config: Any) -> Any:
    """Put the pages that are made into the navigation, where a folder stands for them."""
    made = [path for path, _ in made_pages()]
    config.nav = _filled(config.nav, made)
    # A page that nobody has given a place yet is a guide.
    listed = repr(config.nav)
    written = [path.name for path in sorted(Path(config.docs_dir).glob("*.md"))]
    for entry in config.nav:
        if "Guides" in entry:
            entry["Guides"] += [name for name in written if f"'{name}'" not in listed]
    return config


def _filled(entries: list[Any], made: list[str]) -> list[Any]:
    filled: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            if isinstance(value, list):
                entry = {title: _filled(value, made)}
            elif value.endswith("/"):
                entry = {title: _below(value, made)}
            filled.append(entry)
        elif entry.endswith("/"):
            filled += _below(entry, made)
        else:
            filled.append(entry)
    return filled


def _below(folder: str, made: list[str]) -> list[str]:
    index = f"{folder}index.md"
    return [index, *(path for path in made if path.startswith(folder) and path != index)]


def on_nav(nav: Any, **_: Any) -> None:
    """Keep the navigation: llms.txt has its order."""
    _written.clear()
    _sections.clear()
    for item in nav.items:
        pages = [item] if item.is_page else _pages(item)
        _sections[item.title or "Start"] = [each.file.src_uri for each in pages]


def _pages(section: Any) -> Iterator[Any]:
    for item in section.children:
        if item.is_page:
            yield item
        else:
            yield from _pages(item)


def on_post_build(config: Any) -> None:
    """Write the pages as Markdown beside their HTML, and llms.txt, which lists them."""
    site = Path(config.site_dir)
    for path, text in _written.items():
        (site / path).write_text(text)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for title, paths in _sections.items():
        lines += ["", f"## {title}", ""]
        lines += [_listed(path, _written[path]) for path in paths]
    (site / "llms.txt").write_text("\n".join([*lines, ""]))


def _listed(path: str, text: str) -> str:
    """A page's line in llms.txt: its heading, and its first sentence."""
    heading, _, rest = text.partition("# ")[2].partition("\n")
    first = _FIRST_SENTENCE.search(
        re.sub(r"^(?:```.*?^```|<.*?>|[|!#].*?)$", "", rest, flags=re.M | re.S)
    )
    words = " ".join(first[0].split()) if first else ""
    return f"- [{heading}]({path})" + (f": {words}" if words else "")


def _documented(match: re.Match[str]) -> str:
    """A name of the reference as Markdown: its signature and its own words, and its methods."""
    found = pkgutil.resolve_name(match[1])
    last = match[1].rpartition(".")[2]
    blocks = [f"## {last}", _words(last, found)]
    if inspect.isclass(found):
        for name, member in inspect.getmembers(found, inspect.isroutine):
            if not name.startswith("_") and inspect.getdoc(member):
                blocks += [f"### {last}.{name}", _words(name, member)]
    return "\n\n".join(blocks)


def _words(name: str, found: Any) -> str:
    try:
        signature = f"```python\n{name}{inspect.signature(found)}\n```\n\n"
    except (TypeError, ValueError):
        signature = ""
    return signature + (inspect.getdoc(found) or "")
