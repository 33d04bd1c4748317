"""Test that replies under a grammar end in a matching state before their limits, whatever the model prefers."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.runtime.sampling.grammars.grammar import Grammar, GrammarCompiler
from mycli.runtime.sampling.grammars.lark import Prelude
from mycli.runtime.sampling.grammars.loops import COPIES, LEAST_TOKENS, LoopDetector
from mycli.runtime.sampling.grammars.reasoning import reasoning_prelude
from mycli.runtime.sampling.grammars.state import ReplyLimits
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.tokenizer.parsing.reasoning_parser import find_reasoning_format
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.paths import PICO
from tests.support.small_tokenizers import added, make

SIZE = 4096
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["value", "children"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
    "any": {},
    "array": {"type": "array", "items": {"type": "number"}, "minItems": 3},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}x+$"},
    "formats": {
        "type": "object",
        "properties": {"at": {"type": "string", "format": "date-time"}, "id": {"type": "string", "format": "uuid"}},
        "required": ["at", "id"],
    },
    "alternatives": {"anyOf": [{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}, NODE]},
}
SCHEMAS["alternatives"] = {**SCHEMAS["alternatives"], "$defs": {"node": NODE}}


@pytest.fixture(scope="module")
def pico() -> Tokenizer:
    return Tokenizer.load(PICO, SIZE)


def grammar_of(schema: dict[str, Any], pico: Tokenizer) -> Grammar:
    return Grammar.from_schema(json.dumps(schema), "s.json", pico, frozenset(pico.eos))


def draw(pico: Tokenizer, grammar: Grammar, limits: ReplyLimits, seed: int = 0, dislike: str = '"}]') -> list[int]:
    """Return the tokens of a model with low logits for the end and for the characters `dislike`."""
    size = len(pico.vocabulary)
    noise = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=1.0, seed=seed)
    state = grammar.start(limits)
    sampler = Sampler(params, size, torch.device("cpu"), constraint=state)
    against = [
        index
        for index in range(size)
        if index in pico.eos or any(letter in (pico.piece(index, False) or b"").decode("latin-1") for letter in dislike)
    ]
    ids: list[int] = []
    while len(ids) < (limits.tokens or 500):
        logits = torch.randn(1, size, generator=noise)
        logits[0, against] -= 30.0
        ids.append(int(sampler.sample(logits)))
        if ids[-1] in pico.eos:
            break
    return ids


def shortest(grammar: Grammar) -> int:
    ending = grammar._ending  # for a reply without tokens
    assert ending is not None and ending.tokens is not None
    return len(ending.tokens)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_reply_parses_at_every_limit_that_has_room_for_one(pico: Tokenizer, name: str) -> None:
    """The limit includes the end token; a model that opens arrays and never closes a string is forced to end."""
    grammar = grammar_of(SCHEMAS[name], pico)
    least = shortest(grammar)
    for limit in (least, least + 1, least + 7, least + 30, least + 80):
        ids = draw(pico, grammar, ReplyLimits(limit), seed=limit)
        assert ids[-1] in pico.eos, (limit, pico.decode(ids))
        json.loads(pico.decode(ids[:-1]))


@pytest.mark.parametrize("pattern", ["(yes|no), (sir|madam)", "[a-z]+@[a-z]+[.]com", "a{500}b*", "[a-z]+ [a-z]+[.]"])
def test_expressions_end_in_time(pico: Tokenizer, pattern: str) -> None:
    grammar = Grammar.from_regex(pattern, pico, frozenset(pico.eos))
    limit = shortest(grammar) + 12
    ids = draw(pico, grammar, ReplyLimits(limit), dislike=".c")
    assert ids[-1] in pico.eos and re.fullmatch(pattern, pico.decode(ids[:-1]))


@pytest.mark.parametrize("pattern", [r"(.|\n)*END", "a{6000}"], ids=["free", "long"])
def test_an_ending_that_is_not_found_limits_nothing(pico: Tokenizer, pattern: str) -> None:
    grammar = Grammar.from_regex(pattern, pico, frozenset(pico.eos))
    assert grammar._ending is not None and grammar._ending.tokens is None
    assert len(draw(pico, grammar, ReplyLimits(40))) == 40


def test_the_ending_is_one_after_every_token(pico: Tokenizer) -> None:
    for name, schema in SCHEMAS.items():
        grammar = grammar_of(schema, pico)
        state = grammar.start()
        noise = torch.Generator().manual_seed(1)
        for _ in range(60):
            allowed = state.apply(torch.randn(1, SIZE, generator=noise))
            token = int(allowed.argmax())
            state.accept(token)
            if token in pico.eos:
                break
            ending = state._ending.tokens
            assert ending is not None, name
            parser = state._parser.deep_copy()
            assert parser.try_consume_tokens(ending[:-1]) == len(ending) - 1 and parser.is_accepting()


def test_a_later_key_than_that_of_the_ending_keeps_the_rest_of_it(pico: Tokenizer) -> None:
    """Without it no ending is found: an object with other keys may have many before a required one."""
    row = {"type": "array", "items": {"enum": ["a long sentence of words", "B"]}, "minItems": 2, "maxItems": 4}
    rows = {"type": "array", "items": row, "minItems": 3, "maxItems": 3}
    fields = {"a": {"type": "integer"}, "name": {"type": "boolean"}, "rows": rows}
    state = grammar_of({"type": "object", "properties": fields, "required": ["name", "rows"]}, pico).start()
    for token in pico.encode('{"name": false', add_special=False):
        state.accept(token)
        assert state._ending.tokens is not None


@pytest.mark.parametrize("name", ["array", "formats"])
def test_a_reply_parses_at_a_limit_that_has_room_for_all_but_the_end_token(pico: Tokenizer, name: str) -> None:
    grammar = grammar_of(SCHEMAS[name], pico)
    for seed in range(20):
        json.loads(pico.decode(draw(pico, grammar, ReplyLimits(shortest(grammar) - 1), seed, dislike="")))


def test_a_limit_without_room_for_an_ending_is_used_up(pico: Tokenizer) -> None:
    grammar = grammar_of(SCHEMAS["person"], pico)
    assert len(draw(pico, grammar, ReplyLimits(shortest(grammar) - 1))) == shortest(grammar) - 1


def test_a_limit_without_room_for_an_ending_leaves_the_beginning_to_the_model(pico: Tokenizer) -> None:
    grammar = grammar_of({"type": "string", "pattern": "^[a-z]{40}$"}, pico)
    beginnings = {tuple(draw(pico, grammar, ReplyLimits(tokens=3), seed)) for seed in range(4)}
    assert len(beginnings) == 4


@pytest.mark.parametrize("words", [("A", "B", "C", "D"), ("Tokyo", "Berlin", "Paris")], ids=["letters", "cities"])
@pytest.mark.parametrize("form", ["choice", "enum"])
def test_a_limit_does_not_choose_between_words_that_fit_it(pico: Tokenizer, words: tuple[str, ...], form: str) -> None:
    """As for an evaluation that asks for one of four letters with max_tokens=1, and reads the answer of the model."""
    if form == "enum":
        words = tuple(f'"{word}"' for word in words)
        grammar = grammar_of({"enum": [json.loads(word) for word in words]}, pico)
    else:
        grammar = Grammar.from_regex("|".join(words), pico, frozenset(pico.eos))
    for word in words:
        tokens = pico.encode(word, add_special=False)
        for limit in (len(tokens), len(tokens) + 1, len(tokens) + 2, len(tokens) + 5, len(tokens) + 12):
            state = grammar.start(ReplyLimits(limit))
            ids: list[int] = []
            for wanted in (*tokens, pico.eos[0])[:limit]:
                logits = torch.zeros(1, SIZE)
                logits[0, wanted] = 12.0
                ids.append(state.accept(int(state.apply(logits).argmax())))
            if limit > len(tokens) or len(tokens) == shortest(grammar) - 1:  # else only another word fits with its end
                assert pico.decode(ids) == word and not state.shortened, limit
            assert state.complete


def test_what_the_model_gives_to_the_end_closes_the_string(pico: Tokenizer) -> None:
    state = grammar_of({"type": "string"}, pico).start()
    (word,) = pico.encode("a", add_special=False)
    (quote,) = pico.encode('"', add_special=False)
    logits = torch.zeros(1, SIZE)
    logits[0, word], logits[0, list(pico.eos)] = 5.0, 8.0
    assert int(state.apply(logits).argmax()) == quote
    state.accept(quote)
    state.accept(word)
    masked = state.apply(logits)
    assert int(masked.argmax()) == quote and masked[0, word] == 5.0
    assert masked[0, quote] == pytest.approx(
        float(torch.logaddexp(torch.tensor(0.0), torch.tensor(8 + math.log(len(pico.eos)))))
    )


def test_a_token_taken_back_for_lack_of_room_shortens_the_reply(pico: Tokenizer) -> None:
    """The model agrees with all tokens after it, but what it began is missing, so the reply ends by its limit."""
    person = {"type": "array", "items": SCHEMAS["person"]}
    state = grammar_of(person, pico).start(ReplyLimits(8))
    (opened,), (brace,), (closed,) = (pico.encode(text, add_special=False) for text in "[{]")
    drawn: list[int] = []
    for wanted in (opened, brace, pico.eos[0]):
        logits = torch.zeros(1, SIZE)
        logits[0, wanted] = 50.0
        assert int(state.apply(logits).argmax()) == wanted
        drawn.append(state.accept(wanted))
    assert drawn == [opened, closed, pico.eos[0]] and state.shortened


def test_limits_count_the_time(pico: Tokenizer) -> None:
    """The fake clock advances one second per token, and the reply ends by the 40th."""
    ticks = iter(range(10_000))
    now = [0.0]

    def clock() -> float:
        return now[0]

    grammar = grammar_of(SCHEMAS["person"], pico)
    state = grammar.start(limits=ReplyLimits(500, 40.0, clock))
    (letter,) = pico.encode("a", add_special=False)
    logits = torch.zeros(1, SIZE)
    logits[0, letter] = 20.0
    ids: list[int] = []
    for _ in ticks:
        token = state.accept(int(state.apply(logits).argmax()))
        now[0] += 1.0
        if token in pico.eos:
            break
        ids.append(token)
    assert 20 < now[0] <= 41 and json.loads(pico.decode(ids))["name"].startswith("aaa")


@pytest.mark.parametrize("period", [1, 2, 7, 40])
def test_loops_are_found_after_four_copies(period: int) -> None:
    detector = LoopDetector()
    before = [detector.add(token) for token in range(1000, 1030)]
    found = [detector.add(index % period) for index in range(400)]
    expected = max(LEAST_TOKENS, (COPIES - 1) * period) + period
    assert not any(before) and found.index(True) == pytest.approx(expected, abs=9) and all(found[found.index(True) :])


def test_a_loop_from_the_first_token_is_found_as_early_as_another() -> None:
    detector = LoopDetector()
    assert [detector.add(index % 10) for index in range(100)].index(True) == 10 + LEAST_TOKENS - 1


def test_text_with_repeated_parts_is_no_loop() -> None:
    detector = LoopDetector()
    lines = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, number, 11] for number in range(100, 200)]
    assert not any(detector.add(token) for line in lines for token in line)
    assert not any(detector.add(0) for _ in range(40))


@pytest.mark.parametrize("budget, limit, most", [(0, 200, 0), (10, 200, 10), (None, 40, 24), (500, 100, 75)])
def test_reasoning_leaves_tokens_to_the_answer(pico: Tokenizer, budget: int | None, limit: int, most: int) -> None:
    compiler = GrammarCompiler(pico, frozenset(pico.eos))
    prelude = Prelude("<think>", "</think>", opened=True, budget=budget)
    grammar = compiler.schema(json.dumps({"enum": ["yes"]}), "s.json", prelude)
    ids = draw(pico, grammar, ReplyLimits(limit), dislike='"<')
    thought, answer = pico.decode(ids[:-1]).split("</think>")
    assert answer.strip() == '"yes"'
    assert len(pico.encode(thought, add_special=False)) <= 2 * most  # drawn tokens are no canonical tokenization
    assert not most or thought


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "may-open"])
def test_the_tag_that_ends_reasoning_is_no_text_of_the_answer(pico: Tokenizer, opened: bool) -> None:
    compiler = GrammarCompiler(pico, frozenset(pico.eos))
    prelude = Prelude("<think>", "</think>", opened=opened)
    grammar = compiler.schema(json.dumps(SCHEMAS["person"]), "s.json", prelude)
    ids = draw(pico, grammar, ReplyLimits(80), dislike='"<')
    answer = pico.decode(ids[:-1]).rpartition("</think>")[2]
    assert json.loads(answer).keys() == {"name", "age"} and "<" not in answer


def test_reasoning_ends_with_several_control_tokens(tmp_path: Path) -> None:
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    tokens = [added(256, "<end>", special=True), *(added(257 + at, name) for at, name in enumerate(names))]
    tokenizer = make(tmp_path, added_tokens=tokens)
    template = "<|channel|>analysis"
    form = find_reasoning_format(template)
    prelude = reasoning_prelude(template, f"<|start|>assistant{form.open}")
    assert prelude is not None and prelude.opened
    compiler = GrammarCompiler(tokenizer, frozenset(tokenizer.eos))
    grammar = compiler.schema(json.dumps({"enum": ["yes"]}), "s.json", replace(prelude, budget=5))
    ids = draw(tokenizer, grammar, ReplyLimits(200), dislike="")
    thought, answer = b"".join(map(tokenizer.token_bytes, ids[:-1])).split(form.ending.encode())
    assert answer.strip() == b'"yes"' and len(thought) <= 8  # a character may end after the budget
