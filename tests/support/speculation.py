"""Builds toy models over five tokens, proposers for them, and engines with and without speculation."""

import torch
from torch import Tensor

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.speculative.draft_length import DraftLengthPolicy
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.proposers import DraftModel, Proposer
from mycli.runtime.speculative.speculator import ProposerSpeculator
from tests.support.engines import tokens_of
from tests.support.prefix_model import PrefixModel, random_function

VOCAB = 5
PROMPT = [1, 2, 3, 1, 2]


def target_model(seed: int = 0) -> PrefixModel:
    """Return a model whose head is padded: rows 5 to 7 have no token, and large logits that must not be drawn."""
    function, padding = random_function(seed, VOCAB), torch.full((3,), 9.0, dtype=torch.float64)

    def padded(text: tuple[int, ...]) -> Tensor:
        return torch.cat((function(text), padding))

    return PrefixModel(padded, VOCAB + 3)


def proposers(target: PrefixModel, seed: int = 1, max_context: int = 64) -> dict[str, Proposer]:
    draft = PrefixModel(random_function(seed, VOCAB), VOCAB, max_context)
    return {"draft": DraftModel(ModelRunner(draft), CacheShape.contiguous(64), target.nbytes), "ngram": PromptLookup()}


def speculating(
    target: PrefixModel, proposer: Proposer, policy: DraftLengthPolicy, shape: CacheShape | None = None, **options: int
) -> Engine:
    speculator = ProposerSpeculator(proposer, lambda: policy)
    shape = shape or CacheShape.contiguous(64)
    return Engine(ModelRunner(target), shape, VOCAB, speculator=speculator, **options)


def plainly(target: PrefixModel, shape: CacheShape | None = None, **options: int) -> Engine:
    return Engine(ModelRunner(target), shape or CacheShape.contiguous(64), VOCAB, **options)


def reply(engine: Engine, prompt: list[int], limit: int, sampling: SamplingParams | None = None) -> list[int]:
    return tokens_of(engine, prompt, limit, sampling or SamplingParams())
