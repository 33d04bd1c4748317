"""Measures and checks the language of the source: `python -m tests.support.language [PATH ...]` prints both.

Reports docstring and comment lines by room, and findings as `file:line: rule: text`. Without a path it reads the
product and the docs. Uses only the syntax tree; imports nothing of the product.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.paths import ROOT

PARTS = ("cli", "quant", "runtime")
DATA = Path("runtime/pico")  # a model shipped as data, with its training programs

MAX_DOCSTRING_SHARE = 0.08
MIN_COMMENT_SHARE = 0.02
MAX_SENTENCE_WORDS = 40
MAX_WIDTH = 100  # width of a line of prose in the docs

BAD_START = re.compile(r"(?:Of|Those|What|One that)\b|As `")
BANNED = re.compile(
    r"\b(?:"
    r"whoever|whomever|nobody|everybody|whence|hither|thereby"
    r"|(?:is|are|was|were|be|been|being) (?:told|heard|asked|judged|believed)|heard|hears"
    r"|so many|of them|beside|at once|go(?:es)? on|going on|has it not|have it not|made ready"
    r"|knows? of|knows? no|knows? only|does not know|do not know|speaks?"
    r")\b",
    re.IGNORECASE,
)
# A vector register has lanes; a KV cache has slots.
LANES = re.compile(r"\blanes?\b", re.IGNORECASE)
LANES_ALLOWED = ("runtime/kernels", "tests/runtime/kernels", "tests/ptx", "docs/kernels.md", "docs/cpu.md")
# Too vague as the name of a variable or a parameter: a name must say what the value is.
VAGUE_NAMES = {"found", "given", "own", "made", "kept", "one", "told", "wanted", "asked", "each", "heard", "said"}
PRAGMA = re.compile(r"#\s*(?:type:|noqa|!)")


@dataclass(frozen=True)
class Finding:
    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


@dataclass
class Measures:
    """Counts the lines of a room. A trailing comment is a line of code; `comments` counts comment-only lines."""

    lines: int = 0
    blank: int = 0
    docstrings: int = 0
    comments: int = 0
    trailing: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def code(self) -> int:
        return self.lines - self.blank - self.docstrings - self.comments

    def add(self, other: "Measures") -> None:
        self.lines += other.lines
        self.blank += other.blank
        self.docstrings += other.docstrings
        self.comments += other.comments
        self.trailing += other.trailing
        self.findings += other.findings


def room(path: Path) -> str:
    """Return the two leading folders of a module (`runtime/engine`); a page of the docs is its own room."""
    folders = path.parent.parts[:2]
    return path.as_posix() if path.suffix == ".md" else "/".join(folders)


def files(*folders: str) -> list[Path]:
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    relative = sorted(path.relative_to(ROOT) for path in paths if "__pycache__" not in path.parts)
    return [path for path in relative if not path.is_relative_to(DATA)]


def pages() -> list[Path]:
    paths = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT) for path in paths]


def measure(path: Path) -> Measures:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".md":
        return Measures(lines=text.count("\n"), findings=list(_check_page(path, text)))
    if path.suffix != ".py":
        return Measures(findings=list(_check_cpp(path, text)))
    return _measure_python(path, text)


def _measure_python(path: Path, text: str) -> Measures:
    tree = ast.parse(text, str(path))
    docstrings = list(_docstrings(tree))
    lines = text.splitlines()
    documented = {number for node in docstrings for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    measures = Measures(lines=len(lines), docstrings=len(documented))
    measures.blank = sum(not line.strip() for number, line in enumerate(lines, 1) if number not in documented)
    findings = measures.findings
    for node in docstrings:
        findings += _check_docstring(path, node)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if lines[token.start[0] - 1].lstrip().startswith("#"):
                measures.comments += 1
            else:
                measures.trailing += 1
            if not PRAGMA.match(token.string):
                findings += _check_words(path, token.start[0], "comment", token.string)
    documentation = {id(node) for node in docstrings}
    for child in ast.walk(tree):
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and id(child) not in documentation:
            # A string with a space is a sentence or a part of one; keys and names have none.
            if " " in child.value:
                findings += _check_words(path, child.lineno, "message", child.value)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and child.id in VAGUE_NAMES:
            findings.append(Finding(path, child.lineno, "name", child.id))
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and child.attr in VAGUE_NAMES:
            findings.append(Finding(path, child.lineno, "name", f".{child.attr}"))
        elif isinstance(child, ast.arg) and child.arg in VAGUE_NAMES:
            findings.append(Finding(path, child.lineno, "name", child.arg))
        elif isinstance(child, ast.FunctionDef) and child.name in VAGUE_NAMES:
            findings.append(Finding(path, child.lineno, "name", f"def {child.name}"))
    findings.sort(key=lambda finding: finding.line)
    return measures


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    # A bare string below an attribute documents it, and counts as a docstring too.
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value


def _check_docstring(path: Path, node: ast.Constant) -> Iterator[Finding]:
    text = str(node.value).strip()
    if BAD_START.match(text):
        yield Finding(path, node.lineno, "start", text.splitlines()[0])
    yield from _check_words(path, node.lineno, "docstring", str(node.value))


def _check_words(path: Path, line: int, rule: str, text: str) -> Iterator[Finding]:
    patterns = [BANNED] if path.as_posix().startswith(LANES_ALLOWED) else [BANNED, LANES]
    for match in (match for pattern in patterns for match in pattern.finditer(text)):
        yield Finding(path, line + text.count("\n", 0, match.start()), rule, f"{match[0]!r} in {_excerpt(text, match)}")


def _excerpt(text: str, match: re.Match[str]) -> str:
    return " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())


def _check_cpp(path: Path, text: str) -> Iterator[Finding]:
    for match in re.finditer(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"", text, re.DOTALL):
        yield from _check_words(path, text.count("\n", 0, match.start()) + 1, "comment", match[0])


def _check_page(path: Path, text: str) -> Iterator[Finding]:
    for number, content in enumerate(_without_code(text).splitlines(), 1):
        if _too_wide(content):
            yield Finding(path, number, "width", f"{len(content)} characters")
    for line, paragraph in _paragraphs(text):
        yield from _check_words(path, line, "docs", paragraph)
        for sentence in re.split(r"[.!?][*)\"]*\s+", paragraph):
            count = len(re.findall(r"\S*\w\S*", sentence))
            if count > MAX_SENTENCE_WORDS:
                yield Finding(path, line, f"{count} words", f"{sentence[:70]} ...")


def _without_code(text: str) -> str:
    """Replace fenced code and HTML comments with empty lines."""
    no_prose = re.compile(r"^( *)(```|~~~).*?^\1\2|<!--.*?-->", re.DOTALL | re.MULTILINE)
    return no_prose.sub(lambda match: "\n" * match[0].count("\n"), text)


def _too_wide(line: str) -> bool:
    """Return whether a line of prose could be wrapped; code spans and links cannot be."""
    if len(line) <= MAX_WIDTH or line.startswith(("|", "    ", "#", "!", "<")):
        return False
    return len(re.findall(r"(?:`[^`]*`|\]\([^)]*\)|\S)+", line)) > 1


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the prose of a page with its first line number: paragraphs, list items, table cells; not code or HTML."""
    text = _without_code(text)
    start, paragraph = 1, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        new_block = not stripped or re.match(r"[-*+] |\d+\. |#|\||>|<", stripped)
        if new_block and paragraph:
            yield start, paragraph
            paragraph = ""
        if stripped.startswith("|"):
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", stripped) if cell.strip())
        elif stripped:
            start = start if paragraph else number
            paragraph = f"{paragraph}\n{stripped}" if paragraph else stripped


