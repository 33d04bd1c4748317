"""Replaying a fused pass: captured once as a CUDA graph, so that a token costs the host one launch instead of hundreds.

A graph holds addresses. It is made for one cache, and for one number of sequences and tokens, the second time such a
pass is asked for; tokens and lengths are written into its buffers before each replay. Knows passes and their shapes;
what a pass computes is in `runtime.engine.decode_step`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mycli.runtime.cache.block_table import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.engine.decode_step import DecodeStep
from mycli.runtime.errors import summarize_error
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.graphs import MOST_GRAPHS
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS

Launches = Callable[[], Tensor]  # launches, and where the result will be
Plain = Callable[[Batch, Rope, KVCache], Tensor]  # logits fp32 [rows wanted, vocab]; see `Transformer`
Capture = Callable[[Launches], Launches]
TOLERANCE = 0.03  # relative difference of logits between two ways of rounding to bf16
# Where tokens choose experts: of experts with about equal scores another is chosen then. In bf16 and in fp32 logits of
# random mixtures differ by up to 0.14 over 16 tokens, by 0.26 for one; those that have nothing in common, by 1.4.
ROUTED_TOLERANCE = 0.4
_CHECK_CONTEXT = 1024  # attention splits the keys of such a cache into several parts
_CHECK_PREFIX = 300  # tokens before those that are compared: in more than one part
_CHECKED_ROWS = 8  # of passes that are like those compared at load; wider ones have other tiles


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


class GraphCapture:
    """Captures work as CUDA graphs that share one pool of memory.

    Replays follow each other on one stream, so that all of them may use what is theirs for the time of a replay alone;
    only results, which are kept, lie apart (torch.cuda.graph_pool_handle). A pool of each graph's own would hold what
    a pass needs as often as there are graphs.
    """

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None  # kept: the pool is that graph's

    def __call__(self, work: Launches) -> Launches:
        """`work` captured on the current device; it ran before, so that everything it launches is compiled."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if self._first is None else self._first.pool()):
            out = work()
        self._first = self._first or graph

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
    """A fused pass for those passes of a model that it can do. `capture` None: launch by launch.

    The first pass of a shape of more than 8 rows is compared with that of `plain`, unless that is None: logits differ
    by less than the `tolerance` then. Where one
    fails or differs, `warn` is told once, and the plain model does this pass, which writes the same places of the
    cache, and all others: after a capture or a replay that failed all of them, after a first launch those of its shape.
    """

    def __init__(
        self,
        step: Step,
        capture: Capture | None,
        warn: Callable[[str], None] = lambda text: None,
        plain: Plain | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.step, self._tolerance = step, tolerance
        self._capture, self._warn, self._plain = capture, warn, plain
        self._failed = False
        self._compared: set[tuple[int, int]] = set()  # sequences and new tokens
        self._refused: set[tuple[int, int]] = set()  # sequences and new tokens
        # (sequences, new tokens, last logits only): None after the first pass of this shape.
        self._graphs: WeakKeyDictionary[KVCache, dict[tuple[int, int, bool], _Captured | None]]
        self._graphs = WeakKeyDictionary()

    def trusts(self, sequences: int, new: int) -> bool:
        """Whether passes of this shape have been compared, at load or here, and none has failed."""
        if self._failed or (sequences, new) in self._refused:
            return False
        return sequences * new <= _CHECKED_ROWS or self._plain is None or (sequences, new) in self._compared

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
            or self._failed
            or (sequences, new) in self._refused
            or not self.step.takes(sequences, new)
        ):
            return None
        lanes, tokens, last = cache.lanes(first, sequences), batch.tokens.view(sequences, new), wanted < batch.rows
        known = self._graphs.setdefault(lanes, {})
        shape = (sequences, new, last)
        launched = self._capture is None or shape not in known
        try:
            if launched:
                expected = None
                if not self.trusts(sequences, new) and self._plain is not None:
                    expected = self._plain(batch, rope, cache)  # before: the cache is to hold what replays leave there
                # Copies, as a capture has them: what Triton compiles depends on whether an address is aligned.
                found = self.step(tokens.clone(), batch.lengths.clone(), tables, lanes, last)
                trouble = None if expected is None else _unlike(found.flatten(0, 1), expected, self._tolerance)
                if trouble is not None:
                    self._give_up(trouble, (sequences, new))
                    return None
                self._compared.add((sequences, new))
                known[shape] = None
                return found
            captured = known[shape] or self._captured(known, shape, tokens, batch.lengths, tables, lanes)
            captured.tokens.copy_(tokens)
            captured.lengths.copy_(batch.lengths)
            return captured.replay()
        except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            self._give_up(summarize_error(error), (sequences, new) if launched else None)
            return None

    def _captured(
        self,
        known: dict[tuple[int, int, bool], _Captured | None],
        shape: tuple[int, int, bool],
        tokens: Tensor,
        lengths: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
    ) -> _Captured:
        """A pass of this shape, captured and kept among the `known` ones of its cache."""
        assert self._capture is not None
        if len(known) >= MOST_GRAPHS:
            known.clear()
        tokens, lengths = tokens.clone(), lengths.clone()
        replay = self._capture(lambda: self.step(tokens, lengths, tables, cache, shape[2]))
        captured = known[shape] = _Captured(tokens, lengths, tables, replay)
        return captured

    def _give_up(self, trouble: str, shape: tuple[int, int] | None) -> None:
        """Leave passes of this shape to the plain model, or all; say so the first time."""
        if not self._failed and not self._refused:
            self._warn(f"the fused kernels failed, passes like this one are slower from now on: {trouble}")
        if shape is not None:
            self._refused.add(shape)
        else:
            self._failed = True
            self._graphs.clear()


