"""Speculation changes nothing: exact output probabilities, the same greedy tokens, the same caches."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycli.runtime.engine.generate import Session
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.stats import SpeculationStats
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.sampling.logits_processors import distribution
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.decode import SpeculativeSession
from mycli.runtime.speculative.draft_length import AdaptiveDraftLength, FixedDraftLength
from mycli.runtime.speculative.proposers import DraftModel, PromptLookup, Proposal, Proposer
from mycli.runtime.speculative.rejection_sampling import rejection_sample
from tests.support.prefix_model import (
    CPU,
    Choose,
    ChoosingSampler,
    Function,
    PrefixModel,
    all_outcomes,
    random_function,
)

VOCAB = 5
PROMPT = [1, 2, 3, 1, 2]
PAIRS = [2, 0, 2, 1, 2, 2, 3, 2, 4, 2]  # whatever comes next, the pair occurred before
SETTINGS = {
    "greedy": SamplingParams(),
    "greedy-penalty": SamplingParams(repetition_penalty=1.6),
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=1.9),
    "top-k": SamplingParams(temperature=1.0, top_k=3),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.2),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "bias": SamplingParams(temperature=1.0, logit_bias=((1, -1.5), (3, 0.7))),
    "greedy-bias": SamplingParams(logit_bias=((2, -0.8),)),
    "all": SamplingParams(
        temperature=0.9, top_k=4, top_p=0.9, min_p=0.05, repetition_penalty=1.3, logit_bias=((0, 0.5),)
    ),
}


def target_model(seed: int = 0) -> PrefixModel:
    """Its head is padded: rows 5 to 7 have no token, and large logits that must not be drawn."""
    function, padding = random_function(seed, VOCAB), torch.full((3,), 9.0, dtype=torch.float64)

    def padded(text: tuple[int, ...]) -> Tensor:
        return torch.cat((function(text), padding))

    return PrefixModel(padded, VOCAB + 3)


def proposers(target: PrefixModel, seed: int = 1, max_context: int = 64) -> dict[str, Proposer]:
    draft = PrefixModel(random_function(seed, VOCAB), VOCAB, max_context)
    return {"draft": DraftModel(ModelRunner(draft), 64, target.nbytes), "ngram": PromptLookup()}


def next_probabilities(model: PrefixModel, text: tuple[int, ...], sampling: SamplingParams) -> Tensor:
    """By the definition alone."""
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    seen[0, list(text)] = True
    return distribution(model.logits(text)[None, :VOCAB], sampling, seen)[0]


def exact(model: PrefixModel, prompt: list[int], length: int, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every output of `length` tokens."""
    found = {}
    for output in product(range(VOCAB), repeat=length):
        found[output] = 1.0
        for index, token in enumerate(output):
            if found[output]:
                found[output] *= float(next_probabilities(model, (*prompt, *output[:index]), sampling)[token])
    return found


@pytest.mark.parametrize("kind", ["draft", "ngram"])
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_have_exactly_the_probabilities_of_the_target(name: str, kind: str) -> None:
    """Every random choice of the loop is enumerated: three tokens, the second and third speculated."""
    check_every_outcome(SETTINGS[name], kind, 3)


def test_four_tokens_have_exactly_the_probabilities_of_the_target() -> None:
    """With refusals at every place of a pass, the bonus, and passes after passes."""
    check_every_outcome(SamplingParams(temperature=1.0, top_k=3, repetition_penalty=1.3), "draft", 4)


def check_every_outcome(sampling: SamplingParams, kind: str, length: int) -> None:
    target = target_model()
    proposer = proposers(target)[kind]

    def run(choose: Choose) -> tuple[int, ...]:
        session = SpeculativeSession(ModelRunner(target), 64, proposer, FixedDraftLength(4))
        return tuple(tokens[0] for tokens in session.generate(PAIRS, ChoosingSampler(sampling, VOCAB, choose), length))

    outcomes = all_outcomes(run)
    for output, probability in exact(target, PAIRS, length, sampling).items():
        assert outcomes.get(output, 0.0) == pytest.approx(probability, abs=1e-9), output
    assert length - 1 in target.passes, "drafts were compared"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pass_over_several_drafts_has_exactly_the_probabilities_of_the_target(name: str) -> None:
    """Two drafted tokens and the bonus; what a pass leaves open is completed by the definition."""
    target, sampling = target_model(), SETTINGS[name]
    proposer = proposers(target)["draft"]

    def run(choose: Choose) -> tuple[int, ...]:
        sampler = ChoosingSampler(sampling, VOCAB, choose)
        sampler.observe(torch.tensor([PROMPT]))
        proposer.begin(PROMPT[:-1])
        proposal = proposer.propose(PROMPT, 2, sampler)
        rows = [target.logits((*PROMPT, *proposal.tokens[:count])) for count in range(3)]
        return tuple(rejection_sample(torch.stack(rows), proposal, sampler))

    completed: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for output, probability in all_outcomes(run).items():
        for rest in product(range(VOCAB), repeat=3 - len(output)):
            factor, text = probability, output
            for token in rest:
                factor *= float(next_probabilities(target, (*PROMPT, *text), sampling)[token])
                text = (*text, token)
            completed[text] += factor
    for output, probability in exact(target, PROMPT, 3, sampling).items():
        assert completed[output] == pytest.approx(probability, abs=1e-9), output