def by_room(paths: Iterable[Path]) -> dict[str, Measures]:
    rooms: dict[str, Measures] = {}
    for path in paths:
        rooms.setdefault(room(path), Measures()).add(measure(path))
    return rooms


def table(rooms: dict[str, Measures]) -> str:
    """Return one line for each room, then the sums of code and of pages."""
    code, docs = Measures(), Measures()
    for name, measures in rooms.items():
        (docs if name.endswith(".md") else code).add(measures)
    width = max(map(len, rooms), default=4)
    rows = [f"{'room':{width}}  lines   code  docstrings    comments  trailing  findings"]
    for name, measures in [*rooms.items(), ("code", code), ("docs", docs)]:
        lines = max(measures.lines, 1)
        rows.append(
            f"{name:{width}} {measures.lines:6} {measures.code:6}"
            f" {measures.docstrings:5} {measures.docstrings / lines:5.1%}"
            f" {measures.comments:5} {measures.comments / lines:5.1%}"
            f" {measures.trailing:9} {len(measures.findings):9}"
        )
    return "\n".join(rows)


def main(arguments: list[str]) -> int:
    if arguments:
        paths = []
        for argument in arguments:
            path = Path(argument).resolve().relative_to(ROOT)
            paths += files(str(path)) + pages_below(path) if (ROOT / path).is_dir() else [path]
    else:
        paths = files(*PARTS) + pages()
    rooms = by_room(paths)
    findings = [finding for measures in rooms.values() for finding in measures.findings]
    if arguments:
        print(*findings, sep="\n")
    print(table(rooms))
    kinds = Counter(finding.rule for finding in findings)
    print(", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    return int(bool(findings))


def pages_below(folder: Path) -> list[Path]:
    return [path for path in pages() if path.is_relative_to(folder)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
