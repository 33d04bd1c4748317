"""Test that speculation changes nothing: the same tokens, caches and errors; and that its statistics are correct."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.replies.completion import generate, stream
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.engine.speculation import ComputedTokens, DraftRequest
from mycli.runtime.engine.stats import SpeculationStats, Timing
from mycli.runtime.errors import ModelError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.proposers import DraftModel, Proposal
from mycli.runtime.speculative.rejection_sampling import rejection_sample, sample_matching
from mycli.runtime.speculative.speculator import ProposerSpeculator, warm_up
from tests.support.engines import cached_prefixes, in_one_block, together
from tests.support.grids import examples
from tests.support.prefix_model import CPU, Function, PrefixModel, random_function
from tests.support.speculation import PROMPT, VOCAB, plainly, proposers, reply, speculating, target_model

Verify = Callable[[torch.Tensor, Proposal, Sampler], list[int]]
# For a target and a proposer: its kind, and whether it uses the target's own function.
PAIRS = {"seed": st.integers(0, 10**6), "kind": st.sampled_from(["draft", "ngram"]), "alike": st.booleans()}


@given(
    **PAIRS,
    length=st.integers(1, 8),
    capacity=st.integers(6, 40),
    draft_context=st.integers(4, 40),
    limit=st.integers(0, 40),
    penalty=st.sampled_from([1.0, 1.5]),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=examples(30, 200), deadline=None)
def test_tokens_are_the_same_whatever_the_lengths(
    seed: int,
    length: int,
    kind: str,
    alike: bool,
    capacity: int,
    draft_context: int,
    limit: int,
    penalty: float,
    temperature: float,
) -> None:
    """F15, F16: greedy and seeded, with a draft longer than the remaining room, or a shorter draft context."""
    target = target_model(seed)
    proposer = proposers(target, seed if alike else seed + 1, draft_context)[kind]
    shape = CacheShape.contiguous(capacity)
    ours, plain = speculating(target, proposer, FixedDraftLength(length), shape), plainly(target, shape)
    sampling = SamplingParams(temperature, repetition_penalty=penalty, seed=seed)
    expected = reply(plain, PROMPT, limit, sampling)
    assert reply(ours, PROMPT, limit, sampling) == expected
    assert cached_prefixes(ours) == cached_prefixes(plain)
    # Prefix hit: the next turn resumes there.
    turn = [*PROMPT, *expected, 4][:capacity]
    request = Request(tuple(turn), sampling, limit=min(limit, capacity - len(turn) + 1))
    (ours_said, ours_timing), (said, timing) = generate(ours, request), generate(plain, request)
    assert ours_said == said and ours_timing.cached == timing.cached
    assert len(ours_timing.token_seconds) == len(timing.token_seconds)


@given(
    **PAIRS,
    length=st.integers(1, 6),
    blocks=st.integers(8, 30),
    draft_blocks=st.integers(1, 20),
)
@settings(max_examples=examples(12, 100), deadline=None)
def test_many_together_are_the_replies_alone(
    seed: int, length: int, kind: str, alike: bool, blocks: int, draft_blocks: int
) -> None:
    """F16, G43: preempted, after prefix hits, and with a draft model whose cache is full; greedy and seeded."""
    target = target_model(seed)
    proposer = proposers(target, seed if alike else seed + 1)[kind]
    if isinstance(proposer, DraftModel):
        proposer = DraftModel(proposer.runner, CacheShape(32, draft_blocks, 4), 1)
    shape = CacheShape(32, blocks, 4)
    engine = speculating(target, proposer, FixedDraftLength(length), shape, running=6)
    requests = [
        Request((*PROMPT[: 1 + place % 5], place % VOCAB), SamplingParams(float(place % 2), seed=seed), limit=3 * place)
        for place in range(9)
    ]
    expected = [generate(plainly(target, CacheShape.contiguous(32)), request)[0] for request in requests]
    assert together(engine, requests) == expected
    assert together(engine, requests[::-1]) == expected[::-1]
    assert engine.stats.cache_used == 0
    if isinstance(proposer, DraftModel):
        assert proposer._pool.used == 0, "no block of the draft's cache is lost"


@pytest.mark.parametrize("kind", ["draft", "ngram"])
@pytest.mark.parametrize("taken", range(1, 9))
def test_a_consumer_that_stops_early_leaves_both_caches_as_it_found_the_text(kind: str, taken: int) -> None:
    target = target_model()
    proposer = proposers(target, seed=0)[kind]  # always right, so that tokens are pending in the middle of a pass
    engine = speculating(target, proposer, FixedDraftLength(5))
    consumer: Iterator[int] = stream(engine, Request(tuple(PROMPT), limit=20))
    start = list(islice(consumer, taken))
    consumer.close()  # type: ignore[attr-defined]  # a generator
    (text,) = cached_prefixes(engine)
    assert text[: len(PROMPT) + taken - 1] == [*PROMPT, *start][:-1]
    assert in_one_block(engine.cache, 0, len(text)) == text
    if isinstance(proposer, DraftModel):
        known = [node for node in proposer._pool.index.root.children.values()]
        assert all(in_one_block(proposer.cache, node.block, len(node.tokens)) == list(node.tokens) for node in known)
    follow = [*PROMPT, *start[:-1], 4, 4]
    assert reply(engine, follow, 10) == reply(plainly(target), follow, 10)


@pytest.mark.parametrize("place", range(1, 8))
def test_a_stop_token_within_a_pass_ends_there(place: int) -> None:
    target = target_model(3)
    ours, plain = speculating(target, proposers(target, seed=3)["draft"], FixedDraftLength(8)), plainly(target)
    expected = reply(plain, PROMPT, 12)
    stop = frozenset((expected[place],))
    found = []
    for engine in (ours, plain):
        tokens, timing = generate(engine, Request(tuple(PROMPT), limit=12, stop_ids=stop))
        assert tokens == expected[: expected.index(expected[place])]
        found.append(timing.generated)
    assert cached_prefixes(ours) == cached_prefixes(plain) and found[0] == found[1]


@pytest.mark.parametrize("kind", ["draft", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_no_reply_ends_before_its_minimum(kind: str, temperature: float) -> None:
    """Each reply is the one of its request alone, with drafts, among others, preempted and after prefix hits."""
    early = 0
    for seed in range(6):
        target = target_model(seed)
        engine = speculating(
            target, proposers(target, seed)[kind], FixedDraftLength(3), CacheShape(32, 12, 4), running=6
        )
        sampling, stops = SamplingParams(temperature, seed=seed), frozenset({1, 4, 5, VOCAB - 1})
        asked = [
            Request((*PROMPT, place % VOCAB), sampling, limit=12, stop_ids=stops, min_tokens=place)
            for place in range(9)
        ]
        alone = plainly(target, CacheShape.contiguous(32))
        expected = [generate(alone, request)[0] for request in asked]
        assert together(engine, asked) == together(engine, asked) == expected
        assert all(len(tokens) >= request.min_tokens for tokens, request in zip(expected, asked, strict=True))
        early += sum(len(generate(alone, replace(request, min_tokens=0))[0]) < request.min_tokens for request in asked)
    assert early > 10, "without a minimum many would end earlier"


def test_a_right_draft_saves_passes_and_the_record_says_so() -> None:
    target = target_model()
    engine = speculating(target, proposers(target, seed=0)["draft"], FixedDraftLength(4))
    tokens, timing = generate(engine, Request(tuple(PROMPT), limit=16))
    assert len(tokens) == 16
    assert target.passes == [5, 5, 5, 5], "the prompt, then three passes over a token and four drafts"
    record = recorded(timing)
    assert (record.passes, record.acceptance_rate, record.mean_length) == (3, 1.0, 5.0)


def recorded(timing: Timing) -> SpeculationStats:
    assert timing.record is not None
    return timing.record


class Watched(DraftLengthPolicy):
    def __init__(self) -> None:
        self.plain, self.drafts = 0, 0

    def length(self, room: int, lag: int, evidence: int = 0) -> int:
        return min(room, 2)

    def observe_plain(self, seconds: float, wasted: float = 0.0, tokens: int = 1) -> None:
        self.plain += tokens

    def observe_draft(self, drafted: int, accepted: int, lag: int, seconds: float, evidence: int = 0) -> None:
        self.drafts += 1


def test_every_load_has_a_policy_of_its_own() -> None:
    """The policy stops drafting for batch sizes where it is slower, and resumes with smaller batches."""
    target, policies = target_model(), list[Watched]()

    def policy() -> Watched:
        policies.append(Watched())
        return policies[-1]

    speculator = ProposerSpeculator(proposers(target)["draft"], policy)
    engine = Engine(ModelRunner(target), CacheShape.contiguous(64, 4), VOCAB, speculator=speculator)
    reply(engine, PROMPT, 12)
    alone = policies[0].drafts
    assert alone > 0 and len(policies) == 1
    together(engine, [Request((token, 1), limit=12) for token in range(4)])
    assert len(policies) > 1 and sum(one.drafts for one in policies[1:]) > 4 and policies[0].drafts <= alone + 12


class Wrong:
    """Proposes only tokens that are not the next token."""

    relative_cost, nbytes = 0.1, 0

    def __init__(self, target: PrefixModel) -> None:
        self.target = target

    def lag(self, sequence: int, text: Sequence[int]) -> int:
        return 1

    def evidence(self, sequence: int, text: Sequence[int]) -> int:
        return 0

    def hidden_state_hook(self, parts: Iterable[ComputedTokens]) -> None: ...

    def propose(self, asked: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = []
        for one in asked:
            best = int(self.target.logits(tuple(one.tokens))[:VOCAB].argmax())
            proposals.append(Proposal([(best + 1) % VOCAB] * one.count))
        return proposals

    def truncate(self, sequence: int, length: int) -> None:
        pass

    def finish(self, sequence: int, tokens: Sequence[int]) -> None:
        pass

    def forget(self) -> None:
        pass


@pytest.mark.parametrize(
    ("capacity", "drafted", "verified"),
    [(2, [1, 1], [1, 1]), (5, [2, 2, 1, 1], [1, 3]), (64, [4, 4, 1, 1, 1], [1, 4])],
)
def test_warming_up_runs_a_short_and_a_long_draft_and_leaves_nothing_behind(
    capacity: int, drafted: list[int], verified: list[int]
) -> None:
    target, draft = target_model(), PrefixModel(random_function(1, VOCAB), VOCAB)
    shape = CacheShape.contiguous(capacity)
    proposer = DraftModel(ModelRunner(draft), shape, target.nbytes)
    engine = speculating(target, proposer, FixedDraftLength(4), shape)
    warm_up(engine)
    assert (draft.passes, target.passes) == (drafted, verified)
    assert cached_prefixes(engine) == [] and proposer.lag(5, [1]) == 1
    proposer.finish(5, [])
    assert reply(engine, [1, 2], 9) == reply(plainly(target, shape), [1, 2], 9)


def test_wrong_drafts_change_nothing() -> None:
    target = target_model()
    engine = speculating(target, Wrong(target), FixedDraftLength(4))
    tokens, timing = generate(engine, Request(tuple(PROMPT), limit=12))
    assert tokens == reply(plainly(target), PROMPT, 12)
    assert recorded(timing).acceptance_rate == 0 and recorded(timing).mean_length == 1


def broken(function: Function, when: int) -> Function:
    return lambda text: function(text) * (math.nan if len(text) == when else 1)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=1)], ids=["greedy", "sampled"]
)
def test_a_draft_that_is_not_a_number_is_skipped(sampling: SamplingParams) -> None:
    """F15."""
    target = target_model()
    runner = ModelRunner(PrefixModel(broken(random_function(0, VOCAB), 9), VOCAB))
    engine = speculating(target, DraftModel(runner, CacheShape.contiguous(64), 1), FixedDraftLength(3))
    tokens, timing = generate(engine, Request(tuple(PROMPT), sampling, limit=16))
    assert tokens == reply(plainly(target), PROMPT, 16, sampling)
    assert recorded(timing).passes >= 3, "it goes on after the bad step"
    runner = ModelRunner(PrefixModel(lambda text: torch.full((VOCAB,), math.nan), VOCAB))
    engine = speculating(target, DraftModel(runner, CacheShape.contiguous(64), 1), FixedDraftLength(3))
    tokens, timing = generate(engine, Request(tuple(PROMPT), sampling, limit=16))
    assert len(tokens) == 16 and recorded(timing).passes == 0


@pytest.mark.parametrize("when", range(6, 12))
def test_a_target_that_is_not_a_number_fails_exactly_where_it_does_without_speculation(when: int) -> None:
    target = PrefixModel(broken(random_function(0, VOCAB), when), VOCAB)
    counts = []
    for engine in (plainly(target), speculating(target, proposers(target, 0)["draft"], FixedDraftLength(4))):
        found: list[int] = []
        with pytest.raises(ModelError, match="not a number"):
            found.extend(stream(engine, Request(tuple(PROMPT), limit=20)))
        counts.append(found)
    assert counts[0] == counts[1] and len(counts[0]) == when - len(PROMPT)


@pytest.mark.parametrize("finite", range(5))
@pytest.mark.parametrize(
    ("verify", "temperature"), [(rejection_sample, 0.0), (rejection_sample, 1.0), (sample_matching, 1.0)]
)
def test_no_row_after_one_that_is_not_a_number_is_used(verify: Verify, temperature: float, finite: int) -> None:
    """Each of four rows has one probable token; the first three are the draft."""
    tokens = [1, 2, 3, 4]
    logits = torch.full((4, VOCAB), -50.0)
    logits[range(4), tokens] = 50.0
    logits[finite:] = math.nan
    sampler = Sampler(SamplingParams(temperature, seed=0), VOCAB, CPU)
    if finite:
        assert verify(logits, Proposal(tokens[:3]), sampler) == tokens[:finite]
        return
    with pytest.raises(ModelError, match="not a number"):
        verify(logits, Proposal(tokens[:3]), sampler)


def test_adaptive_lengths_change_no_token() -> None:
    """F16: on, off, and switching between; seeded ones too."""
    target = target_model()
    engine = speculating(target, proposers(target, seed=0)["draft"], AdaptiveDraftLength(0.1))
    for sampling in (SamplingParams(), SamplingParams(1.0, seed=4)):
        assert reply(engine, PROMPT, 50, sampling) == reply(plainly(target), PROMPT, 50, sampling)


def test_lookup_proposes_what_followed_and_goes_round() -> None:
    lookup, sampler = PromptLookup(), Sampler(SamplingParams(), VOCAB, CPU)

    def after(text: list[int], count: int, sequence: int = 0) -> list[int]:
        return lookup.propose([DraftRequest(sequence, text, count, sampler)])[0].tokens

    assert after([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert after([1, 2, 3, 4, 1, 2, 3], 6) == [4, 1, 2, 3, 4, 1]
    assert after([1, 2, 3, 4, 1, 2, 3, 0], 6) == []
    assert after([5, 6, 7, 5, 6, 8, 5, 6], 1, sequence=1) == [8], "the latest occurrence"
    assert after([1], 1, sequence=2) == []
    lookup.finish(0, [])
    assert after([9, 1, 2], 1) == [], "of another text nothing is known"


class Costs(DraftLengthPolicy):
    def __init__(self) -> None:
        self.plain: list[tuple[float, float]] = []

    def observe_plain(self, seconds: float, wasted: float = 0.0, tokens: int = 1) -> None:
        self.plain.append((seconds, wasted))


def test_drafting_in_vain_is_no_part_of_a_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target, policy, clock = target_model(), Costs(), iter([10.0, 10.25])
    speculator = ProposerSpeculator(Wrong(target), lambda: policy)
    monkeypatch.setattr("mycli.runtime.speculative.speculator.time.perf_counter", lambda: next(clock))
    sampler = Sampler(SamplingParams(), VOCAB, CPU)
    speculator.propose([DraftRequest(1, list(PROMPT), 2, sampler)])
    speculator.observe([SequenceOutput(1)], seconds=1.0)
    speculator.observe([SequenceOutput(1)], seconds=1.0)
    assert policy.plain == [(0.75, 0.25), (1.0, 0.0)]


def test_the_time_of_a_call_is_shared_by_its_tokens() -> None:
    policy = Costs()
    ProposerSpeculator(PromptLookup(), lambda: policy).observe_plain(4, seconds=1.0)
    assert policy.plain == [(0.25, 0.0)]


def test_a_proposer_that_runs_passes_never_rests() -> None:
    assert not ProposerSpeculator(Wrong(target_model()), lambda: FixedDraftLength(2), pipelined=False).rests


def test_nothing_is_warmed_up_without_drafts_or_during_requests() -> None:
    target = target_model()
    busy = speculating(target, proposers(target)["draft"], FixedDraftLength(4))
    busy.submit(Request(tuple(PROMPT), limit=1))
    for engine in (busy, plainly(target)):
        warm_up(engine)
    assert target.passes == []
