"""Samples the next token of every sequence on the device: greedy, or drawn at a temperature."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mycli.runtime.kernels.triton.top_k_top_p import Filters, Limit, find_limit, key_of, largest_of, search_bound

# Two launches: the best token of each block of the vocabulary, then the best of all, which also writes what the next
# pass reads (token and length). top-k and top-p need more launches before them (`triton.top_k_top_p`). Nothing is
# read back, so a CUDA graph can contain all of it.
#
# A draw is the argmax of logit / temperature + Gumbel noise, which has the distribution softmax(logits /
# temperature). The noise is a function of seed, position, sequence and token (Philox 4x32, Salmon et al., SC 2011),
# so a draw does not depend on the number of steps per launch. `runtime.sampling.sampler` decides which settings run
# here.

NO_NUMBER = -1  # in place of a token if logits are NaN or infinite
VOCABULARY_BLOCK = 1024  # tokens per program
NO_FILTERS = Filters()


@triton.jit
def _gumbel(seed, position, sequence, index):
    """Return standard Gumbel noise, -log(-log(1 - u)) for u of 64 random bits."""
    high, low, _, _ = tl.philox(seed, index, position, sequence, index * 0)
    u = (high.to(tl.float32) + (low.to(tl.float32) + 0.5) * 2.3283064365386963e-10) * 2.3283064365386963e-10
    # The series keeps all digits of small u, which give the large noise that lets an unlikely token win.
    series = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    exponential = tl.where(u < 0.01, series, -tl.log(tl.maximum(1 - u, 2.9802322387695312e-08)))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["step"])
def partial_kernel(
    logits,  # [sequences, stride]
    best,  # fp32 [sequences, blocks]: largest noisy logit; infinity where a logit is invalid
    index,  # int32 [sequences, blocks]
    lengths,  # int32 [sequences]: the position of the token to sample
    seed,  # int64 [1]
    temperature,  # fp32 [1]
    peaks,  # this and the next three: `Limit`, read only with filters
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
        temp = tl.load(temperature)
        allowed = inside
        if TOP_K or TOP_P:
            goal = tl.load(goals + sequence) if TOP_P else tl.load(top_k)
            low, _ = search_bound(weights, lows, goal, 0.0, step, sequence, blocks, False, BLOCKS)
            allowed = key_of(x) >= low
        if MIN_P:
            allowed = allowed & ((x - largest_of(peaks, sequence, blocks, BLOCKS)) / temp >= tl.log(tl.load(min_p)))
        position = tl.load(lengths + sequence)
        x = x / temp + _gumbel(tl.load(seed), place * 0 + position, place * 0 + sequence, place)
        x = tl.where(allowed, x, float("-inf"))
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
    lengths,  # int32 [sequences]: grow by one; 0 for a padding sequence stays
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
    length = tl.load(lengths + sequence)
    tl.store(lengths + sequence, length + (length > 0).to(tl.int32))


@dataclass(frozen=True)
class SamplingBuffers:
    """Device tensors of sampling: tokens and lengths are input and output, seed and settings only input.

    tokens int64 [sequences, 1]; lengths int32 [sequences], cached tokens including `tokens`; seed int64 [1];
    temperature, top_k (1 to vocab), top_p, min_p fp32 [1]; chosen int64 [steps, sequences], `NO_NUMBER` where logits
    are NaN or infinite.
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
        """Return zeroed buffers for `steps` steps."""
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
    """Sample step `step` of `to` from logits [sequences, at least vocab], of any floating dtype.

    draw: False for the argmax, the lowest id among equals; True to draw with the settings and seed of `to` from what
    `filters` leave. Logits at and beyond `vocab` are never sampled.
    """
    sequences, stride = logits.shape[0], logits.stride(0)
    if logits.stride(1) != 1 or logits.shape[1] < vocab:
        raise ValueError(f"logits {tuple(logits.shape)} with strides {logits.stride()} for {vocab} tokens")
    blocks = triton.cdiv(vocab, VOCABULARY_BLOCK)
    max_blocks = triton.next_power_of_2(blocks)
    best = torch.empty(sequences, blocks, dtype=torch.float32, device=logits.device)
    index = torch.empty(sequences, blocks, dtype=torch.int32, device=logits.device)
    # Without filters the kernel reads nothing of the limit; any tensors do.
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
        BLOCKS=max_blocks,
    )
    sample_kernel[(sequences,)](
        best, index, blocks, to.chosen, step, to.tokens, to.lengths, NONE=NO_NUMBER, BLOCKS=max_blocks
    )