def reply(session: Session, prompt: list[int], limit: int, sampling: SamplingParams | None = None) -> list[int]:
    sampler = Sampler(sampling or SamplingParams(), VOCAB, CPU)
    return [tokens[0] for tokens in session.generate(prompt, sampler, limit)]


@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 8),
    kind=st.sampled_from(["draft", "ngram"]),
    alike=st.booleans(),
    capacity=st.integers(6, 40),
    draft_context=st.integers(4, 40),
    limit=st.integers(0, 40),
    penalty=st.sampled_from([1.0, 1.5]),
)
@settings(max_examples=60, deadline=None)
def test_greedy_tokens_are_the_same_whatever_the_lengths(
    seed: int, length: int, kind: str, alike: bool, capacity: int, draft_context: int, limit: int, penalty: float
) -> None:
    """F15, F16: also with a draft that is longer than the room left, and one whose context is the shorter."""
    target = target_model(seed)
    proposer = proposers(target, seed if alike else seed + 1, draft_context)[kind]
    session = SpeculativeSession(ModelRunner(target), capacity, proposer, FixedDraftLength(length))
    plain = Session(ModelRunner(target), capacity)
    sampling = SamplingParams(repetition_penalty=penalty)
    expected = reply(plain, PROMPT, limit, sampling)
    assert reply(session, PROMPT, limit, sampling) == expected
    assert cached(session) == cached(plain)
    # Prefix hit: the next turn goes on from there.
    turn = [*PROMPT, *expected, 4][:capacity]
    assert reply(session, turn, limit, sampling) == reply(plain, turn, limit, sampling)
    assert session.timing.cached == plain.timing.cached
    assert len(session.timing.token_seconds) == len(plain.timing.token_seconds)


def recorded(session: Session) -> SpeculationStats:
    assert session.timing.record is not None
    return session.timing.record


def cached(session: Session) -> list[int]:
    """What the cache really holds; `PrefixModel` stores tokens in it."""
    keys, _ = session.cache.write(0, session.cache.length, torch.zeros(1, 1, 0, 2), torch.zeros(1, 1, 0, 2))
    found: list[int] = keys.data[0, 0, :, 0].long().tolist()
    return found


@pytest.mark.parametrize("kind", ["draft", "ngram"])
@pytest.mark.parametrize("taken", range(1, 9))
def test_a_consumer_that_stops_early_leaves_both_caches_as_it_found_the_text(kind: str, taken: int) -> None:
    target = target_model()
    proposer = proposers(target, seed=0)[kind]  # always right, so that tokens wait in the middle of a pass
    session = SpeculativeSession(ModelRunner(target), 64, proposer, FixedDraftLength(5))
    stream: Iterator[list[int]] = session.generate(PROMPT, Sampler(SamplingParams(), VOCAB, CPU), 20)
    start = [tokens[0] for tokens in islice(stream, taken)]
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert cached(session) == [*PROMPT, *start][:-1]
    if isinstance(proposer, DraftModel):
        assert cached(proposer) == [*PROMPT, *start][: len(cached(proposer))]
        assert len(cached(proposer)) < len(PROMPT) + taken
    follow = [*PROMPT, *start[:-1], 4, 4]
    assert reply(session, follow, 10) == reply(Session(ModelRunner(target), 64), follow, 10)


@pytest.mark.parametrize("place", range(1, 8))
def test_a_stop_token_within_a_pass_ends_there(place: int) -> None:
    target = target_model(3)
    session = SpeculativeSession(ModelRunner(target), 64, proposers(target, seed=3)["draft"], FixedDraftLength(8))
    plain = Session(ModelRunner(target), 64)
    expected = reply(plain, PROMPT, 12)
    stop = frozenset((expected[place],))
    for one in (session, plain):
        found = [t[0] for t in one.generate(PROMPT, Sampler(SamplingParams(), VOCAB, CPU), 12, stop)]
        assert found == expected[: expected.index(expected[place])]
        assert one.stopped
    assert cached(session) == cached(plain)
    assert session.timing.generated == plain.timing.generated


def test_a_right_draft_saves_passes_and_the_record_says_so() -> None:
    target = target_model()
    session = SpeculativeSession(ModelRunner(target), 64, proposers(target, seed=0)["draft"], FixedDraftLength(4))
    assert len(reply(session, PROMPT, 16)) == 16
    assert target.passes == [5, 5, 5, 5], "the prompt, then three passes over a token and four drafts"
    record = recorded(session)
    assert (record.passes, record.acceptance_rate, record.mean_length) == (3, 1.0, 5.0)


