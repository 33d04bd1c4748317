"""The next token of every sequence, sampled on the device from logits: the likeliest, or drawn at a temperature.

Two launches: a partial for each block of the vocabulary, and their reduction, which also writes what the next pass
reads (the token, and lengths one larger); more before them for top-k and top-p (`triton.top_k_top_p`). Nothing is
read back to the host, so a CUDA graph can hold all of it.

A draw is the largest of logit / temperature + Gumbel noise, which is distributed as softmax(logits / temperature) over
the tokens that the filters leave. The noise is a function of seed, position, sequence and token alone (Philox 4x32,
Salmon et al., SC 2011): it does not depend on how many steps a launch has. Knows no models; which settings this can do
is in `runtime.sampling.sampler`.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mycli.runtime.kernels.triton.top_k_top_p import Filters, Limit, find_limit, key_of, largest_of, settle

NO_NUMBER = -1  # in place of a token, where the logits were NaN or infinite
VOCABULARY_BLOCK = 1024  # of the vocabulary, to a program
NO_FILTERS = Filters()


@triton.jit
def _gumbel(seed, position, sequence, index):
    """Standard Gumbel noise: -log of an exponential, which is -log(1 - u) of 64 random bits.

    Small u keep all digits of a float: they are the noise large enough to make an unlikely token win.
    """
    high, low, _, _ = tl.philox(seed, index, position, sequence, index * 0)
    u = (high.to(tl.float32) + (low.to(tl.float32) + 0.5) * 2.3283064365386963e-10) * 2.3283064365386963e-10
    series = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    exponential = tl.where(u < 0.01, series, -tl.log(tl.maximum(1 - u, 2.9802322387695312e-08)))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["step"])
def partial_kernel(
    logits,  # [sequences, stride]
    best,  # fp32 [sequences, blocks]: of the noisy logits; infinity where a logit is no number
    index,  # int32 [sequences, blocks]
    lengths,  # int32 [sequences]: the position of the token to sample
    seed,  # int64 [1]
    temperature,  # fp32 [1]
    peaks,  # where something is filtered out, of `Limit`
    weights,
    lows,
    goals,
    top_k,  # fp32 [1]
    min_p,  # fp32 [1]
    stride,
    vocab,
    step,
    DRAW: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    sequence, block = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < vocab
    x = tl.load(logits + sequence.to(tl.int64) * stride + place, mask=inside, other=float("-inf")).to(tl.float32)
    broken = (x != x) | (x == float("inf"))
    if DRAW:
        heat = tl.load(temperature)
        may = inside
        if TOP_K or TOP_P:
            goal = tl.load(goals + sequence) if TOP_P else tl.load(top_k)
            low, _ = settle(weights, lows, goal, 0.0, step, sequence, blocks, False, BLOCKS)
            may = key_of(x) >= low
        if MIN_P:
            may = may & ((x - largest_of(peaks, sequence, blocks, BLOCKS)) / heat >= tl.log(tl.load(min_p)))
        position = tl.load(lengths + sequence)
        x = x / heat + _gumbel(tl.load(seed), place * 0 + position, place * 0 + sequence, place)
        x = tl.where(may, x, float("-inf"))
    x = tl.where(broken, float("inf"), x)
    largest = tl.max(x, 0)
    first = tl.min(tl.where(x == largest, place, 2147483647), 0)  # among equals the lowest
    where = sequence * blocks + block
    tl.store(best + where, largest)
    tl.store(index + where, first)


@triton.jit(do_not_specialize=["step"])
def sample_kernel(
    best,
    index,
    blocks,
    chosen,  # int64 [steps, sequences]
    step,
    tokens,  # int64 [sequences]: what the next pass reads
    lengths,  # int32 [sequences]: grow by one
    NONE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    sequence = tl.program_id(0)
    place = tl.arange(0, BLOCKS)
    inside = place < blocks
    x = tl.load(best + sequence * blocks + place, mask=inside, other=float("-inf"))
    candidates = tl.load(index + sequence * blocks + place, mask=inside, other=2147483647)
    largest = tl.max(x, 0)
    token = tl.min(tl.where(x == largest, candidates, 2147483647), 0).to(tl.int64)
    broken = (largest == float("inf")) | (largest == float("-inf"))
    tl.store(chosen + step * tl.num_programs(0) + sequence, tl.where(broken, NONE, token))
    tl.store(tokens + sequence, tl.where(broken, 0, token))
    tl.store(lengths + sequence, tl.load(lengths + sequence) + 1)


@dataclass(frozen=True)
class SamplingBuffers:
    """What sampling reads and writes on the device: tokens and lengths go to the next pass, seed and settings stay.

    tokens int64 [sequences, 1]; lengths int32 [sequences], the tokens of each once `tokens` are in the cache;
    seed int64 [1]; temperature, top_k (1 to the vocabulary), top_p, min_p fp32 [1];
    chosen int64 [steps, sequences], `NO_NUMBER` where logits were no numbers.
    """

    tokens: Tensor
    lengths: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    chosen: Tensor

    @classmethod
    def make(cls, steps: int, sequences: int, device: torch.device) -> "SamplingBuffers":
        """Buffers for `steps` steps."""
        temperature, top_k, top_p, min_p = (torch.ones(1, dtype=torch.float32, device=device) for _ in range(4))
        return cls(
            torch.zeros(sequences, 1, dtype=torch.int64, device=device),
            torch.zeros(sequences, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            temperature,
            top_k,
            top_p,
            min_p,
            torch.zeros(steps, sequences, dtype=torch.int64, device=device),
        )


def sample_tokens(
    logits: Tensor, vocab: int, draw: bool, to: SamplingBuffers, step: int, filters: Filters = NO_FILTERS
) -> None:
    """The next tokens after logits [sequences, vocab or more], of any floating dtype, as step `step` of `to`.

    `draw` False takes the likeliest, the lowest id among equals; True draws with the settings and the seed of `to`,
    from what `filters` leave. What lies at and beyond `vocab` is never sampled.
    """
    sequences, stride = logits.shape[0], logits.stride(0)
    if logits.stride(1) != 1 or logits.shape[1] < vocab:
        raise ValueError(f"logits {tuple(logits.shape)} with strides {logits.stride()} for {vocab} tokens")
    blocks = triton.cdiv(vocab, VOCABULARY_BLOCK)
    most = triton.next_power_of_2(blocks)
    best = torch.empty(sequences, blocks, dtype=torch.float32, device=logits.device)
    index = torch.empty(sequences, blocks, dtype=torch.int32, device=logits.device)
    # Without filters nothing of a limit is read.
    limit = Limit(best, best, index, best, 0)
    if draw and filters.any:
        limit = find_limit(logits, vocab, filters, to.temperature, to.top_k, to.top_p, VOCABULARY_BLOCK)
    partial_kernel[(sequences, blocks)](
        logits,
        best,
        index,
        to.lengths,
        to.seed,
        to.temperature,
        limit.peaks,
        limit.weights,
        limit.lows,
        limit.goals,
        to.top_k,
        to.min_p,
        stride,
        vocab,
        limit.step,
        DRAW=draw,
        TOP_K=filters.top_k,
        TOP_P=filters.top_p,
        MIN_P=filters.min_p,
        BLOCK=VOCABULARY_BLOCK,
        BLOCKS=most,
    )
    sample_kernel[(sequences,)](
        best, index, blocks, to.chosen, step, to.tokens, to.lengths, NONE=NO_NUMBER, BLOCKS=most
    )
