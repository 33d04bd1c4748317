"""Writes the Lark rules around an output format: control tokens, text without calls, and reasoning before it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prelude:
    """Free text before the constrained output: the model's reasoning, up to `close`.

    With `opened` the prompt ends inside it; otherwise the reply may start with `open`, or have no reasoning. After
    `budget` tokens it is closed; None: where the model or a limit of the reply ends it.
    """

    open: str
    close: str
    opened: bool = False
    budget: int | None = None


@dataclass(frozen=True)
class CallGrammar:
    """JSON of a `schema` between two literal texts; strict: refuse keywords that are not supported."""

    before: str
    schema: str
    after: str
    strict: bool = False


class LarkRules:
    """Rules for one tokenizer. control: the ids of its control tokens by their text."""

    def __init__(self, control: Mapping[str | None, int]) -> None:
        self.control = control

    def pieces(self, text: str) -> list[str | int]:
        """Split a text into ordinary text and the ids of control tokens."""
        pieces, rest = list[str | int](), text
        while rest:
            places = [(at, -len(token), token) for token in self.control if token and (at := rest.find(token)) >= 0]
            at, _, token = min(places, default=(len(rest), 0, ""))
            if at:
                pieces.append(rest[:at])
            if token:
                pieces.append(self.control[token])
            rest = rest[at + len(token) :]
        return pieces

    def literal(self, text: str) -> str:
        """Return a text as a sequence of strings and control tokens."""
        # Control tokens are written by id: their characters would match ordinary tokens.
        return " ".join(
            json.dumps(piece, ensure_ascii=False) if isinstance(piece, str) else f"<[{piece}]>"
            for piece in self.pieces(text)
        )

    def plain(self, text: str) -> bool:
        """Return whether a text has no control token."""
        return all(isinstance(piece, str) for piece in self.pieces(text))

    def texts(self, prelude: Prelude | None, mark: str = "") -> str:
        """Return the terminals FIRST, text at the beginning of an answer, and MORE, later text, both without `mark`."""
        first, more = f"/[ \\t\\r\\n]*[^ \\t\\r\\n](.|\\n)*/{self.outside(prelude)}", "/(.|\\n)+/"
        if mark and mark not in self.control:
            without = f" & ~(/(.|\\n)*/ {json.dumps(mark)} /(.|\\n)*/)"
            first, more = first + without, more + without
        return f"FIRST: {first}\nMORE: {more}"

    def outside(self, prelude: Prelude | None) -> str:
        """Return what restricts an expression to text that does not begin with the opening tag of reasoning."""
        # An opening tag that is not a control token could also be parsed as the beginning of the text.
        if prelude is None or not self.plain(prelude.open):
            return ""
        return f" & ~(/[ \\t\\r\\n]*/ {json.dumps(prelude.open)} /(.|\\n)*/)"

    def after(self, prelude: Prelude | None, source: str) -> str:
        """Return `source` preceded by reasoning; unchanged without a prelude."""
        if prelude is None:
            return source
        first, *rest = grammars_of(source)
        body = [{**first, "name": "body"}, *rest]
        close = self.literal(prelude.close)
        if not self.plain(prelude.close):
            rules = f"thought: TEXT? {close}\nTEXT: /(.|\\n)+/"
        else:
            rules = f"thought[suffix={json.dumps(prelude.close)}]: /(.|\\n)*/"
        whole = "thought" if prelude.opened else f"({self.literal(prelude.open)} thought)?"
        if not prelude.opened:
            whole = f"SPACE? {whole}"  # before the opening tag
        lark = f"start: {whole} SPACE? @body\n{rules}\nSPACE: /[ \\t\\r\\n]{{1,4}}/"
        return json.dumps({"grammars": [{"lark_grammar": lark}, *body]})


def grammars_of(source: str) -> list[dict[str, Any]]:
    """Return the grammars of a source in llguidance's format, which is JSON or Lark alone."""
    return list(json.loads(source)["grammars"]) if source.startswith("{") else [{"lark_grammar": source}]
