"""How text lies in the columns of a terminal: widths, padding, tables, and words that are not broken at the edge.

Knows characters and columns; does not print, and does not know what is on the other end.
"""

import re
import textwrap
import unicodedata
from collections.abc import Callable, Collection, Sequence


def width(text: str) -> int:
    """Columns that `text` takes on a terminal: two for East Asian wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text: str, columns: int, right: bool = False) -> str:
    """`text` with spaces up to `columns`; `right`: before it."""
    space = " " * (columns - width(text))
    return space + text if right else text + space


def table_width(widths: Sequence[int]) -> int:
    """Columns that a table takes whose cells take `widths`."""
    return sum(widths) + 3 * len(widths) + 1


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """A Markdown table of `rows`, the first of which are the headings; the columns in `right` are aligned right."""
    widths = [max(width(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * (w - 1) + ":" if i in right else "-" * w for i, w in enumerate(widths)]
    padded = [[pad(cell, w, i in right) for i, (cell, w) in enumerate(zip(row, widths, strict=True))] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (padded[0], rule, *padded[1:])]


def fitting(rows: Sequence[Sequence[str]], order: Sequence[int], columns: int) -> list[int]:
    """The columns of a table to show in `columns` of a terminal: the first of `order` that fit together, in place."""
    widths = [max(width(row[i]) for row in rows) for i in range(len(rows[0]))]
    chosen: list[int] = []
    for index in order:
        if table_width([widths[i] for i in (*chosen, index)]) > columns:
            break
        chosen.append(index)
    return sorted(chosen)


# A command that a text tells a person to type: as far as its sentence goes on behind it, with a mark or a verb.
COMMAND = re.compile(
    r"""
    \b(?:mycli|hf)[ ] (?: '[^']*' | "[^"]*" | [^'"] )*?
    (?= [;,:.)]*$ | [;,:.)]+[ ] | [ ]\( | [ ](?:and|or)[ ]
      | [ ](?:answers|checks|continues|fetches|finds|frees|holds|lists|looks|prints|says|shows|writes)\b )
    """,
    re.VERBOSE,
)
NARROWEST = 20  # columns in which a text is broken; in fewer the terminal does it
_INSIDE = "\0"  # a space that no line is broken at


def word_wrapped(text: str, columns: int) -> list[str]:
    """`text` as lines broken between words to fit `columns`.

    What is longer stays whole: words such as paths, and commands, which a person may copy and paste.
    """
    joined = COMMAND.sub(lambda command: command[0].replace(" ", _INSIDE), text)
    lines = textwrap.wrap(joined, columns, break_long_words=False, break_on_hyphens=False) or [""]
    return [line.replace(_INSIDE, " ") for line in lines]


def broken(text: str, columns: int) -> str:
    """The lines of `text` as `word_wrapped` breaks them; as they are where a line has no room for a few words."""
    lines = text.split("\n")
    return "\n".join(part for line in lines for part in word_wrapped(line, columns)) if columns >= NARROWEST else text


class WordWrap:
    """Breaks lines between words as a text streams in, where they would run over the edge of the terminal.

    What must keep its lines keeps them: code between fences, what is indented by four, and tables. A word is held until
    it is complete; characters of scripts without spaces are not.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._spaces = self._word = self._line = ""
        self._fenced = False

    def feed(self, text: str) -> str:
        """What of the text so far is certain to be shown next."""
        shown = []
        for character in text:
            if character == "\n":
                shown.append(self._place() + self._spaces + "\n")
                self._fenced ^= self._line.lstrip().startswith("```")
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
        """The rest, at the end of the text or of a part of it."""
        shown = self._place() + self._spaces
        self._column += width(self._spaces)
        self._spaces = ""
        return shown

    @property
    def column(self) -> int:
        """Where the next word begins, from 0."""
        return self._column

    def _place(self) -> str:
        if not self._word:
            return ""
        taken = width(self._spaces) + width(self._word)
        breaks = self._column > 0 and self._column + taken > self._columns() and not self._kept()
        shown = "\n" + self._word if breaks else self._spaces + self._word
        self._column = width(self._word) if breaks else self._column + taken
        self._spaces = self._word = ""
        return shown

    def _kept(self) -> bool:
        """Whether the line is one that must not be broken."""
        return self._fenced or re.match(r"\s{4}|\t|\s*(\||```)", self._line) is not None
