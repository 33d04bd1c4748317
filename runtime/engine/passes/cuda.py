"""The CUDA pass: a step of kernels replayed as CUDA graphs, and several tokens in one launch.

The step is the fused one (`fused`), or for a model that it does not support the captured plain pass (`captured`).

A token then costs the host one launch instead of hundreds. A graph holds addresses, so it belongs to one cache and one
padded number of sequences and tokens; it is captured the second time that such a pass runs. Tokens, lengths and block
tables are copied into its buffers before each replay, so sequences may come, go and lie anywhere in the cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.engine.passes.base import OnDecline, Pass, PassInput, TokenSteps
from mycli.runtime.engine.passes.captured import CapturedStep
from mycli.runtime.engine.passes.graphs import (
    Capture,
    GraphCapture,
    Launches,
    Step,
    StepInput,
    block_table_width,
)
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.kernels.triton.toolchain import missing_tool
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.graphs import MOST_GRAPHS, padded_sequences
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
_Shape = tuple[int, int]  # padded number of sequences, new tokens of each


@dataclass(frozen=True)
class _Captured:
    """A captured pass with the buffers that it reads."""

    inputs: StepInput
    replay: Launches


@dataclass(frozen=True)
class _CacheGraphs:
    # By shape and whether only last logits are computed, least recently used first; None after the first pass of one.
    rope: Rope  # graphs hold the addresses of its tables
    by_shape: dict[tuple[_Shape, bool], _Captured | None] = field(default_factory=dict)


class CudaPass:
    """Runs `step` as replayed graphs, or launch by launch if `capture` is None.

    The first pass of a shape of more than 8 rows is compared with `plain` unless `compare` is False. A pass that fails
    or differs is reported once and computed by `plain`, which writes the same cache slots. After a failed capture or
    replay all passes are declined from then on; after a failed first launch only those of its shape.
    """

    samples = True

    def __init__(
        self,
        step: Step,
        plain: Pass,
        capture: Capture | None,
        report: OnDecline = lambda declined: None,
        *,
        name: str = "cuda",
        compare: bool = True,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.step, self.name = step, name
        self._plain, self._capture, self._report = plain, capture, report
        self._compare, self._tolerance = compare, tolerance
        self.loop: DeviceLoop | None = None
        self._failed: Declined | None = None
        self._compared: set[_Shape] = set()
        self._refused: dict[_Shape, Declined] = {}
        self._graphs: WeakKeyDictionary[KVCache, _CacheGraphs] = WeakKeyDictionary()

    def trusts(self, shape: _Shape) -> bool:
        """Return whether passes of this shape were compared, at load or here, and none failed."""
        if self._failed is not None or shape in self._refused:
            return False
        sequences, new = shape
        return sequences * new <= _CHECKED_ROWS or not self._compare or shape in self._compared

    def takes(self, work: PassInput) -> Declined | None:
        sequences, new = len(work.chunks), work.chunks[0].count
        padded = padded_sequences(sequences)
        if self._failed is not None:
            return self._failed
        if work.hook is not None:
            return Declined("hidden-states")
        if any([chunk.count != new for chunk in work.chunks]):
            return Declined("unequal-tokens")
        if padded is None or not self.step.takes(padded, new):
            return Declined("fused-shape", {"sequences": sequences, "tokens": new})
        if (padded, new) in self._refused:
            return self._refused[padded, new]
        width = block_table_width(work)
        if max([len(chunk.blocks) for chunk in work.chunks]) > width:
            return Declined("cache-block-size", {"size": work.cache.block_size})
        if not self.step.rotates(work.rope, min(width * work.cache.block_size, work.rope.positions)):
            return Declined("rotation-kind")
        if work.sampling is None:
            logit_rows = sum([chunk.logits for chunk in work.chunks])
            return None if logit_rows in (sequences, work.rows) else Declined("some-logits")
        if self.loop is None or new > 1:
            return Declined("host-sampling")
        if padded > self.loop.MOST_PENALIZED and any([row.seen is not None for row in work.sampling]):
            return Declined("many-penalties", {"sequences": sequences, "most": self.loop.MOST_PENALIZED})
        return self.loop.declined if self.trusts((padded, 1)) else Declined("not-compared")

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
        sequences, new = len(work.chunks), work.chunks[0].count
        padded = padded_sequences(sequences)
        assert padded is not None
        held = self._graphs.get(work.cache)
        if held is None or held.rope is not work.rope:
            held = self._graphs[work.cache] = _CacheGraphs(work.rope)
        shape = padded, new
        key = shape, sum([chunk.logits for chunk in work.chunks]) < work.rows
        # The first pass of a shape compiles its kernels, which must not happen inside a capture.
        launched = self._capture is None or key not in held.by_shape
        try:
            if launched:
                return self._launched(work, held, key)
            captured = held.by_shape.pop(key) or self._captured(work, held, key)
            held.by_shape[key] = captured  # the most recently used
            captured.inputs.fill(work.chunks)
            return captured.replay()[:sequences]
        except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            declined = Declined("kernels-failed", {"error": summarize_error(error)})
            self._give_up(declined, shape if launched else None)
            return None

    def _launched(self, work: PassInput, held: _CacheGraphs, key: tuple[_Shape, bool]) -> Tensor | None:
        shape, last = key
        expected = None
        if not self.trusts(shape):
            expected = self._plain.logits(work)  # first: the cache must end up with what replays write
        inputs = StepInput.zeros(*shape, block_table_width(work), work.rope.device)
        inputs.fill(work.chunks)
        logits = self.step(inputs, held.rope, work.cache, last)[: len(work.chunks)]
        declined = None if expected is None else _compare(logits.flatten(0, 1), expected, self._tolerance)
        if declined is not None:
            self._give_up(declined, shape)
            return None
        self._compared.add(shape)
        held.by_shape[key] = None
        return logits

    def _captured(self, work: PassInput, held: _CacheGraphs, key: tuple[_Shape, bool]) -> _Captured:
        assert self._capture is not None
        captured = [other for other, graph in held.by_shape.items() if graph is not None]
        if len(captured) >= MOST_GRAPHS:
            held.by_shape[captured[0]] = None
        shape, last = key
        inputs = StepInput.zeros(*shape, block_table_width(work), work.rope.device)
        inputs.fill(work.chunks)
        return _Captured(inputs, self._capture(lambda: self.step(inputs, held.rope, work.cache, last)))

    def _give_up(self, declined: Declined, shape: _Shape | None) -> None:
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
        from mycli.runtime.engine.passes import fused
    except ImportError as error:
        return Declined("no-triton", {"error": summarize_error(error)})
    step = fused.FusedStep.compile(model, kv)
    return step if isinstance(step, Declined) else _compile_looping(model, step, kv, report, "cuda")


def compile_captured_pass(model: Transformer, kv: KvDtype, report: OnDecline) -> CudaPass | Declined:
    """Compile the captured plain pass of a model on a CUDA device, or return why it has none; as the fused pass."""
    step = CapturedStep.compile(model)
    return step if isinstance(step, Declined) else _compile_looping(model, step, kv, report, "captured")


def _compile_looping(model: Transformer, step: Step, kv: KvDtype, report: OnDecline, name: str) -> CudaPass | Declined:
    try:
        from mycli.runtime.engine.passes import device_loop
    except ImportError as error:
        return Declined("no-triton", {"error": summarize_error(error)})
    way = compile_step(model, step, kv, GraphCapture(), report, name)
    if isinstance(way, CudaPass):
        way.loop = device_loop.compile_loop(model, step, GraphCapture(), report)
    return way


def compile_step(
    model: Transformer, step: Step, kv: KvDtype, capture: Capture, report: OnDecline, name: str = "cuda"
) -> CudaPass | Declined:
    """Compare `step` with the plain pass of `model` and return the pass that runs it, or why it cannot be used."""
    odd = {spec.head_dim for spec in model.config.attentions} - set(FUSED_INT4_HEADS)
    if kv == "int4" and odd:
        declined: Declined | None = Declined("int4-head", {"head_dim": min(odd)})
    else:
        try:
            declined = difference(model, step, kv, capture)
        except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            declined = missing_tool() or Declined("kernels-failed", {"error": summarize_error(error)})
    if declined is not None:
        report(declined)
        return declined
    return CudaPass(step, PlainPass(model), capture, report, name=name, tolerance=tolerance(model.config))


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
    """Compare the logits of `step` for each number of new tokens in `counts` with the plain pass's; None if equal.

    With the sequence in one cache block, and in several out of order next to a padding sequence.
    """
    context = min(_CHECK_CONTEXT, model.config.max_context)
    rope = Rope(model.config, context, model.device, model.dtype)
    if not step.rotates(rope, context):
        return None
    for block_size in (context, KEY_BLOCK):
        blocks = tuple(reversed(range(-(-context // block_size))))
        cache = KVCache(model.config, len(blocks), block_size, model.device, cache_dtype(kv, model.dtype))
        declined = _difference(model, step, cache, rope, blocks, capture, counts)
        if declined is not None:
            return declined
    return None


def _difference(
    model: Transformer,
    step: Step,
    cache: KVCache,
    rope: Rope,
    blocks: tuple[int, ...],
    capture: Capture | None,
    counts: Sequence[int],
) -> Declined | None:
    def plain(chunk: Chunk) -> Tensor:
        logits: Tensor = model(Batch.of([chunk], cache.block_size, model.device), rope, cache)
        return logits

    config, sequences = model.config, min(len(blocks), 2)
    prefix, most = min(_CHECK_PREFIX, rope.positions - max(counts)), max(counts)
    tokens = [index * 7919 % config.vocab_size for index in range(prefix + most)]
    plain(Chunk(tokens[:prefix], 0, blocks, 0))
    for count in counts:
        if not step.takes(sequences, count):
            continue
        chunk = Chunk(tokens[prefix : prefix + count], prefix, blocks, count)
        expected = plain(chunk)[None]
        inputs = StepInput.zeros(sequences, count, len(blocks), model.device)
        inputs.fill([chunk])
        logits = step(inputs, rope, cache, last=False)
        declined = _compare(logits[:1], expected, tolerance(config))
        if declined is not None:
            return declined
        if capture is None:
            continue
        replayed = capture(partial(step, inputs, rope, cache, last=False))()
        if not torch.equal(replayed[:1], logits[:1]):
            return Declined("replay-differs")
    return None
