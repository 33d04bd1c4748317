"""Finds a short ending of a reply under a grammar, and updates it as the reply grows.

The parser only lists the tokens that may come next, so the ending is searched greedily: text that the grammar forces,
else what closes strings and brackets, else the first value that is allowed. The result always matches the grammar, but
is not always the shortest ending.
"""

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Tokens tried in one search, 1 to 10 microseconds each. The first search runs once per grammar, later ones between two
# tokens of a reply, where every other sequence waits.
_FIRST_TRIES, _LATER_TRIES = 5_000, 1_000
_RETRY_TOKENS = 32  # tokens after a search without result until the next; doubled each time
_TEXT_REPEATS = 4  # closing characters in a row that only free text can have
# Bytes in order of preference. A second search puts the quote last, because it begins a string where none is open.
# Escapes and white space come after all others: they end nothing.
_CLOSING = b'"}]),'
_VALUES = b"0123456789@.:-TZ/_#+abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSUVWXY;=[{(<>|&!?*^%$'`~"
_CONTROL = 256  # symbols of control tokens are their ids plus this; those below are bytes

_FORCED = re.compile(rb"([^\xff]+)|\xff\[(\d+)\]")

Symbols = tuple[int, ...]


class SymbolTable:
    """The tokens of a vocabulary as symbols: bytes, and one symbol for each control token."""

    def __init__(self, pieces: Sequence[bytes], control: Iterable[int], ends: Iterable[int]) -> None:
        """`pieces`: the bytes of each token; `control`: ids of tokens that are no text; `ends`: the end tokens."""
        self._pieces, self._control = pieces, frozenset(control)
        self._ids = {piece: index for index, piece in enumerate(pieces) if piece and index not in self._control}
        self._longest = min(max(map(len, self._ids), default=1), 32)
        self.ends = sorted(ends)
        self.end = self.ends[0]
        rest = sorted(set(range(_CONTROL)) - {*_CLOSING, *_VALUES}, key=lambda byte: not 32 < byte < 127)
        self.choices = self.ids_of([*_VALUES, *rest])

    def ids_of(self, data: Iterable[int]) -> list[tuple[int, int]]:
        """Return each byte with its token, without those that the vocabulary lacks."""
        return [(byte, self._ids[bytes([byte])]) for byte in data if bytes([byte]) in self._ids]

    def symbols(self, token: int) -> Symbols:
        return (token + _CONTROL,) if token in self._control else tuple(self._pieces[token])

    def forced(self, data: bytes) -> Symbols:
        """Return the symbols of bytes that a parser forces, in which 0xff and an id in brackets are a control token."""
        symbols: list[int] = []
        for text, control in _FORCED.findall(data):
            symbols += text or [int(control) + _CONTROL]
        return tuple(symbols)

    def tokens(self, symbols: Symbols) -> list[int]:
        """Return tokens that spell `symbols`, the longest first; none if the vocabulary lacks one of the bytes."""
        tokens, start = [], 0
        while start < len(symbols):
            candidates = self.prefixes(symbols[start : start + self._longest])
            if not candidates:
                return []
            tokens.append(candidates[-1])
            start += max(len(self._pieces[candidates[-1]]), 1) if symbols[start] < _CONTROL else 1
        return tokens

    def prefixes(self, symbols: Symbols) -> list[int]:
        """Return the tokens that spell a beginning of `symbols`, the shortest first."""
        if not symbols:
            return [self.end]
        if symbols[0] >= _CONTROL:
            return [symbols[0] - _CONTROL]
        head = symbols[: self._longest]
        length = next((index for index, symbol in enumerate(head) if symbol >= _CONTROL), len(head))
        text = bytes(head[:length])
        return [self._ids[text[:end]] for end in range(1, length + 1) if text[:end] in self._ids]


