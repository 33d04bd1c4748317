"""Test the suffix automaton against a naive search, and prompt lookup over the turns of a conversation."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mycli.runtime.engine.speculation import DraftRequest
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative import lookup
from mycli.runtime.speculative.draft_length import LONG_LENGTHS, AdaptiveDraftLength, FixedDraftLength
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.proposers import NO_PROPOSAL
from mycli.runtime.speculative.speculator import ProposerSpeculator
from mycli.runtime.speculative.suffix_automaton import SuffixAutomaton, common_prefix

SAMPLER = Sampler(SamplingParams(), 512, torch.device("cpu"))


def longest_match(text: Sequence[int]) -> int:
    return max(
        (n for n in range(len(text)) if any(text[at - n : at] == text[len(text) - n :] for at in range(n, len(text)))),
        default=0,
    )


@given(st.lists(st.integers(0, 2), max_size=40))
def test_the_longest_earlier_match_is_found(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.extend([token])
        matched = longest_match(text[:end])
        assert automaton.matched == matched
        if matched:
            at = automaton.following
            assert at < end and text[at - matched : at] == text[end - matched : end]


def test_a_text_takes_few_states() -> None:
    chance = random.Random(0)
    text = [chance.randrange(50) for _ in range(20_000)]
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton._length) <= 2 * len(text)
    automaton.extend(text[100:140])
    assert automaton.matched == 40 and automaton.continuation(60) == text[140:200]


@pytest.mark.parametrize(("text", "further"), [([0] * 100, 0), ([*range(100)], 1)], ids=["one-token", "all-different"])
def test_a_text_that_needs_no_clone_has_none_and_one_transition_a_state(text: list[int], further: int) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert (len(automaton._length), len(automaton._more)) == (101, further), "the first state has several transitions"


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_common_prefix(first: list[int], second: list[int]) -> None:
    same = [a == b for a, b in zip(first, second, strict=False)]
    assert common_prefix(first, second) == (same.index(False) if False in same else len(same))


def proposed(proposer: PromptLookup, text: list[int], count: int = 8, sequence: int = 0) -> list[int]:
    return proposer.propose([DraftRequest(sequence, text, count, SAMPLER)])[0].tokens


FILE = list(range(100, 140))


def test_a_reply_that_the_next_prompt_no_longer_has_is_found() -> None:
    proposer = PromptLookup()
    start = list(range(20))
    proposed(proposer, start)
    proposer.finish(0, [*start, *FILE])  # reasoning, which the template drops
    turn = [*start, 5, 6, 7, *FILE[3:6]]
    assert proposed(proposer, turn, sequence=1) == FILE[6:14]
    proposer.finish(1, turn)
    assert proposed(proposer, [*start, 5, 6, 7, *FILE[3:8]], sequence=2) == FILE[8:16]


def test_another_conversation_is_not_found() -> None:
    proposer = PromptLookup()
    proposed(proposer, [*range(20)])
    proposer.finish(0, [*range(20), *FILE])
    other = [*range(40, 60), *FILE[3:6]]
    assert proposed(proposer, other, sequence=1) == [] and proposer.evidence(1, other) == NO_PROPOSAL
    proposer.forget()
    assert proposed(proposer, [*range(20), *FILE[3:6]], sequence=2) == []


def test_a_proposal_does_not_cross_the_end_of_a_turn() -> None:
    proposer = PromptLookup()
    start = list(range(20))
    proposed(proposer, start)
    proposer.finish(0, [*start, 50, 51, 52])
    assert proposed(proposer, [*start, 60, 61, 50, 51], sequence=1) == [52]


def test_longer_matches_are_stronger_evidence() -> None:
    proposer = PromptLookup()
    text = [*FILE, 1]
    found = []
    for count in (1, 2, 4, 8, 16, 24):
        found.append(proposer.evidence(count, [*text, *FILE[:count]]))
    assert found == [NO_PROPOSAL, 0, 1, 2, 3, 3]


def test_kept_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "KEPT_TOKENS", 100)
    monkeypatch.setattr(lookup, "MAX_INDEXED_TOKENS", 80)
    proposer = PromptLookup()
    for number in range(10):
        text = [number * 30 + token for token in range(30)]
        proposed(proposer, text, sequence=number)
        proposer.finish(number, text)
    assert sum(len(text.automaton.tokens) for _, text in proposer._kept) <= 100
    long = list(range(90))
    proposed(proposer, long[:81], sequence=20)
    assert proposed(proposer, [*long, *long[:5]], sequence=20) == [], "beyond the limit nothing is added"


def test_classes_of_evidence_stop_apart() -> None:
    policy = AdaptiveDraftLength(0.0, lengths=LONG_LENGTHS)
    for _ in range(3):
        policy.observe_plain(1.0)
    longest = 0
    for _ in range(400):
        if count := policy.length(64, 0, 0):
            policy.observe_draft(count, 0, 0, 1 + 0.02 * count, 0)  # short matches are always wrong
        else:
            policy.observe_plain(1.0)
        if count := policy.length(64, 0, 3):
            policy.observe_draft(count, count, 0, 1 + 0.02 * count, 3)  # long ones always right
            longest = max(longest, count)
    assert longest == LONG_LENGTHS[-1] and policy.length(64, 0, 0) == 0


def test_plain_steps_are_those_of_the_fastest_pass_where_nothing_is_computed_in_advance() -> None:
    lookup = ProposerSpeculator(PromptLookup(), lambda: FixedDraftLength(2), pipelined=False)
    assert lookup.rests  # from the first step on, so that drafts are compared with several tokens a call
    assert not ProposerSpeculator(PromptLookup(), lambda: FixedDraftLength(2)).rests  # no plain step is known


def test_several_plain_tokens_are_made_in_a_call_while_no_sequence_may_have_a_draft() -> None:
    speculator = ProposerSpeculator(PromptLookup(), lambda: AdaptiveDraftLength(0.0))
    for _ in range(20):
        speculator.observe_plain(1, 1.0)
    assert speculator.step_seconds is not None and speculator.rests
    assert speculator.draft_length(0, [1, 2, 3], 8, 1) == 0 and speculator.rests, "nothing is repeated"
    assert speculator.draft_length(1, [*FILE, *FILE[:9]], 8, 1) and not speculator.rests
    speculator.observe([], 1.0)
    assert speculator.rests


def test_a_turn_that_continues_the_text_before_it_is_one_text_with_it() -> None:
    proposer = PromptLookup()
    turn = [*range(20), 50, 51]
    proposed(proposer, turn)
    proposer.finish(0, turn)
    assert proposed(proposer, [*turn, 60, 61, 62, 51, 60], 2, sequence=1) == [61, 62]


def test_prompts_that_share_16_tokens_are_one_conversation() -> None:
    for shared, expected in ((lookup.SAME_CONVERSATION, FILE[6:9]), (lookup.SAME_CONVERSATION - 1, [])):
        proposer = PromptLookup()
        start = list(range(shared))
        proposed(proposer, start)
        proposer.finish(0, [*start, *FILE])
        assert proposed(proposer, [*start, 200, 201, 202, *FILE[3:6]], 3, sequence=1) == expected


def test_a_short_prompt_is_of_the_conversation_that_begins_with_it() -> None:
    proposer = PromptLookup()
    proposed(proposer, [1, 2, 3])
    proposer.finish(0, [1, 2, 3, *FILE])
    proposer.finish(7, [1])  # a sequence without a draft
    assert proposed(proposer, [1, 2, 3], sequence=1) == []
    assert proposed(proposer, [1, 2, 3, *FILE[3:5]], 2, sequence=1) == FILE[5:7]


def test_the_oldest_text_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "KEPT_TOKENS", 60)
    proposer = PromptLookup()
    texts = [[number * 30 + token for token in range(30)] for number in range(3)]
    for number, text in enumerate(texts):
        proposed(proposer, text, sequence=number)
        proposer.finish(number, text)
    # What a prompt leaves out after the start that it shares is found only in a text that is still there.
    asked = [proposed(proposer, [*text[:16], 999, *text[20:23]], 2, sequence=9 + text[0]) for text in texts]
    assert asked == [[], texts[1][23:25], texts[2][23:25]]
