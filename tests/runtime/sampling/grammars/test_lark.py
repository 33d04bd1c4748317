"""Test the rules around an output format: control tokens, text without calls, and reasoning before it."""

import json
from pathlib import Path

import pytest

from mycli.runtime.sampling.grammars.grammar import GrammarCompiler
from mycli.runtime.sampling.grammars.lark import CallGrammar, LarkRules, Prelude
from tests.support.grammars import matches
from tests.support.small_tokenizers import added, make

THINK = Prelude("<think>", "</think>")


def test_the_longest_of_the_control_tokens_at_a_place_is_taken() -> None:
    rules = LarkRules({"<a>": 1, "<a>b": 2, "": 3, None: 4})
    assert rules.pieces("x<a>b<a>y") == ["x", 2, 1, "y"]
    assert rules.literal('"<a>') == r'"\"" <[1]>'


def test_reasoning_that_was_opened_is_closed(tmp_path: Path) -> None:
    """The tags are text here, and could be read as text of the answer."""
    tokenizer = make(tmp_path)
    compiler = GrammarCompiler(tokenizer, frozenset(tokenizer.eos))
    schema = compiler.schema(json.dumps({"enum": ["yes"]}), "s.json", THINK)
    schema.compile()
    for text in ('"yes"', ' <think>a</think> "yes"', '<think></think>"yes"'):
        assert matches(schema, tokenizer, text), text
    assert not matches(schema, tokenizer, '<think>a "yes"')
    grammar = compiler.any_text(THINK)
    for text in ("<think>a</think>\nb", "a <b>", "a<think>", "<thin"):
        assert matches(grammar, tokenizer, text), text
    for text in ("<think>a", "<think>a</think>", " \n"):
        assert not matches(grammar, tokenizer, text), text


@pytest.mark.parametrize("prelude", [None, THINK], ids=["plain", "reasoning"])
@pytest.mark.parametrize("special", [False, True], ids=["text", "control"])
def test_calls_in_text_are_whole(tmp_path: Path, special: bool, prelude: Prelude | None) -> None:
    """Regression: no text could follow a call at the beginning, nor reasoning with tags that are text."""
    marks: dict[str | None, int] = {"<call>": 257} if special else {}
    tokens = [added(index, str(name), special=True) for name, index in {"<end>": 256, **marks}.items()]
    tokenizer = make(tmp_path, added_tokens=tokens)
    calls = [CallGrammar("<call>", json.dumps({"enum": [1, 2]}), "</call>")]
    grammar = GrammarCompiler(tokenizer, frozenset(tokenizer.eos)).calls_in_text(calls, prelude)
    grammar.compile()

    def accepted(text: str) -> bool:
        return matches(grammar, tokenizer, text, marks)

    for text in ("a", "<call>1</call>", "<call>1</call>\nb", "a <call>1</call>b<call>2</call>c\nd"):
        assert accepted(text), text
    for text in (" ", "a<call>", "<call>3</call>", "a<call>1</call>b<call>3</call>", "a<call>1</call>b<call>"):
        assert not accepted(text), text
    if prelude is not None:
        assert accepted("<think>a</think>b") and accepted("<think>a</think><call>1</call>")
        assert not accepted("<think>a") and not accepted("<think>a<call>1</call>")
