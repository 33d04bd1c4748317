"""Fills the code examples of a page from the source: `python -m tests.support.code_examples docs/contributing.md`.

A marker `<!-- code: PATH -->` is followed by the whole file in a code block, `<!-- code: PATH:NAME -->` by one
definition, and `<!-- code: PATH#TEXT -->` by the lines that contain TEXT.
"""

import ast
import re
import sys
from pathlib import Path

from tests.support.paths import ROOT

EXAMPLE = re.compile(r"(<!-- code: ([^\s:#]+)(?::(\w+)|#([^\n]+?))? -->\n)(?:```.*?\n```\n)?", re.DOTALL)


def source(path: str, name: str | None, text: str | None) -> str:
    """Return the file at `path`, or its definition `name`, or its lines that contain `text`."""
    code = (ROOT / path).read_text(encoding="utf-8")
    if text is not None:
        code = "\n".join(line for line in code.splitlines() if text in line)
    elif name is not None:
        definitions = (
            node for node in ast.parse(code).body if name in (_name(node), _name(getattr(node, "target", None)))
        )
        code = ast.get_source_segment(code, next(definitions)) or ""
    if not code:
        raise ValueError(f"{path}: no {name or text}")
    return code.rstrip("\n")


def _name(node: ast.AST | None) -> str | None:
    """Return the name of a function, a class or a variable."""
    return getattr(node, "name", None) or getattr(node, "id", None)


def with_code(page: str) -> str:
    def block(match: re.Match[str]) -> str:
        marker, path, name, text = match.groups()
        return f"{marker}```python\n# {path}\n{source(path, name, text)}\n```\n"

    return EXAMPLE.sub(block, page)


if __name__ == "__main__":
    page_path = Path(sys.argv[1])
    page_path.write_text(with_code(page_path.read_text(encoding="utf-8")), encoding="utf-8")
