"""Shows the examples in docstrings as Python: Markdown would take `>>>` for a quotation."""

from __future__ import annotations

from typing import Any

import griffe


class ExamplesAsCode(griffe.Extension):
    """Fences every example of a docstring."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for each object that has been read."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around each run of lines from `>>>` to the next blank line."""
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        if line.startswith(">>>") and not inside:
            lines.append("```python")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(_code(line) if inside else line)
    return "\n".join(lines).rstrip("\n")


def _code(line: str) -> str:
    """A line of an example: code without its prompt, and what it prints as a comment."""
    if line.startswith((">>>", "...")):
        return line[4:]
    return f"# {line}"