def make_replay(model: Transformer, kv: KvDtype, warn: Callable[[str], None]) -> Replay | None:
    """For a model on a CUDA device run with caches of `kv`, if all of its layers can be done this way.

    The fused pass is compared with the plain one first, launched and replayed; where it fails or differs, `warn` is
    told and there is none.
    """
    step = DecodeStep.make(model)
    if isinstance(step, str):
        return None
    if kv == "int4" and model.config.head_dim not in FUSED_INT4_HEADS:
        warn("the fused kernels read keys and values in int4 for heads of 64, 128 and 256 alone, decoding is slower")
        return None
    capture = GraphCapture()
    try:
        trouble = difference(model, step, kv, capture)
    except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
        trouble = summarize_error(error)
    if trouble is not None:
        warn(f"the fused kernels are not used, decoding is slower: {trouble}")
        return None
    return Replay(step, capture, warn, model, tolerance(model.config))


def tolerance(config: ModelConfig) -> float:
    """By how much, relatively, logits may differ from the plain model's."""
    routed = any(isinstance(spec.mlp, ExpertsSpec) for spec in config.layer_specs)
    return ROUTED_TOLERANCE if routed else TOLERANCE


def _unlike(found: Tensor, expected: Tensor, most: float) -> str | None:
    """By how much logits differ from the plain model's; None where that is what rounding does."""
    error = float((found.float() - expected).norm() / expected.norm())
    return None if error < most else f"their logits differ by {error:.1%} from the plain model's"


@torch.inference_mode()
def difference(
    model: Transformer, step: Step, kv: KvDtype = "auto", capture: Capture | None = None, counts: Sequence[int] = (1, 4)
) -> str | None:
    """What is wrong with the logits of `step` for so many tokens, None if nothing is."""
    device, config = model.device, model.config
    context, most = min(_CHECK_CONTEXT, config.max_context), max(counts)
    cache = KVCache(config, 1, context, device, cache_dtype(kv, model.dtype))
    rope = Rope(config, context, device, model.dtype)
    tables = rope.fixed(context)
    if tables is None:
        return None
    prefix = min(_CHECK_PREFIX, context - most)
    tokens = [index * 7919 % config.vocab_size for index in range(prefix + most)]

    def plain(chunk: Chunk) -> Tensor:
        logits: Tensor = model(Batch.of([chunk], context, device), rope, cache)
        return logits

    plain(Chunk(tokens[:prefix], 0, (0,), 0))
    for count in counts:
        if not step.takes(1, count):
            continue
        drawn = tokens[prefix : prefix + count]
        expected = plain(Chunk(drawn, prefix, (0,), count))[None]
        new = torch.tensor([drawn], device=device)
        lengths = torch.full((1,), prefix + count, dtype=torch.int32, device=device)
        found = step(new, lengths, tables, cache, last=False)
        trouble = _unlike(found, expected, tolerance(config))
        if trouble is not None:
            return trouble
        if capture is None:
            continue
        again = capture(partial(step, new, lengths, tables, cache, last=False))()
        if not torch.equal(again, found):
            return "replayed, they give other logits than launched"
    return None
