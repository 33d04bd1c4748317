"""Replaying a fused pass: captured once as a CUDA graph, so that a token costs the host one launch instead of hundreds.

A graph holds addresses. It is made for one cache, and for one number of sequences and tokens, the second time such a
pass is asked for; tokens and lengths are written into its buffers before each replay. Knows passes and their shapes;
what a pass computes is in `runtime.engine.decode_step`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mycli.runtime.cache.block_table import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.engine.decode_step import DecodeStep
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import Kv

Launches = Callable[[], Tensor]  # launches, and where the result will be
Capture = Callable[[Launches], Launches]
MOST_GRAPHS = 16  # of one cache: each holds memory
TOLERANCE = 0.03  # relative difference of logits between two ways of rounding to bf16
_CHECK_CONTEXT = 64


class Step(Protocol):
    """What is replayed; see `DecodeStep`."""

    def takes(self, sequences: int, tokens: int) -> bool:
        """Whether it can do a pass of this shape."""
        ...

    def __call__(
        self, tokens: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache, last: bool
    ) -> Tensor:
        """The logits."""
        ...


def cuda_graph(work: Launches) -> Launches:
    """`work` captured on the current device; it ran before, so that everything it launches is compiled."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@dataclass(frozen=True)
class _Captured:
    """The buffers that a captured pass reads, which are kept with it, and its replay."""

    tokens: Tensor
    lengths: Tensor
    tables: tuple[Tensor, Tensor]
    replay: Launches


class Replay:
    """A fused pass for those passes of a model that it can do. `capture` None: launch by launch."""

    def __init__(self, step: Step, capture: Capture | None) -> None:
        self.step = step
        self._capture = capture
        # (sequences, new tokens, last logits only): None after the first pass of this shape.
        self._graphs: WeakKeyDictionary[KVCache, dict[tuple[int, int, bool], _Captured | None]]
        self._graphs = WeakKeyDictionary()

    def __call__(self, batch: Batch, rope: Rope, cache: KVCache) -> Tensor | None:
        """Logits [sequences, 1 or new, vocab], valid until the next call, or None where the plain model is to do it.

        It does passes over sequences that have a block each, neighbours, with as many new tokens, and logits of all of
        them or of the last.
        """
        first, sequences, new = batch.lanes, len(batch.spans), batch.spans[0].count
        tables, wanted = rope.fixed(cache.block_size), sum(batch.wanted)
        if (
            first is None
            or tables is None
            or wanted not in (sequences, batch.rows)
            or not self.step.takes(sequences, new)
        ):
            return None
        lanes, tokens, last = cache.lanes(first, sequences), batch.tokens.view(sequences, new), wanted < batch.rows
        known = self._graphs.setdefault(lanes, {})
        shape = (sequences, new, last)
        captured = known.get(shape)
        if captured is None:
            if self._capture is None or shape not in known:
                known[shape] = None
                return self.step(tokens, batch.lengths, tables, lanes, last)
            if len(known) >= MOST_GRAPHS:
                known.clear()
            held, lengths = tokens.clone(), batch.lengths.clone()
            replay = self._capture(lambda: self.step(held, lengths, tables, lanes, last))
            captured = known[shape] = _Captured(held, lengths, tables, replay)
        captured.tokens.copy_(tokens)
        captured.lengths.copy_(batch.lengths)
        return captured.replay()


def make_replay(model: Transformer, kv: Kv, warn: Callable[[str], None]) -> Replay | None:
    """For a model on a CUDA device run with caches of `kv`, if all of its layers can be done this way.

    The fused pass is compared with the plain one first, launched and replayed; where it fails or differs, `warn` is
    told and there is none.
    """
    step = DecodeStep.make(model)
    if isinstance(step, str):
        return None
    try:
        trouble = difference(model, step, kv, cuda_graph)
    except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
        trouble = f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"
    if trouble is not None:
        warn(f"the fused kernels are not used, decoding is slower: {trouble}")
        return None
    return Replay(step, cuda_graph)


@torch.inference_mode()
def difference(model: Transformer, step: Step, kv: Kv = "auto", capture: Capture | None = None) -> str | None:
    """What is wrong with the logits of `step` for a token and for several, None if nothing is."""
    device, config = model.device, model.config
    cache = KVCache(config, 1, _CHECK_CONTEXT, device, cache_dtype(kv, model.dtype))
    rope = Rope(config, _CHECK_CONTEXT, device, model.dtype)
    tables = rope.fixed(_CHECK_CONTEXT)
    if tables is None:
        return None
    prefix, most = 9, 4
    tokens = [index * 7919 % config.vocab_size for index in range(prefix + most)]

    def plain(chunk: Chunk) -> Tensor:
        logits: Tensor = model(Batch.of([chunk], _CHECK_CONTEXT, device), rope, cache)
        return logits

    plain(Chunk(tokens[:prefix], 0, (0,), 0))
    for count in (1, most):
        if not step.takes(1, count):
            continue
        drawn = tokens[prefix : prefix + count]
        expected = plain(Chunk(drawn, prefix, (0,), count))[None]
        new = torch.tensor([drawn], device=device)
        lengths = torch.full((1,), prefix + count, dtype=torch.int32, device=device)
        found = step(new, lengths, tables, cache, last=False).float()
        error = float((found - expected).norm() / expected.norm())
        if not error < TOLERANCE:
            return f"their logits differ by {error:.1%} from the plain model's"
        if capture is None:
            continue
        again = capture(partial(step, new, lengths, tables, cache, last=False))()
        if not torch.equal(again.float(), found):
            return "replayed, they give other logits than launched"
    return None