class Wrong:
    """A proposer whose proposals are never the next token."""

    relative_cost, nbytes = 0.1, 0

    def __init__(self, target: PrefixModel) -> None:
        self.target = target

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def lag(self, length: int) -> int:
        return 1

    def propose(self, text: Sequence[int], count: int, sampler: Sampler) -> Proposal:
        best = int(self.target.logits(tuple(text))[:VOCAB].argmax())
        return Proposal([(best + 1) % VOCAB] * count)

    def truncate(self, length: int) -> None:
        pass


@pytest.mark.parametrize("capacity", [2, 5, 64])
def test_warming_up_leaves_nothing_behind(capacity: int) -> None:
    target = target_model()
    proposer = proposers(target)["draft"]
    session = SpeculativeSession(ModelRunner(target), capacity, proposer, FixedDraftLength(4))
    session.warm_up()
    assert cached(session) == [] and proposer.lag(1) == 1
    assert reply(session, [1, 2], 9) == reply(Session(ModelRunner(target), capacity), [1, 2], 9)


def test_wrong_drafts_change_nothing() -> None:
    target = target_model()
    session = SpeculativeSession(ModelRunner(target), 64, Wrong(target), FixedDraftLength(4))
    assert reply(session, PROMPT, 12) == reply(Session(ModelRunner(target), 64), PROMPT, 12)
    assert recorded(session).acceptance_rate == 0 and recorded(session).mean_length == 1


def broken(function: Function, when: int) -> Function:
    """NaN after texts of `when` tokens."""
    return lambda text: function(text) * (math.nan if len(text) == when else 1)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=1)], ids=["greedy", "sampled"]
)
def test_a_draft_that_is_not_a_number_is_skipped(sampling: SamplingParams) -> None:
    """F15."""
    target = target_model()
    draft = DraftModel(ModelRunner(PrefixModel(broken(random_function(0, VOCAB), 9), VOCAB)), 64, 1)
    session = SpeculativeSession(ModelRunner(target), 64, draft, FixedDraftLength(3))
    found = reply(session, PROMPT, 16, sampling)
    assert len(found) == 16
    if sampling.greedy:
        assert found == reply(Session(ModelRunner(target), 64), PROMPT, 16)
    assert recorded(session).passes >= 3, "it goes on after the bad step"
    nothing = DraftModel(ModelRunner(PrefixModel(lambda text: torch.full((VOCAB,), math.nan), VOCAB)), 64, 1)
    session = SpeculativeSession(ModelRunner(target), 64, nothing, FixedDraftLength(3))
    assert len(reply(session, PROMPT, 16, sampling)) == 16 and recorded(session).passes == 0


@pytest.mark.parametrize("when", range(6, 12))
def test_a_target_that_is_not_a_number_fails_exactly_where_it_does_without_speculation(when: int) -> None:
    target = PrefixModel(broken(random_function(0, VOCAB), when), VOCAB)
    counts = []
    for session in (
        Session(ModelRunner(target), 64),
        SpeculativeSession(ModelRunner(target), 64, proposers(target, 0)["draft"], FixedDraftLength(4)),
    ):
        found = []
        with pytest.raises(ModelError, match="not a number"):
            for tokens in session.generate(PROMPT, Sampler(SamplingParams(), VOCAB, CPU), 20):
                found.append(tokens[0])
        counts.append(found)
    assert counts[0] == counts[1] and len(counts[0]) == when - len(PROMPT)


def test_the_same_errors_as_without_speculation() -> None:
    session = SpeculativeSession(ModelRunner(target_model()), 4, PromptLookup(), FixedDraftLength(2))
    with pytest.raises(UsageError, match="5 tokens.*room for 4"):
        reply(session, PROMPT, 3)


def test_adaptive_lengths_change_no_token() -> None:
    """F16: on, off, and switching between."""
    target = target_model()
    proposer = proposers(target, seed=0)["draft"]
    session = SpeculativeSession(ModelRunner(target), 64, proposer, AdaptiveDraftLength(0.1))
    assert reply(session, PROMPT, 50) == reply(Session(ModelRunner(target), 64), PROMPT, 50)


def test_lookup_proposes_what_followed_and_goes_round() -> None:
    lookup, sampler = PromptLookup(), Sampler(SamplingParams(), VOCAB, CPU)
    lookup.begin([])
    assert lookup.propose([1, 2, 3, 4, 1, 2], 3, sampler).tokens == [3, 4, 1]
    assert lookup.propose([1, 2, 3, 4, 1, 2, 3], 6, sampler).tokens == [4, 1, 2, 3, 4, 1]
    assert lookup.propose([1, 2, 3, 4, 1, 2, 3, 0], 6, sampler).tokens == []
    lookup.begin([])
    assert lookup.propose([5, 6, 7, 5, 6, 8, 5, 6], 1, sampler).tokens == [8], "the latest occurrence"
    assert lookup.propose([1], 1, sampler).tokens == []
