"""Parse PTX into functions: their parameters, and their statements in blocks that end at labels and branches.

Covers the part of the PTX ISA's syntax that Triton generates.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LABEL = re.compile(r"(\$?[A-Za-z_$][\w$]*):(?!:)")
_ENDS_BLOCK = re.compile(r"^(@\S+\s+)?(bra|ret)\b")


@dataclass(frozen=True)
class Instruction:
    """The parsed instruction. guard: predicate, "!" before it if negated; parts: the opcode split at dots."""

    guard: str | None
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        """Return the opcode up to its first dot."""
        return self.parts[0]

    @property
    def kind(self) -> str:
        """Return the last type of the opcode."""
        return self.parts[-1]


@dataclass(frozen=True)
class Function:
    """The parsed function. blocks: of statements, "{" and "}" among them; labels: the block at which each begins."""

    name: str
    entry: bool
    parameters: tuple[str, ...]
    result: str | None
    blocks: tuple[tuple[str, ...], ...]
    labels: dict[str, int]


def operands(text: str) -> list[str]:
    """Split a list at the commas outside all brackets."""
    found, depth, current = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += char
    return [*found, current.strip()] if current.strip() else found


def instruction(text: str) -> Instruction:
    """Parse one statement without its semicolon."""
    guard, rest = None, text.strip()
    if match := re.match(r"^@(!?)(\S+)\s+(.*)$", rest, re.DOTALL):
        guard, rest = match[1] + match[2], match[3].strip()
    code, _, given = rest.partition(" ") if " " in rest.split("\t")[0] else rest.partition("\t")
    return Instruction(guard, tuple(code.split(".")), tuple(operands(given)), text)


def _statements(body: str) -> Iterator[tuple[str, bool]]:
    """Yield each statement of a function, and whether it is a label."""
    place = 0
    while place < len(body):
        if body[place].isspace() or body[place] == ";":
            place += 1
        elif body[place] in "{}":
            yield body[place], False
            place += 1
        elif label := _LABEL.match(body, place):
            yield label[1], True
            place = label.end()
        else:
            end = body.index(";", place)
            yield body[place:end].strip(), False
            place = end + 1


def _function(kind: str, head: str, body: str) -> Function:
    lists = re.findall(r"\(([^()]*)\)", head)
    name, result = re.sub(r"\([^()]*\)", "", head).split()[0], None
    if kind == "func" and head.strip().startswith("("):
        result, lists = lists[0].split()[-1], lists[1:]
    parameters = tuple(one.split()[-1] for one in operands(lists[0])) if lists else ()
    blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for statement, is_label in _statements(body):
        if is_label:
            blocks.append([])
            labels[statement] = len(blocks) - 1
            continue
        blocks[-1].append(statement)
        if _ENDS_BLOCK.match(statement):
            blocks.append([])
    return Function(name, kind == "entry", parameters, result, tuple(tuple(block) for block in blocks), labels)


def functions(ptx: str) -> list[Function]:
    """Return all functions of a module that have a body, in order."""
    text = re.sub(r"//[^\n]*", "", ptx)
    text = re.sub(r"^\s*\.(loc|file)\b[^\n]*\n", "", text, flags=re.MULTILINE).split(".section")[0]
    found = []
    for match in re.finditer(r"\.(entry|func)\s*", text):
        place, depth = match.end(), 0
        while depth or text[place] not in "{;":
            depth += (text[place] == "(") - (text[place] == ")")
            place += 1
        if text[place] == ";":
            continue  # a declaration only
        end, depth = place + 1, 1
        while depth:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        found.append(_function(match[1], text[match.end() : place], text[place + 1 : end - 1]))
    return found


def shared_symbols(ptx: str) -> list[str]:
    """Return the names of shared memory whose size is set at launch: all of them begin at its start."""
    return re.findall(r"\.extern\s+\.shared\s+[^;]*?(\w+)\[\]", ptx)
