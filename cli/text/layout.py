"""Lays out text for a terminal: character widths, Markdown tables, and wrapping between words."""

import re
import textwrap
import unicodedata
from collections.abc import Callable, Collection, Sequence

# A command that a message tells the user to type, up to the punctuation or the verb with which the sentence continues.
COMMAND = re.compile(
    r"""
    \b(?:mycli|hf)[ ] (?: '[^']*' | "[^"]*" | [^'"] )*?
    (?= [;,:.)]*$ | [;,:.)]+[ ] | [ ]\( | [ ](?:and|or)[ ]
      | [ ](?:answers|checks|continues|downloads|fetches|finds|frees|holds|lists|looks|prints|says|shows|writes)\b )
    """,
    re.VERBOSE,
)
NARROWEST = 20  # columns; narrower text is left to the terminal to wrap
_NO_BREAK = "\0"  # stands for a space inside a command while lines are wrapped


def width(text: str) -> int:
    """Return the columns `text` takes on a terminal: 2 for East Asian wide characters, 0 for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text: str, columns: int, right: bool = False) -> str:
    space = " " * (columns - width(text))
    return space + text if right else text + space


def table_width(widths: Sequence[int]) -> int:
    return sum(widths) + 3 * len(widths) + 1


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(width, column)) for column in zip(*rows, strict=True)]


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return a Markdown table; the first row holds the headings, the columns in `right` are aligned right."""
    widths = column_widths(rows)
    rule = ["-" * (w - 1) + ":" if i in right else "-" * w for i, w in enumerate(widths)]
    padded = [[pad(cell, w, i in right) for i, (cell, w) in enumerate(zip(row, widths, strict=True))] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (padded[0], rule, *padded[1:])]


def fitting(widths: Sequence[int], order: Sequence[int], columns: int) -> list[int]:
    """Return the longest prefix of `order` whose table columns fit into `columns`, sorted by position."""
    chosen: list[int] = []
    for index in order:
        if table_width([widths[i] for i in (*chosen, index)]) > columns:
            break
        chosen.append(index)
    return sorted(chosen)


def word_wrapped(text: str, columns: int) -> list[str]:
    """Wrap `text` between words to `columns`; commands and long words such as paths stay whole, to be copied."""
    joined = COMMAND.sub(lambda command: command[0].replace(" ", _NO_BREAK), text)
    lines = textwrap.wrap(joined, columns, break_long_words=False, break_on_hyphens=False) or [""]
    return [line.replace(_NO_BREAK, " ") for line in lines]


def wrap_lines(text: str, columns: int) -> str:
    """Wrap each line of `text`; unchanged on a terminal narrower than `NARROWEST`."""
    lines = text.split("\n")
    return "\n".join(part for line in lines for part in word_wrapped(line, columns)) if columns >= NARROWEST else text


class WordWrap:
    """Wraps streamed text between words at the edge of the terminal.

    Code blocks, lines indented by four spaces and table rows are not wrapped. A word is held back until it is complete;
    a wide character (Chinese, Japanese, Korean) counts as a word.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._spaces = self._word = self._line = ""
        self._in_code = False

    def feed(self, text: str) -> str:
        shown = []
        for character in text:
            if character == "\n":
                shown.append(self._place() + self._spaces + "\n")
                self._in_code ^= self._line.lstrip().startswith("```")
                self._column, self._spaces, self._line = 0, "", ""
                continue
            self._line += character
            if character in " \t":
                shown.append(self._place())
                self._spaces += character
            elif width(character) == 2:
                shown.append(self._place())
                self._word = character
                shown.append(self._place())
            else:
                self._word += character
        return "".join(shown)

    def flush(self) -> str:
        shown = self._place() + self._spaces
        self._column += width(self._spaces)
        self._spaces = ""
        return shown

    def _place(self) -> str:
        if not self._word:
            return ""
        needed = width(self._spaces) + width(self._word)
        breaks = self._column > 0 and self._column + needed > self._columns() and not self._is_preformatted()
        shown = "\n" + self._word if breaks else self._spaces + self._word
        self._column = width(self._word) if breaks else self._column + needed
        self._spaces = self._word = ""
        return shown

    def _is_preformatted(self) -> bool:
        return self._in_code or re.match(r"\s{4}|\t|\s*(\||```)", self._line) is not None
