"""Builds engines for tests, generates replies with them and reads the contents of their cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.cache.prefix_index import Node
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.replies.completion import generate
from mycli.runtime.engine.sequence import Request, SequenceOutput, reply_room
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams

GREEDY = SamplingParams()


def contiguous_engine(runner: ModelRunner, context: int, sequences: int = 1, chunk: int | None = None) -> Engine:
    """Return an engine with one cache block for each sequence."""
    return Engine(runner, CacheShape.contiguous(context, sequences), runner.config.vocab_size, chunk=chunk)


def tokens_of(
    engine: Engine,
    prompt: Sequence[int],
    limit: int | None = 12,
    sampling: SamplingParams = GREEDY,
    stop: frozenset[int] = frozenset(),
) -> list[int]:
    """Generate one reply; a limit beyond the context is reduced to what fits."""
    room = reply_room(engine.context, len(prompt))
    limit = None if limit is None else max(min(limit, room), 0)
    return generate(engine, Request(tuple(prompt), sampling, limit, stop))[0]


def drain(engine: Engine) -> dict[int, list[SequenceOutput]]:
    """Run steps until the engine has no work; return the outputs by sequence."""
    found: dict[int, list[SequenceOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.sequence, []).append(output)
    return found


def together(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    numbers = [engine.submit(request) for request in requests]
    outputs = drain(engine)
    return [[token for output in outputs[number] for token in output.tokens] for number in numbers]


def text_of(node: Node) -> list[int]:
    """Return all tokens from the root to a node."""
    return [] if node.parent is None else [*text_of(node.parent), *node.tokens]


def cached_prefixes(engine: Engine) -> list[list[int]]:
    """Return the prefixes that an idle engine caches: the leaves of its prefix index."""
    assert not engine.scheduler.has_work
    texts, waiting = [], [engine.scheduler.pool.index.root]
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        if not node.children and node.tokens:
            texts.append(text_of(node))
    return sorted(texts)


def in_one_block(cache: KVCache, block: int, length: int) -> list[int]:
    """Return the tokens that a `PrefixModel` stored in one block of the cache."""
    found: list[int] = cache.all(0)[0].data[block, 0, :length, 0].long().tolist()
    return found


def whole(
    model: Transformer,
    tokens: Tensor,
    sizes: Sequence[int] = (),
    kind: torch.dtype | None = None,
    block_size: int | None = None,
) -> Tensor:
    """Return logits [sequences, n, vocab] for tokens [sequences, n].

    Each pass takes the next of `sizes` tokens of every sequence; without sizes it runs one pass. `kind`: dtype of the
    cache, None for the model's. Each sequence has one block as long as itself, or blocks of `block_size` in random
    order, among those of the other sequences.
    """
    sequences, count = tokens.shape
    each = -(-count // (block_size or count))
    order = torch.randperm(sequences * each, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [tuple(order[index::sequences]) for index in range(sequences)]
    cache = KVCache(model.config, len(order), block_size or count, model.device, kind or model.dtype, sequences)
    rope = Rope(model.config, count, model.device, model.dtype)
    parts, start = [], 0
    for size in sizes or (count,):
        rows = [row[start : start + size].tolist() for row in tokens]
        chunks = [Chunk(row, start, tables[index], len(row), index) for index, row in enumerate(rows)]
        batch = Batch.of(chunks, block_size or count, model.device)
        parts.append(model(batch, rope, cache).view(sequences, len(rows[0]), -1))
        start += size
    return torch.cat(parts, dim=1)
