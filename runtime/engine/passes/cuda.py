"""The CUDA pass: a step of kernels replayed as CUDA graphs, and several tokens in one launch.

The step is the fused one (`fused`), or for a model that it does not support the captured plain pass (`captured`).

A token then costs the host one launch instead of hundreds. A graph holds addresses, so it belongs to one cache and one
padded number of sequences and tokens; it is captured the second time that such a pass runs. Tokens, lengths and block
tables are copied into its buffers before each replay, so sequences may come, go and lie anywhere in the cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.passes.base import OnDecline, Pass, PassInput, TokenSteps
from mycli.runtime.engine.passes.device_sequences import advance_by_drafts
from mycli.runtime.engine.passes.gate import TOLERANCE, compare_hidden, compare_logits
from mycli.runtime.engine.passes.graphs import Capture, Launches, Step, StepInput, block_table_width, capture_or_launch
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.layers.rope import Rope
from mycli.runtime.memory.graphs import MOST_GRAPHS, MOST_ROWS, padded_sequences, padded_tokens

if TYPE_CHECKING:  # it imports Triton, which takes a second and is not on every machine
    from mycli.runtime.engine.passes.device_loop import DeviceLoop

_CHECKED_ROWS = 8  # the comparison at load covers passes of up to 8 rows; wider ones use other tiles
_Shape = tuple[int, int, bool]  # padded number of sequences, new tokens of each, whether some are padding


class _Kind(NamedTuple):
    """last: only last logits are computed; waits: recurrent states wait for accepted drafts; hidden: of `StepInput`."""

    shape: _Shape
    last: bool
    waits: bool
    hidden: bool


class _Result(NamedTuple):
    """Logits [rows, vocab] of the rows asked for, and hidden states [tokens, hidden], valid until the next pass."""

    logits: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class _Captured:
    """A captured pass with the buffers that it reads; `commit` advances states by accepted drafts."""

    inputs: StepInput
    replay: Launches
    commit: Launches | None


@dataclass(frozen=True)
class _CacheGraphs:
    # By kind of pass, least recently used first; None after the first pass of one.
    rope: Rope  # graphs hold the addresses of its tables
    by_shape: dict[_Kind, _Captured | None] = field(default_factory=dict)


class CudaPass:
    """Runs `step` as replayed graphs, or launch by launch if `capture` is None.

    The first pass of a shape with padding or of more than 8 rows is compared with `plain`. A pass that fails or differs
    is reported once and computed by `plain`, which writes the same cache slots. After a failed capture or replay all
    passes are declined from then on; after a failed first launch only those of its shape.
    A pass without memory for its graph is launched kernel by kernel.
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
        tolerance: float = TOLERANCE,
    ) -> None:
        self.step, self.name = step, name
        self._plain, self._capture, self._report = plain, capture, report
        self._tolerance = tolerance
        self.loop: DeviceLoop | None = None
        self._failed: Declined | None = None
        self._compared: set[_Shape] = set()
        self._refused: dict[_Shape, Declined] = {}
        self._graphs: WeakKeyDictionary[KVCache, _CacheGraphs] = WeakKeyDictionary()

    def trusts(self, shape: _Shape) -> bool:
        """Return whether passes of this shape were compared, at load or here, and none failed."""
        if self._failed is not None or shape in self._refused:
            return False
        sequences, new, padded = shape
        checked = not padded and sequences * new <= _CHECKED_ROWS
        return checked or shape in self._compared

    def takes(self, work: PassInput) -> Declined | None:
        if self._failed is not None:
            return self._failed
        shape = _shape(work)
        if shape is None or not self.step.takes(*shape[:2]):
            longest = max([chunk.count for chunk in work.chunks])
            return Declined("fused-shape", {"sequences": len(work.chunks), "tokens": longest})
        if (rows := shape[0] * shape[1]) > MOST_ROWS and work.hook is not None:
            return Declined("hidden-states", {"most": MOST_ROWS, "rows": rows})
        if rows > MOST_ROWS and _states_wait(work):
            return Declined("drafted-states", {"most": MOST_ROWS, "rows": rows})
        if shape in self._refused:
            return self._refused[shape]
        width = block_table_width(work)
        if max([len(chunk.blocks) for chunk in work.chunks]) > width:
            return Declined("cache-block-size", {"size": work.cache.block_size})
        if work.rope.every(min(width * work.cache.block_size, work.rope.positions)) is None:
            return Declined("rotation-kind")
        if work.sampling is None:
            every = all([chunk.logits == chunk.count for chunk in work.chunks])
            return None if every or _last_only(work) else Declined("some-logits")
        if self.loop is None or shape[1] > 1:
            return Declined("host-sampling")
        if shape[0] > self.loop.MOST_PENALIZED and any([row.seen is not None or row.biases for row in work.sampling]):
            return Declined("many-penalties", {"sequences": len(work.chunks), "most": self.loop.MOST_PENALIZED})
        if work.cache.states.recurrent and (stops := max(map(len, work.stop_ids), default=0)) > self.loop.MOST_STOPS:
            return Declined("many-stop-tokens", {"tokens": stops, "most": self.loop.MOST_STOPS})
        return self.loop.declined if self.trusts(shape) else Declined("not-compared")

    @torch.inference_mode()
    def logits(self, work: PassInput) -> Tensor:
        ran = self._run_step(work)
        if ran is None:
            return self._plain.logits(work)
        result = _result(*ran, work)  # if it fails, `plain` cannot continue: recurrent states have advanced
        if work.hook is not None:
            assert result.hidden is not None
            work.hook(result.hidden.clone())
        return result.logits.to(torch.float32, copy=True)

    @torch.inference_mode()
    def launch(self, work: PassInput) -> None:
        """Launch the step of `work` if this pass takes it, so that its kernels are compiled; nothing else is changed.

        Threads may do so concurrently: their launches are in the order of one stream.
        """
        shape = _shape(work)
        if shape is not None and self.takes(work) is None:
            self.step(_inputs(work, shape).resting(), work.rope, work.cache, _last_only(work))

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        assert self.loop is not None
        return self.loop.tokens(work)

    def _run_step(self, work: PassInput) -> tuple[Tensor, StepInput] | None:
        """Return logits [padded sequences, 1 or new, vocab] and the input of the step; None if it is up to `plain`."""
        shape = _shape(work)
        assert shape is not None
        graphs = self._graphs.get(work.cache)
        if graphs is None or graphs.rope is not work.rope:
            graphs = self._graphs[work.cache] = _CacheGraphs(work.rope)
        key = _Kind(shape, _last_only(work), _states_wait(work), work.hook is not None)
        # The first pass of a shape compiles its kernels, which must not happen inside a capture.
        launched = self._capture is None or key not in graphs.by_shape
        try:
            if launched:
                return self._launched(work, graphs, key)
            captured = graphs.by_shape.pop(key) or self._captured(work, graphs, key)
            graphs.by_shape[key] = captured  # the most recently used
            captured.inputs.fill(work.chunks)
            logits = captured.replay()
            if captured.commit is not None:
                _defer(work, captured.inputs, captured.commit)
            return logits, captured.inputs
        except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            declined = Declined("kernels-failed", {"error": summarize_error(error)})
            self._give_up(declined, shape if launched else None)
            return None

    def _launched(self, work: PassInput, graphs: _CacheGraphs, key: _Kind) -> tuple[Tensor, StepInput] | None:
        shape, last, waits, _ = key
        expected = None
        if not self.trusts(shape):
            expected = self._expected(work)  # first: the cache must end up with what replays write
        inputs = _inputs(work, shape)
        # Where it fails or differs, states must be as before: `plain` continues from them.
        logits = self.step(inputs.resting(), graphs.rope, work.cache, last)
        if waits:
            advance_by_drafts(inputs, work.cache.states)  # by none: compiles what a capture of it will launch
        declined = None
        if expected is not None:
            result = _result(logits, inputs, work)
            declined = compare_logits(result.logits, expected.logits, self._tolerance)
            if result.hidden is not None and expected.hidden is not None:
                declined = declined or compare_hidden(result.hidden, expected.hidden, self._tolerance)
        if declined is not None:
            self._give_up(declined, shape)
            return None
        if inputs.states is not None:
            logits = self.step(inputs, graphs.rope, work.cache, last)
        if waits:
            _defer(work, inputs, partial(advance_by_drafts, inputs, work.cache.states))
        self._compared.add(shape)
        graphs.by_shape[key] = None
        return logits, inputs

    def _expected(self, work: PassInput) -> _Result:
        """Return the result of `plain`; states stay as they are."""
        hidden = list[Tensor]()
        work = replace(work, hook=None if work.hook is None else hidden.append)
        if work.cache.states.recurrent:
            work = replace(work, chunks=[replace(chunk, drafted=chunk.count) for chunk in work.chunks])
        return _Result(self._plain.logits(work), hidden[0] if hidden else None)

    def _captured(self, work: PassInput, graphs: _CacheGraphs, key: _Kind) -> _Captured:
        assert self._capture is not None
        captured = [other for other, graph in graphs.by_shape.items() if graph is not None]
        if len(captured) >= MOST_GRAPHS:
            graphs.by_shape[captured[0]] = None
        shape, last, waits, _ = key
        inputs = _inputs(work, shape)
        weak, rope = ref(work.cache), graphs.rope  # graphs are kept by cache, which they must not keep

        def launch() -> Tensor:
            cache = weak()
            assert cache is not None
            return self.step(inputs, rope, cache, last)

        def commit() -> Tensor:
            cache = weak()
            assert cache is not None
            return advance_by_drafts(inputs, cache.states)

        launches = (launch, commit) if waits else (launch,)
        replay, *commits = capture_or_launch(self._capture, launches, self._report)
        if inputs.drafts is not None:
            # The memory of the rows is free for the next graphs: `commit` is replayed before any other graph.
            inputs.drafts.layers.clear()
        return _Captured(inputs, replay, *(commits or (None,)))

    def _give_up(self, declined: Declined, shape: _Shape | None) -> None:
        if self._failed is None and not self._refused:
            self._report(declined)
        if shape is not None:
            self._refused[shape] = declined
        else:
            self._failed = declined
            self._graphs.clear()


