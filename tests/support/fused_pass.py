"""Stubs of the fused pass and of the plain model; their logits encode the inputs of a pass."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.passes.base import Pass, PassInput
from mycli.runtime.engine.passes.cuda import CudaPass, _result
from mycli.runtime.engine.passes.graphs import Capture, Step, StepInput
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.errors import Declined
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import HiddenStateHook, Transformer
from mycli.runtime.models.part_spec import RopeScaling
from tests.support.graphs import UncomparedPass
from tests.support.prefix_model import CONFIG, CPU

CAPACITY = 32


class Sums:
    """Returns logits that encode the inputs of a step."""

    def __init__(self) -> None:
        self.calls = 0

    def takes(self, sequences: int, tokens: int) -> bool:
        return sequences * tokens <= 8

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        self.calls += 1
        found = inputs.tokens * 100 + inputs.lengths[:, None]
        found = found[:, -1:] if last else found
        return found[..., None].expand(-1, -1, 3).half()


def ones(inputs: StepInput) -> Tensor:
    """Return logits of ones for every row, and give `inputs` hidden states of ones."""
    if inputs.hidden is not None:
        inputs.hidden.rows = torch.ones(*inputs.tokens.shape, 2)
    return torch.ones(*inputs.tokens.shape, 3).half()


def session(rope: RopeScaling | None = None, sequences: int = 1) -> tuple[KVCache, Rope]:
    config = CONFIG if rope is None else replace(CONFIG, rope_scaling=rope)
    return KVCache(config, sequences, CAPACITY, CPU, torch.float16), Rope(config, CAPACITY, CPU, torch.float16)


def several(tokens: list[list[int]], start: int, logits: int = 1, first: int = 0) -> Batch:
    """Return a batch with new tokens of each sequence, which has one block; `first`: the first block."""
    chunks = [Chunk(row, start, (first + place,), logits) for place, row in enumerate(tokens)]
    return Batch.of(chunks, CAPACITY, CPU)


def one(token: int, start: int, logits: int = 1) -> Batch:
    return several([[token]], start, logits)


def fused_pass(
    step: Step, capture: Capture | None, warnings: list[Declined] | None = None, plain: Pass | None = None
) -> CudaPass:
    """Return a pass that runs `step`, verified against `plain` if given."""
    report = pytest.fail if warnings is None else warnings.append
    if plain is None:
        return UncomparedPass(step, PlainPass(model(lambda x: x)), capture, report)
    return CudaPass(step, plain, capture, report)


def run(fused: CudaPass, batch: Batch, rope: Rope, cache: KVCache) -> Tensor | None:
    """Return logits [rows, vocab] of a pass; None if it is declined or fails."""
    work = PassInput(batch.chunks, cache, rope)
    ran = None if fused.takes(work) else fused._run_step(work)
    return None if ran is None else _result(*ran, work).logits


class Plain(Transformer):
    """Returns the logits of `head` for an input of ones."""

    def forward(self, batch: Batch, rope: Rope, cache: KVCache, hook: HiddenStateHook | None = None) -> Tensor:
        return self._logits(torch.ones(batch.rows, 2), batch, hook)


def model(head: Callable[[Tensor], Tensor], head_dim: int = CONFIG.head_dim) -> Plain:
    made = Plain(replace(CONFIG, head_dim=head_dim))
    made.embedding = torch.zeros(8, 2)
    made.norm.forward = lambda x: x  # type: ignore[method-assign]  # irrelevant here
    made.head.forward = head  # type: ignore[method-assign]  # as above
    return made
