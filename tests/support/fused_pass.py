"""Stand-ins of the fused pass and of the model beside it: logits that say what a pass was given."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mycli.runtime.cache.block_table import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.part_spec import RopeScaling
from tests.support.prefix_model import CONFIG, CPU

CAPACITY = 32


class Sums:
    """Logits that say what the step was given."""

    def __init__(self) -> None:
        self.calls = 0

    def takes(self, sequences: int, tokens: int) -> bool:
        return sequences * tokens <= 8

    def __call__(
        self, tokens: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache, last: bool
    ) -> Tensor:
        self.calls += 1
        found = (tokens * 100 + lengths[:, None])[:, -1:] if last else tokens * 100 + lengths[:, None]
        return found[..., None].expand(-1, -1, 3).half()


def session(rope: RopeScaling | None = None, sequences: int = 1) -> tuple[KVCache, Rope]:
    config = CONFIG if rope is None else replace(CONFIG, rope_scaling=rope)
    return KVCache(config, sequences, CAPACITY, CPU, torch.float16), Rope(config, CAPACITY, CPU, torch.float16)


def several(tokens: list[list[int]], start: int, logits: int = 1, first: int = 0) -> Batch:
    """New tokens of each sequence, whose blocks are neighbours from `first` on."""
    chunks = [Chunk(row, start, (first + place,), logits) for place, row in enumerate(tokens)]
    return Batch.of(chunks, CAPACITY, CPU)


def one(token: int, start: int, logits: int = 1) -> Batch:
    return several([[token]], start, logits)


class Plain(Transformer):
    """Logits of ones; remembers nothing."""

    def hidden(self, batch: Batch, rope: Rope, cache: KVCache) -> Tensor:
        return torch.ones(1, batch.rows, 2)


def model(head: Callable[[Tensor], Tensor], head_dim: int = CONFIG.head_dim) -> Plain:
    made = Plain(replace(CONFIG, head_dim=head_dim))
    made.embedding = torch.zeros(8, 2)
    made.norm.forward = lambda x: x  # type: ignore[method-assign]  # not of interest here
    made.head.forward = head  # type: ignore[method-assign]  # as above
    return made