def _shape(work: PassInput) -> _Shape | None:
    counts = [chunk.count for chunk in work.chunks]
    sequences, tokens = padded_sequences(len(work.chunks)), padded_tokens(counts, not _last_only(work))
    return None if sequences is None or tokens is None else (sequences, *tokens)


def _last_only(work: PassInput) -> bool:
    return all([chunk.logits == 1 for chunk in work.chunks])


def _states_wait(work: PassInput) -> bool:
    """Return whether recurrent states advance after the pass, by the drafts that are accepted."""
    return work.cache.states.recurrent and any([chunk.drafted for chunk in work.chunks])


def _defer(work: PassInput, inputs: StepInput, launch: Launches) -> None:
    """Let the states of drafted sequences advance by `launch` once the numbers of accepted tokens are known."""
    # Where all tokens are drafts, the state never advances.
    places = {chunk.state: place for place, chunk in enumerate(work.chunks) if 0 < chunk.drafted < chunk.count}

    @torch.inference_mode()
    def commit(counts: Mapping[int, int]) -> None:
        assert inputs.drafts is not None
        accepted = torch.zeros(len(inputs.lengths), dtype=torch.int32)
        for slot, count in counts.items():
            accepted[places[slot]] = count
        inputs.drafts.accepted.copy_(accepted, non_blocking=True)
        launch()

    work.cache.states.defer(places, commit)


def _result(logits: Tensor, inputs: StepInput, work: PassInput) -> _Result:
    """Return the rows of a step that are not padding."""
    hidden = None if inputs.hidden is None else inputs.hidden.rows
    return _Result(
        _without_padding(logits, [chunk.logits for chunk in work.chunks]),
        None if hidden is None else _without_padding(hidden, [chunk.count for chunk in work.chunks]),
    )


def _without_padding(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return [rows, size], the first `counts` rows of each sequence of x [sequences, new, size]."""
    new, flat = x.shape[1], x[: len(counts)].flatten(0, 1)
    if all([count == new for count in counts]):
        return flat
    rows = [place * new + row for place, count in enumerate(counts) for row in range(count)]
    return flat.index_select(0, torch.tensor(rows).to(flat.device, non_blocking=True))


def _inputs(work: PassInput, shape: _Shape) -> StepInput:
    sequences, new, padded = shape
    width, recurrent = block_table_width(work), work.cache.states.recurrent
    waits, hidden, windowed = _states_wait(work), work.hook is not None, work.cache.window_blocks > 0
    inputs = StepInput.zeros(sequences, new, width, work.rope.device, padded, recurrent, waits, hidden, windowed)
    inputs.fill(work.chunks)
    return inputs
