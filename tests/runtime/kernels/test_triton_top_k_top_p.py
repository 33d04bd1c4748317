"""Test the top-k and top-p threshold against the host's definition, value by value, in the interpreter."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mycli.runtime.sampling.logits_processors import process
from mycli.runtime.sampling.params import SamplingParams
from tests.support.random_tensors import normal
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

import triton  # noqa: E402  (only where Triton is)
import triton.language as tl  # noqa: E402  (as above)

from mycli.runtime.kernels.triton.sample import VOCABULARY_BLOCK, SamplingBuffers, sample_tokens  # noqa: E402  (as above)
from mycli.runtime.kernels.triton.top_k_top_p import Filters, LogitSource, find_limit, key_of, search_bound  # noqa: E402  (as above)

__all__ = ["interpret"]


@dataclass(frozen=True)
class Case:
    """Describes random logits: multiples of `unit`, so that many are equal (0: continuous); `spread`: about 1."""

    sampling: SamplingParams
    vocab: int = 2500
    sequences: int = 2
    dtype: torch.dtype = torch.float32
    unit: float = 0.0
    spread: float = 4.0

    def __str__(self) -> str:
        given = self.sampling
        cut = f"k{given.top_k}-p{given.top_p}-t{given.temperature}"
        return f"{self.sequences}x{self.vocab}-{cut}-{self.dtype}-{self.unit}-{self.spread}".replace("torch.", "")

    def logits(self) -> Tensor:
        """Return logits whose padding is larger than all of them."""
        logits = normal(self.sequences, self.vocab, seed=3) * self.spread + 1
        if self.unit:
            logits = (logits / self.unit).round() * self.unit
        return torch.cat((logits, torch.full((self.sequences, 9), 99.0)), dim=1).to(self.dtype)


def settings(sampling: SamplingParams, sequences: int, vocab: int) -> tuple[SamplingBuffers, Filters]:
    to = SamplingBuffers.make(1, sequences, torch.get_default_device())
    top_k = sampling.top_k if sampling.top_k < vocab else 0
    for buffer, value in (
        (to.temperature, sampling.temperature),
        (to.top_k, top_k),
        (to.top_p, sampling.top_p),
        (to.min_p, sampling.min_p),
    ):
        buffer.fill_(value)
    return to, Filters(top_k > 0, sampling.top_p < 1, sampling.min_p > 0)


@triton.jit
def kept_kernel(  # type: ignore[no-untyped-def]  # device code carries no types
    logits, out, weights, lows, goals, stride, vocab, step, blocks, SIZE: tl.constexpr
):
    sequence = tl.program_id(0)
    goal = tl.load(goals + sequence)
    low, _ = search_bound(weights, lows, goal, 0.0, step, sequence, blocks, False, 8)
    place = tl.arange(0, SIZE)
    x = tl.load(logits + sequence * stride + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    tl.store(out + sequence * vocab + place, (key_of(x) >= low).to(tl.int8), mask=place < vocab)


def kept(case: Case) -> tuple[list[list[bool]], list[list[bool]]]:
    """Return the tokens kept by the device and by the host."""
    logits = case.logits()
    to, filters = settings(case.sampling, case.sequences, case.vocab)
    source = LogitSource(logits, logits.stride(0), case.vocab, *(None,) * 5)
    blocks = logits[:, : case.vocab].float().split(VOCABULARY_BLOCK, dim=1)
    peaks = torch.stack([block.amax(dim=1) for block in blocks], dim=1).contiguous()
    limit = find_limit(source, peaks, filters, to.temperature, to.top_k, to.top_p, VOCABULARY_BLOCK)
    out = torch.empty(case.sequences, case.vocab, dtype=torch.int8)
    kept_kernel[(case.sequences,)](
        logits,
        out,
        limit.weights,
        limit.lows,
        limit.goals,
        logits.stride(0),
        case.vocab,
        limit.step,
        peaks.shape[1],
        SIZE=triton.next_power_of_2(case.vocab),
    )
    host = process(logits[:, : case.vocab].double(), case.sampling).isfinite()
    return out.bool().tolist(), host.tolist()


WARM = SamplingParams(temperature=0.7)
CASES = [
    Case(replace(WARM, top_k=20)),
    Case(replace(WARM, top_k=1)),
    Case(replace(WARM, top_k=2499)),
    Case(replace(WARM, top_k=20), unit=0.5),
    Case(replace(WARM, top_p=0.9)),
    Case(replace(WARM, top_p=0.9), unit=0.5),
    Case(replace(WARM, top_p=0.0)),
    Case(replace(WARM, top_p=0.999, temperature=2.0)),
    Case(replace(WARM, top_k=50, top_p=0.8)),
    Case(replace(WARM, top_k=50, top_p=0.8, temperature=2.0), spread=1.0),
    Case(replace(WARM, top_k=20), spread=1e-5),
    Case(replace(WARM, top_k=50, top_p=0.8), unit=0.25, dtype=torch.bfloat16),
    Case(replace(WARM, top_k=5000, top_p=0.5), dtype=torch.bfloat16, vocab=1025, sequences=3),
    Case(replace(WARM, top_k=7, top_p=0.95), dtype=torch.float16, vocab=9, sequences=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_kept_is_what_the_host_keeps(case: Case, interpret: Interpret) -> None:
    device, host = interpret(kept, case)  # type: ignore[misc]  # the pool carries any result
    assert any(any(row) for row in host) and device == host


def spoiled() -> list[int]:
    """Return the tokens of a sequence with finite logits next to three with NaN, +inf and -inf."""
    logits = torch.zeros(4, 3000)
    logits[:, 2000] = 9.0
    logits[1:, 5] = torch.tensor([math.nan, math.inf, -math.inf])
    to, filters = settings(SamplingParams(temperature=0.1, top_k=3, top_p=0.5, min_p=0.1), 4, 3000)
    to.numbers.fill_(1 << 62)
    sample_tokens(logits, 3000, True, to, 0, filters)
    return to.chosen[0].tolist()  # type: ignore[no-any-return]  # torch's list


def test_logits_that_are_no_numbers_are_told_all_the_same(interpret: Interpret) -> None:
    assert interpret(spoiled) == [2000, -1, -1, 2000]
