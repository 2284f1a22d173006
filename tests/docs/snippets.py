"""The Python blocks of a page, and what each needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>.+?) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_CHAIN = re.compile(r"(?<![\w./<-])(sky|compute)((?:\.[A-Za-z_]\w*)+)")


@dataclass(frozen=True)
class Snippet:
    """One block of a page."""

    page: Path
    line: int
    code: str
    needs: str | None
    """What the tests do not have, as the page says above the block; None if it is run."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def tree(self) -> ast.Module:
        """The block, padded so that its lines have the numbers of the page."""
        return ast.parse("\n" * self.line + self.code, str(self.page))


def pages() -> list[Path]:
    """Every page that a person wrote for users."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[Snippet]:
    """The blocks of a page, in order."""
    text = page.read_text()
    return [
        Snippet(page, text[: match.start("code")].count("\n"), match["code"], match["needs"])
        for match in _BLOCK.finditer(text)
    ]


def chains(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """The names that begin with `sky` or `compute`: `("sky", "plugins", "torch")`."""
    for node in ast.walk(tree):
        names: list[str] = []
        at: ast.AST = node
        while isinstance(at, ast.Attribute):
            names.append(at.attr)
            at = at.value
        if isinstance(at, ast.Name) and at.id in ("sky", "compute") and names:
            yield (at.id, *reversed(names))


def written_chains(text: str) -> Iterator[tuple[str, ...]]:
    """The same in the running text of a page: in every piece of inline code."""
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        for match in _CHAIN.finditer(code):
            yield (match[1], *match[2].strip(".").split("."))
