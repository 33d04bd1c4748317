"""Reports which pass of a model runs which work, and why each faster pass does not."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes.base import PassInput
from mycli.runtime.errors import Declined
from mycli.runtime.sampling.sampler import DeviceSampling

PROMPT_TOKENS = 512
SEQUENCES = 8  # of the batch
DRAFTS = 4
_PREFIX = 64  # tokens in the cache before a decode step


@dataclass(frozen=True)
class PassChoice:
    """One kind of work: the name of the pass that runs it, and why each faster one does not, by its name.

    work: prompt, decode, sample, batch or verify; makes_tokens: the pass also samples, several tokens in one call.
    """

    work: str
    chosen: str
    makes_tokens: bool
    declined: Mapping[str, Declined]


def pass_choices(runner: ModelRunner) -> list[PassChoice]:
    """Return the choices for a prompt, greedy and sampled decoding, a batch, and the verification of drafts.

    Empty for a model of embeddings, which decodes nothing.
    """
    if runner.config.bidirectional:
        return []
    context = min(runner.config.max_context, PROMPT_TOKENS)
    kind = cache_dtype(runner.kv, runner.dtype)
    # On the meta device: only the layout of the cache is read, so it takes no memory.
    cache = KVCache(runner.config, SEQUENCES, context, torch.device("meta"), kind, SEQUENCES)
    rope, start = runner.rope(context), min(_PREFIX, context // 2)
    vocab = runner.config.vocab_size

    def decoding(sequences: int, tokens: int = 1) -> list[Chunk]:
        return [Chunk([0] * tokens, start, (slot,), tokens, slot, tokens - 1) for slot in range(sequences)]

    greedy, drawn = DeviceSampling(vocab), DeviceSampling(vocab, 1.0)
    work = {
        "prompt": PassInput([Chunk([0] * context, 0, (0,), 1)], cache, rope),
        "decode": PassInput(decoding(1), cache, rope, sampling=[greedy]),
        "sample": PassInput(decoding(1), cache, rope, sampling=[drawn]),
        "batch": PassInput(decoding(SEQUENCES), cache, rope, sampling=[greedy] * SEQUENCES),
        "verify": PassInput(decoding(1, min(DRAFTS + 1, context - start)), cache, rope),
    }
    return [_choice(runner, name, request) for name, request in work.items()]


def _choice(runner: ModelRunner, name: str, request: PassInput) -> PassChoice:
    declined = dict(runner.passes.declined)
    if request.sampling is not None:
        for candidate in runner.passes.passes:
            if (why := candidate.takes(request)) is None:
                return PassChoice(name, candidate.name, True, declined)
            declined.setdefault(candidate.name, why)
        request = PassInput(request.chunks, request.cache, request.rope)
    for candidate in runner.passes.passes:
        if (why := candidate.takes(request)) is None:
            break
        declined[candidate.name] = why
    declined.pop("plain", None)  # it only declines to sample
    return PassChoice(name, candidate.name, False, declined)
