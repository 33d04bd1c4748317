"""Test draft models: what they propose within their context, what they read, hold and cost."""

import pytest

from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.speculation import DraftRequest
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.proposers import DraftModel
from tests.support.prefix_model import CPU, PrefixModel, random_function
from tests.support.speculation import PROMPT, VOCAB, proposers, reply, speculating, target_model

SAMPLER = Sampler(SamplingParams(), VOCAB, CPU)


@pytest.mark.parametrize(("length", "count"), [(5, 4), (7, 2), (8, 1), (9, 0), (20, 0)])
def test_a_draft_model_proposes_nothing_beyond_its_own_context(length: int, count: int) -> None:
    """The cache, which is as long as the target's, would hold more."""
    draft = proposers(target_model(), max_context=8)["draft"]
    (proposal,) = draft.propose([DraftRequest(0, [1] * length, 4, SAMPLER)])
    assert len(proposal.tokens) == count


def test_a_draft_model_builds_its_rotary_tables_once() -> None:
    """In short blocks the tables would else be built again for every longer sequence."""
    target = target_model(0)
    draft = ModelRunner(PrefixModel(random_function(0, VOCAB), VOCAB))
    shape = CacheShape.paged(40, 40, 4)
    engine = speculating(target, DraftModel(draft, shape, 1), FixedDraftLength(2), shape)
    tables = draft.rope(1)
    assert len(reply(engine, PROMPT, 30)) == 30
    assert draft.rope(1) is tables


def test_a_draft_model_holds_weights_and_a_cache_and_costs_what_it_reads() -> None:
    runner = ModelRunner(PrefixModel(random_function(0, VOCAB), VOCAB))
    small, large = (DraftModel(runner, CacheShape.contiguous(context), 4 * runner.nbytes) for context in (32, 64))
    assert small.relative_cost == 0.25
    assert large.nbytes - small.nbytes == small.nbytes - runner.nbytes > 0, "the cache is twice as large"


def test_tokens_that_a_draft_model_has_read_are_no_part_of_its_lag() -> None:
    draft = proposers(target_model())["draft"]
    assert draft.lag(0, PROMPT) == len(PROMPT)
    (proposal,) = draft.propose([DraftRequest(0, PROMPT, 2, SAMPLER)])
    text = [*PROMPT, *proposal.tokens]
    assert draft.lag(0, text) == 1, "its last token"
    draft.truncate(0, len(PROMPT))
    assert draft.lag(0, text) == 2


@pytest.mark.parametrize(("length", "passes"), [(512, [512]), (520, [512, 8]), (1033, [512, 512, 9])])
def test_a_draft_model_reads_a_long_text_in_chunks(length: int, passes: list[int]) -> None:
    model = PrefixModel(random_function(0, VOCAB), VOCAB, max_context=2000)
    draft = DraftModel(ModelRunner(model), CacheShape.contiguous(2000), 1)
    (proposal,) = draft.propose([DraftRequest(0, [1] * length, 1, SAMPLER)])
    assert model.passes == passes and len(proposal.tokens) == 1


def test_drafts_of_several_sequences_share_passes() -> None:
    model, texts = PrefixModel(random_function(0, VOCAB), VOCAB), ([1, 2, 3, 1], [2, 0, 4, 3, 1])
    alone, shared = (DraftModel(ModelRunner(model), CacheShape(64, 40, 4), 1) for _ in range(2))
    requests = [DraftRequest(number, text, 3, SAMPLER) for number, text in enumerate(texts)]
    expected = [proposal.tokens for request in requests for proposal in alone.propose([request])]
    model.passes.clear()
    assert [proposal.tokens for proposal in shared.propose(requests)] == expected
    assert model.passes == [4 + 5, 2, 2]


def test_sequences_share_the_blocks_of_a_text_that_a_draft_model_has_read() -> None:
    draft = DraftModel(ModelRunner(PrefixModel(random_function(0, VOCAB), VOCAB)), CacheShape(64, 40, 4), 1)
    text = [1, 2, 3, 4, 0, 1, 2, 3, 4]
    draft.propose([DraftRequest(0, text, 1, SAMPLER)])
    assert draft.lag(1, [*text[:8], 0]) == 1
