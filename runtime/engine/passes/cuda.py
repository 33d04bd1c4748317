"""The CUDA pass: fused kernels, replayed as CUDA graphs, and several tokens in one launch.

A token then costs the host one launch instead of hundreds. A graph holds addresses, so it belongs to one cache and one
number of sequences and tokens; it is captured the second time that such a pass runs, and tokens and lengths are copied
into its buffers before each replay.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch, Chunk, contiguous_slot
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.engine.passes.base import OnDecline, Pass, PassInput, TokenSteps
from mycli.runtime.engine.passes.graphs import Capture, GraphCapture, Launches, Step
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.graphs import MOST_GRAPHS
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS

if TYPE_CHECKING:  # it imports Triton, which takes a second and is not on every machine
    from mycli.runtime.engine.passes.device_loop import DeviceLoop

TOLERANCE = 0.03  # relative difference of logits between two ways of rounding to bf16
# In a mixture of experts rounding can change which of two equally scored experts is chosen. Between bf16 and fp32,
# logits of random mixtures differ by up to 0.14 over 16 tokens and 0.26 for one; unrelated logits differ by 1.4.
ROUTED_TOLERANCE = 0.4
_CHECK_CONTEXT = 1024  # long enough that attention splits the keys into several parts
_CHECK_PREFIX = 300  # tokens before the compared ones, in more than one part
_CHECKED_ROWS = 8  # the comparison at load covers passes of up to 8 rows; wider ones use other tiles


@dataclass(frozen=True)
class _Captured:
    """A captured pass with the buffers that it reads."""

    tokens: Tensor
    lengths: Tensor
    tables: tuple[Tensor, Tensor]
    replay: Launches


class CudaPass:
    """Runs `step` as replayed graphs, or launch by launch if `capture` is None.

    The first pass of a shape of more than 8 rows is compared with `plain` unless `compare` is False. A pass that fails
    or differs is reported once and computed by `plain`, which writes the same cache slots. After a failed capture or
    replay all passes are declined from then on; after a failed first launch only those of its shape.
    """

    name = "cuda"
    samples = True

    def __init__(
        self,
        step: Step,
        plain: Pass,
        capture: Capture | None,
        report: OnDecline = lambda declined: None,
        *,
        compare: bool = True,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.step = step
        self._plain, self._capture, self._report = plain, capture, report
        self._compare, self._tolerance = compare, tolerance
        self.loop: DeviceLoop | None = None
        self._failed: Declined | None = None
        self._compared: set[tuple[int, int]] = set()  # (sequences, new tokens)
        self._refused: dict[tuple[int, int], Declined] = {}
        # (sequences, new tokens, last logits only): None after the first pass of this shape.
        self._graphs: WeakKeyDictionary[KVCache, dict[tuple[int, int, bool], _Captured | None]]
        self._graphs = WeakKeyDictionary()

    def trusts(self, sequences: int, new: int) -> bool:
        """Return whether passes of this shape were compared, at load or here, and none failed."""
        if self._failed is not None or (sequences, new) in self._refused:
            return False
        return sequences * new <= _CHECKED_ROWS or not self._compare or (sequences, new) in self._compared

    def takes(self, work: PassInput) -> Declined | None:
        sequences, new = len(work.chunks), work.chunks[0].count
        if self._failed is not None:
            return self._failed
        if work.hook is not None:
            return Declined("hidden-states")
        if contiguous_slot(work.chunks) is None:
            return Declined("scattered-sequences")
        if (sequences, new) in self._refused:
            return self._refused[sequences, new]
        if work.rope.fixed(work.cache.block_size) is None:
            return Declined("rotation-kind")
        if not self.step.takes(sequences, new):
            return Declined("fused-shape", {"sequences": sequences, "tokens": new})
        if work.sampling is None:
            logit_rows = sum([chunk.logits for chunk in work.chunks])
            return None if logit_rows in (sequences, work.rows) else Declined("some-logits")
        if self.loop is None or new > 1:
            return Declined("host-sampling")
        return self.loop.declined if self.trusts(sequences, 1) else Declined("not-compared")

    @torch.inference_mode()
    def logits(self, work: PassInput) -> Tensor:
        logits = self._fused(work)
        if logits is None:
            return self._plain.logits(work)
        return logits.flatten(0, 1).to(torch.float32, copy=True)

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        assert self.loop is not None
        return self.loop.tokens(work)

    def _fused(self, work: PassInput) -> Tensor | None:
        """Return logits [sequences, 1 or new, vocab], valid until the next call; None if they are up to `plain`."""
        batch = Batch.of(work.chunks, work.cache.block_size, work.rope.device)
        first, tables = contiguous_slot(work.chunks), work.rope.fixed(work.cache.block_size)
        assert first is not None and tables is not None
        sequences, new = len(work.chunks), work.chunks[0].count
        cache, tokens = work.cache.view_blocks(first, sequences), batch.tokens.view(sequences, new)
        last = sum([chunk.logits for chunk in work.chunks]) < batch.rows
        # The first pass of a shape compiles its kernels, which must not happen inside a capture.
        graphs, shape = self._graphs.setdefault(cache, {}), (sequences, new, last)
        launched = self._capture is None or shape not in graphs
        try:
            if launched:
                expected = None
                if not self.trusts(sequences, new):
                    expected = self._plain.logits(work)  # first: the cache must end up with what replays write
                # Cloned, as a capture does: what Triton compiles depends on the alignment of an address.
                logits = self.step(tokens.clone(), batch.lengths.clone(), tables, cache, last)
                declined = None if expected is None else _compare(logits.flatten(0, 1), expected, self._tolerance)
                if declined is not None:
                    self._give_up(declined, (sequences, new))
                    return None
                self._compared.add((sequences, new))
                graphs[shape] = None
                return logits
            captured = graphs[shape] or self._captured(graphs, shape, tokens, batch.lengths, tables, cache)
            captured.tokens.copy_(tokens)
            captured.lengths.copy_(batch.lengths)
            return captured.replay()
        except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            declined = Declined("kernels-failed", {"error": summarize_error(error)})
            self._give_up(declined, (sequences, new) if launched else None)
            return None

    def _captured(
        self,
        graphs: dict[tuple[int, int, bool], _Captured | None],
        shape: tuple[int, int, bool],
        tokens: Tensor,
        lengths: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
    ) -> _Captured:
        assert self._capture is not None
        if len(graphs) >= MOST_GRAPHS:
            graphs.clear()
        tokens, lengths = tokens.clone(), lengths.clone()
        replay = self._capture(lambda: self.step(tokens, lengths, tables, cache, shape[2]))
        captured = graphs[shape] = _Captured(tokens, lengths, tables, replay)
        return captured

    def _give_up(self, declined: Declined, shape: tuple[int, int] | None) -> None:
        if self._failed is None and not self._refused:
            self._report(declined)
        if shape is not None:
            self._refused[shape] = declined
        else:
            self._failed = declined
            self._graphs.clear()


def compile_cuda_pass(model: Transformer, kv: KvDtype, report: OnDecline) -> CudaPass | Declined:
    """Compile the fused pass of a model on a CUDA device, or return why it has none.

    It is first compared with the plain pass, launched and replayed; failures and differences are reported.
    """
    try:
        from mycli.runtime.engine.passes import device_loop, fused
    except ImportError as error:
        return Declined("no-triton", {"error": summarize_error(error)})
    step = fused.FusedStep.compile(model)
    if isinstance(step, Declined):
        return step
    way = compile_step(model, step, kv, GraphCapture(), report)
    if isinstance(way, CudaPass):
        way.loop = device_loop.compile_loop(model, step, GraphCapture(), report)
    return way


def compile_step(
    model: Transformer, step: Step, kv: KvDtype, capture: Capture, report: OnDecline
) -> CudaPass | Declined:
    """Compare `step` with the plain pass of `model` and return the pass that runs it, or why it cannot be used."""
    if kv == "int4" and model.config.head_dim not in FUSED_INT4_HEADS:
        declined: Declined | None = Declined("int4-head", {"head_dim": model.config.head_dim})
    else:
        try:
            declined = difference(model, step, kv, capture)
        except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            declined = Declined("kernels-failed", {"error": summarize_error(error)})
    if declined is not None:
        report(declined)
        return declined
    return CudaPass(step, PlainPass(model), capture, report, tolerance=tolerance(model.config))


def tolerance(config: ModelConfig) -> float:
    routed = any(isinstance(spec.mlp, ExpertsSpec) for spec in config.layer_specs)
    return ROUTED_TOLERANCE if routed else TOLERANCE


def _compare(logits: Tensor, expected: Tensor, most: float) -> Declined | None:
    error = float((logits.float() - expected).norm() / expected.norm())
    return None if error < most else Declined("logits-differ", {"percent": f"{error:.1%}"})


@torch.inference_mode()
def difference(
    model: Transformer, step: Step, kv: KvDtype = "auto", capture: Capture | None = None, counts: Sequence[int] = (1, 4)
) -> Declined | None:
    """Compare the logits of `step` for each number of new tokens in `counts` with the plain pass's; None if equal."""
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
        new_tokens = tokens[prefix : prefix + count]
        expected = plain(Chunk(new_tokens, prefix, (0,), count))[None]
        new = torch.tensor([new_tokens], device=device)
        lengths = torch.full((1,), prefix + count, dtype=torch.int32, device=device)
        logits = step(new, lengths, tables, cache, last=False)
        declined = _compare(logits, expected, tolerance(config))
        if declined is not None:
            return declined
        if capture is None:
            continue
        replayed = capture(partial(step, new, lengths, tables, cache, last=False))()
        if not torch.equal(replayed, logits):
            return Declined("replay-differs")
    return None
