"""Matches texts against compiled grammars."""

from collections.abc import Mapping
from types import MappingProxyType

from mycli.runtime.errors import UsageError
from mycli.runtime.sampling.grammars.grammar import Grammar
from mycli.runtime.sampling.grammars.lark import LarkRules
from mycli.runtime.tokenizer.tokenizer import Tokenizer


def matches(
    grammar: Grammar, tokenizer: Tokenizer, text: str, control: Mapping[str | None, int] = MappingProxyType({})
) -> bool:
    """Return whether a reply of exactly `text` matches; `control`: ids of the control tokens in it."""
    state = grammar.start()
    try:
        for piece in LarkRules(control).pieces(text):
            for token in [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special=False):
                state.accept(token)
    except UsageError:
        return False
    return state.complete