class Ending:
    """The ending of one reply. tokens: including the end token; None if no ending was found."""

    def __init__(self, parser: Any, table: SymbolTable, closing: Symbols = (), inside: bool = False) -> None:
        """closing: the tag that ends reasoning; inside: the reply begins in it."""
        self._parser, self._table = parser, table
        self._closing, self._inside = (closing, table.tokens(closing)), inside
        self._symbols: Symbols = ()  # of `tokens` without the end token
        self.tokens: list[int] | None = None
        self._missed, self._retry = 0, _RETRY_TOKENS  # tokens since a search that found nothing, and until the next
        self._search(_FIRST_TRIES)

    def copy(self, parser: Any) -> "Ending":
        """Return the ending for another parser in the same state."""
        other = copy.copy(self)
        other._parser = parser
        return other

    def save(self) -> tuple[Symbols, list[int] | None]:
        return self._symbols, self.tokens

    def restore(self, saved: tuple[Symbols, list[int] | None]) -> None:
        """Restore the result of `save`, after the parser was rolled back."""
        self._symbols, self.tokens = saved

    @property
    def next_tokens(self) -> list[int]:
        """The tokens with which the ending may begin; several if tokens are prefixes of each other."""
        return [] if self.tokens is None else self._table.prefixes(self._symbols)

    def follows(self, other: "Ending") -> bool:
        """Return whether `other` ends with all of this ending, so that the tokens between brought it no nearer."""
        return other._symbols[len(other._symbols) - len(self._symbols) :] == self._symbols

    def advance(self, token: int, inside: bool = False) -> None:
        """Update the ending after the parser consumed `token`; inside: the reply is in its reasoning then."""
        crossed, self._inside = inside != self._inside, inside
        if self.tokens is None:
            self._missed += 1
            if crossed:
                self._search(_LATER_TRIES)
            elif self._missed == self._retry:
                self._missed, self._retry = 0, 2 * self._retry
                self._search(_LATER_TRIES)
            return
        symbols = self._table.symbols(token)
        if self._symbols[: len(symbols)] == symbols:
            first, self._symbols = self.tokens[0], self._symbols[len(symbols) :]
            self.tokens = self.tokens[1:] if token == first else self._spell(self._symbols)
        # The first test is ten times faster; it leaves out endings after which nothing but the end can come.
        elif self._parser.validate_tokens(self.tokens) < len(self.tokens) and not _completes(
            self._parser, self.tokens[:-1]
        ):
            self._search(_LATER_TRIES)

    def _spell(self, symbols: Symbols) -> list[int]:
        return [*self._table.tokens(symbols), self._table.end]

    def _search(self, tries: int) -> None:
        # A quote ends a string where one is open and else begins one, so it is preferred once, and once not.
        closing = self._closing if self._inside else ((), [])
        search = _Search(self._parser, self._table, closing, self.tokens or [], self._symbols)
        quoted = search.run(_CLOSING, tries)
        other = search.run(_CLOSING[1:] + _CLOSING[:1], tries if quoted is None else min(2 * len(quoted), tries))
        paths = [self._rest()] if quoted is None and other is None else [quoted, other]
        endings = [(self._spell(path), path) for path in paths if path is not None]
        self.tokens, self._symbols = min(endings, key=lambda ending: len(ending[0]), default=(None, ()))

    def _rest(self) -> Symbols | None:
        # A later part of the previous ending: the reply has chosen a later key of an object.
        starts = range(len(self._symbols) - 1, 0, -1)
        rests = (self._symbols[start:] for start in starts)
        return next((rest for rest in rests if _completes(self._parser, self._table.tokens(rest))), None)


class _Search:
    # Searches an ending, or a path to a state from which the previous ending, `tail`, can follow: it closes all that
    # was open before the last token, so mostly only the few things opened since are left.

    def __init__(
        self,
        parser: Any,
        table: SymbolTable,
        closing: tuple[Symbols, list[int]],
        tail: list[int],
        end: Symbols,
    ) -> None:
        self._start, self._table, self._closing = parser, table, closing
        self._tail, self._tail_symbols = tail[:-1], end

    def run(self, closing: bytes, tries: int) -> Symbols | None:
        """Return the symbols of an ending found within about `tries` tries, preferring those of `closing` in order."""
        parser, path = self._start.deep_copy(), list[int]()
        fresh = [*self._table.ids_of(closing), *self._table.choices]
        order, left = fresh, tries
        while left > 0:
            if parser.is_accepting():
                return tuple(path)
            if self._tail and _completes(parser, self._tail):
                return (*path, *self._tail_symbols)
            # The tag only at the start: a string of the answer may have it as text, any number of times.
            if step := self._forced(parser) or (() if path else self._closed(parser)):
                path += step
                order, left = fresh, left - len(step)
                continue
            place = next((place for place, (_, token) in enumerate(order) if parser.try_consume_tokens([token])), None)
            if place is None:
                return None
            path.append(order[place][0])
            left -= place + 1
            # A chosen symbol moves to the end of the order, so that a pattern that needs several characters gets all.
            # Closing symbols keep their place, unless they repeat as they can only in free text.
            closes = path[-1] in _CLOSING and path[-_TEXT_REPEATS:].count(path[-1]) < _TEXT_REPEATS
            order = fresh if closes else [*order[:place], *order[place + 1 :], order[place]]
        return None

    def _forced(self, parser: Any) -> Symbols:
        symbols = self._table.forced(parser.compute_ff_bytes())
        tokens = self._table.tokens(symbols)
        return symbols if tokens and parser.try_consume_tokens(tokens) == len(tokens) else ()

    def _closed(self, parser: Any) -> Symbols:
        symbols, tokens = self._closing
        if tokens and parser.validate_tokens(tokens) == len(tokens):
            parser.try_consume_tokens(tokens)
            return symbols
        return ()


def _completes(parser: Any, tokens: list[int]) -> bool:
    branch = parser.deep_copy()
    return bool(branch.try_consume_tokens(tokens) == len(tokens) and branch.is_accepting())
