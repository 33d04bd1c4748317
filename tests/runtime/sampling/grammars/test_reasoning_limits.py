"""Test when reasoning is closed: at its budget, for the limits of the reply, and in a loop, exactly to a token."""

import itertools
import random
from collections.abc import Iterable

import pytest
import torch

from mycli.runtime.sampling.grammars.grammar import Grammar, GrammarCompiler
from mycli.runtime.sampling.grammars.lark import Prelude
from mycli.runtime.sampling.grammars.state import GrammarState, ReplyLimits
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.small_tokenizers import make

LETTERS = b"abcdefghijklmnop"
ANSWER = len(b'</think>"yes"') + 1  # tokens of the shortest end of a thought, with the end token


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer with one token for each byte."""
    return make(tmp_path_factory.mktemp("bytes"))


def grammar_of(tokenizer: Tokenizer, answer: str, budget: int | None, opened: bool = True) -> Grammar:
    compiler = GrammarCompiler(tokenizer, frozenset(tokenizer.eos))
    prelude = Prelude("<think>", "</think>", opened=opened, budget=budget)
    return compiler.any_text(prelude) if answer == "any" else compiler.schema(answer, "s.json", prelude)


def preferred(state: GrammarState, token: int, size: int) -> int:
    """Return the token that a model which prefers `token` gets."""
    logits = torch.zeros(1, size)
    logits[0, token] = 20.0
    return int(state.apply(logits).argmax())


def thought(tokenizer: Tokenizer, state: GrammarState, clock: Iterable[float] = (), most: int = 60) -> int:
    """Return the number of letters that a model which never ends its reasoning writes before it must, up to `most`."""
    letters, ticks = random.Random(0), iter(clock)
    for count in range(most):
        (letter,) = tokenizer.encode(chr(letters.choice(LETTERS)), add_special=False)
        if preferred(state, letter, len(tokenizer.vocabulary)) != letter:
            return count
        state.accept(letter)
        next(ticks, None)
    return most


@pytest.mark.parametrize(
    ("answer", "budget", "tokens", "ends_at", "count"),
    [
        ('{"enum": ["yes"]}', None, None, None, 60),
        ('{"enum": ["yes"]}', 0, None, None, 0),
        ('{"enum": ["yes"]}', 3, None, None, 3),
        ('{"enum": ["yes"]}', None, 40, None, 40 - 16),
        ('{"enum": ["yes"]}', None, 72, None, 72 - 18),
        ('{"enum": ["yes"]}', None, 17, None, 1),
        ('{"enum": ["yes"]}', None, 16, None, 0),
        ('{"enum": ["yes"]}', None, 10, None, 0),
        ('{"enum": ["yes"]}', 30, 40, None, 40 - 16),
        ('{"enum": ["yes"]}', 5, 40, None, 5),
        ("any", None, 60, None, 60 - len("</think>a") - 1),
        ("any", 30, None, None, 30),
        ("any", 50, 60, None, 60 - 16),
        ("any", None, 60, 1e9, 60 - 16),
    ],
)
def test_reasoning_has_its_budget_and_what_the_answer_leaves(
    tokenizer: Tokenizer, answer: str, budget: int | None, tokens: int | None, ends_at: float | None, count: int
) -> None:
    state = grammar_of(tokenizer, answer, budget).start(ReplyLimits(tokens, ends_at, lambda: 0.0))
    assert thought(tokenizer, state) == count


@pytest.mark.parametrize(("seconds", "count"), [(200, 150), (60, 60 - ANSWER - 16), (ANSWER + 16, 1)])
def test_reasoning_leaves_a_quarter_of_the_time_and_that_of_the_answer(
    tokenizer: Tokenizer, seconds: int, count: int
) -> None:
    """A token takes a second; how long one takes is known after two."""
    now = 1000.0

    def ticks() -> Iterable[float]:
        nonlocal now
        for _ in itertools.count():
            now += 1
            yield now

    limits = ReplyLimits(None, now + seconds, lambda: now)
    state = grammar_of(tokenizer, '{"enum": ["yes"]}', None).start(limits)
    assert thought(tokenizer, state, ticks(), 300) == max(count, 2)


def test_reasoning_in_a_loop_is_closed_and_stays_so(tokenizer: Tokenizer) -> None:
    state = grammar_of(tokenizer, '{"enum": ["yes"]}', None).start()
    (letter,), (mark,) = (tokenizer.encode(text, add_special=False) for text in "a<")
    size, count = len(tokenizer.vocabulary), 0
    while preferred(state, letter, size) == letter:
        state.accept(letter)
        count += 1
        assert count < 400
    assert count > 40
    assert preferred(state, mark, size) == mark
    drawn = []
    while not state.complete:
        drawn.append(state.accept(preferred(state, letter, size)))
    assert tokenizer.decode(drawn) == '</think>"yes"'


@pytest.mark.parametrize(
    ("beginning", "inside"),
    [("<think>", True), (" \n<think>", True), ('"<think>', False), ('"', False), ('"<thi', False), (' "', False)],
)
def test_an_opening_tag_opens_reasoning_only_at_the_beginning_of_a_reply(
    tokenizer: Tokenizer, beginning: str, inside: bool
) -> None:
    """The text of an answer may have one, too, and has no budget."""
    state = grammar_of(tokenizer, '{"type": "string"}', 3, opened=False).start()
    for token in tokenizer.encode(beginning, add_special=False):
        assert preferred(state, token, len(tokenizer.vocabulary)) == token
        state.accept(token)
    assert thought(tokenizer, state) == (3 if inside else 60)


def test_an_answer_after_reasoning_may_have_its_tags(tokenizer: Tokenizer) -> None:
    state = grammar_of(tokenizer, '{"type": "string"}', 3, opened=False).start()
    for token in tokenizer.encode('<think>a</think>"<think></think>', add_special=False):
        assert preferred(state, token, len(tokenizer.vocabulary)) == token
        state.accept(token)
    assert thought(tokenizer, state) == 60
