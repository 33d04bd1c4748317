"""Test that speculative outputs have exactly the target's probabilities by enumerating every random choice."""

from collections import defaultdict
from itertools import product

import pytest
import torch
from torch import Tensor

from mycli.runtime.engine.sequence import Request
from mycli.runtime.engine.speculation import DraftRequest
from mycli.runtime.sampling.logits_processors import distribution
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.rejection_sampling import rejection_sample
from tests.support.engines import drain
from tests.support.grids import chosen
from tests.support.prefix_model import Choose, ChoosingSampler, PrefixModel, all_outcomes
from tests.support.speculation import PROMPT, VOCAB, proposers, speculating, target_model

PAIRS = [2, 0, 2, 1, 2, 2, 3, 2, 4, 2]  # for any next token, the pair occurred before
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


def next_probabilities(model: PrefixModel, text: tuple[int, ...], sampling: SamplingParams) -> Tensor:
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    seen[0, list(text)] = True
    return distribution(model.logits(text)[None, :VOCAB], sampling, seen)[0]


def exact(model: PrefixModel, prompt: list[int], length: int, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    found = {}
    for output in product(range(VOCAB), repeat=length):
        found[output] = 1.0
        for index, token in enumerate(output):
            if found[output]:
                found[output] *= float(next_probabilities(model, (*prompt, *output[:index]), sampling)[token])
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    chosen(
        [(name, kind) for name in SETTINGS for kind in ("draft", "ngram")],
        quick=[*((name, "draft") for name in SETTINGS), ("plain", "ngram"), ("greedy-bias", "ngram"), ("all", "ngram")],
    ),
)
def test_outputs_have_exactly_the_probabilities_of_the_target(name: str, kind: str) -> None:
    """Enumerate every random choice of the loop: three tokens, the second and third speculated."""
    check_every_outcome(SETTINGS[name], kind, 3)


def test_four_tokens_have_exactly_the_probabilities_of_the_target() -> None:
    """The runs include rejections at every position, the bonus token, and several passes."""
    check_every_outcome(SamplingParams(temperature=1.0, top_k=3, repetition_penalty=1.3), "draft", 4)


def check_every_outcome(sampling: SamplingParams, kind: str, length: int) -> None:
    target = target_model()
    proposer = proposers(target)[kind]

    def run(choose: Choose) -> tuple[int, ...]:
        proposer.forget()  # from earlier outcomes: each is one of a fresh engine
        engine = speculating(target, proposer, FixedDraftLength(4))
        number = engine.submit(Request(tuple(PAIRS), sampling, limit=length))
        engine._states[number].sampler = ChoosingSampler(sampling, VOCAB, choose)
        engine._states[number].sampler.seen.observe_prompt(PAIRS)
        return tuple(token for output in drain(engine)[number] for token in output.tokens)

    outcomes = all_outcomes(run)
    for output, probability in exact(target, PAIRS, length, sampling).items():
        assert outcomes.get(output, 0.0) == pytest.approx(probability, abs=1e-9), output
    assert length - 1 in target.passes, "drafts were compared"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pass_over_several_drafts_has_exactly_the_probabilities_of_the_target(name: str) -> None:
    """The pass has two draft tokens and the bonus token; the remaining tokens follow the definition."""
    target, sampling = target_model(), SETTINGS[name]
    proposer = proposers(target)["draft"]

    def run(choose: Choose) -> tuple[int, ...]:
        sampler = ChoosingSampler(sampling, VOCAB, choose)
        sampler.seen.observe_prompt(PROMPT)
        (proposal,) = proposer.propose([DraftRequest(0, PROMPT, 2, sampler)])
        proposer.finish(0, PROMPT)
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
