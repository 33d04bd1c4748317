"""CUDA graphs: capturing launches and replaying them, and the device buffers that a replayed step reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk, table_rows
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.passes.base import OnDecline, PassInput
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.layers.recurrent import Advance, Rows
from mycli.runtime.layers.rope import Rope

Launches = Callable[[], Tensor]  # enqueues launches and returns the tensor that will hold the result
Capture = Callable[[Launches], Launches]


@dataclass(frozen=True)
class DraftRows:
    """The rows that advance recurrent states by drafted tokens once the number of accepted ones is known.

    accepted int32 [sequences]: that number, 0 where the state stays; layers: received from a step, of each recurrent
    layer its index, its rows and how they advance its states.
    """

    # Rows are kept rather than a state after each token (as in vLLM): of Qwen3.5-9B 0.6 MB per token instead of 50.
    accepted: Tensor
    layers: list[tuple[int, Rows, Advance]] = field(default_factory=list)


@dataclass
class HiddenRows:
    """The hidden states [sequences, new, hidden], received from a step and valid until the next one."""

    rows: Tensor | None = None


@dataclass(frozen=True)
class StepInput:
    """The input of a step, for a padded number of sequences with equally many new tokens, padding included.

    tokens int64 [sequences, new]; lengths int32 [sequences], including all new tokens, 0 for a padding sequence;
    block_table int32 [sequences, blocks]; counts int32 [sequences]: new tokens of each sequence that are not padding,
    which come first; None if there is no padding. states int64 [sequences]: slots of recurrent states, if there are
    any; advances int32 [sequences]: 0 where the step must not change the state, as with drafts, whose rows `drafts`
    receives. hidden: receives the hidden states, if they are needed. window_table: as block_table, of layers with a
    window where these have blocks of their own.
    """

    tokens: Tensor
    lengths: Tensor
    block_table: Tensor
    counts: Tensor | None = None
    states: Tensor | None = None
    advances: Tensor | None = None
    drafts: DraftRows | None = None
    hidden: HiddenRows | None = None
    window_table: Tensor | None = None

    @classmethod
    def zeros(
        cls,
        sequences: int,
        new: int,
        width: int,
        device: torch.device,
        padded: bool = False,
        recurrent: bool = False,
        drafted: bool = False,
        hidden: bool = False,
        windowed: bool = False,
    ) -> "StepInput":
        """Return an input without sequences.

        padded: they may have fewer than `new` tokens; drafted: recurrent states advance by accepted tokens only;
        hidden: hidden states are needed; windowed: layers with a window have blocks of their own.
        """
        return cls(
            torch.zeros(sequences, new, dtype=torch.int64, device=device),
            torch.zeros(sequences, dtype=torch.int32, device=device),
            torch.zeros(sequences, width, dtype=torch.int32, device=device),
            torch.zeros(sequences, dtype=torch.int32, device=device) if padded else None,
            torch.zeros(sequences, dtype=torch.int64, device=device) if recurrent else None,
            torch.ones(sequences, dtype=torch.int32, device=device) if recurrent else None,
            DraftRows(torch.zeros(sequences, dtype=torch.int32, device=device)) if recurrent and drafted else None,
            HiddenRows() if hidden else None,
            torch.zeros(sequences, width, dtype=torch.int32, device=device) if windowed else None,
        )

    def resting(self) -> "StepInput":
        """Return this input for a step that changes no recurrent state."""
        return self if self.advances is None else replace(self, advances=torch.zeros_like(self.advances))

    @property
    def new(self) -> int:
        return self.tokens.shape[1]

    def table_of(self, windowed: bool) -> Tensor:
        """Return the block table of layers with a window, or of the others."""
        return self.window_table if windowed and self.window_table is not None else self.block_table

    def last_rows(self, x: Tensor) -> Tensor:
        """Return the rows of x [sequences, new, size] of the last token of each sequence: [sequences, 1, size]."""
        if self.counts is None:
            return x[:, -1:]
        last = (self.counts.long() - 1).clamp(min=0)
        return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2]))

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Copy tokens, lengths and blocks of `chunks`; the sequences after them become padding."""
        # Entries of the table that are not copied belong to positions that nothing reads. The driver stages such small
        # copies, so the host does not wait.
        absent = [0] * (len(self.lengths) - len(chunks))
        lengths = [chunk.start + self.new for chunk in chunks] + absent
        used = min(max(len(chunk.blocks) for chunk in chunks), self.block_table.shape[1])
        tokens = torch.tensor([[*chunk.tokens, *[0] * (self.new - chunk.count)] for chunk in chunks], dtype=torch.int64)
        if self.counts is not None:
            counts = [chunk.count for chunk in chunks] + absent
            self.counts.copy_(torch.tensor(counts, dtype=torch.int32), non_blocking=True)
        if self.states is not None and self.advances is not None:
            slots = [chunk.state for chunk in chunks] + absent
            self.states.copy_(torch.tensor(slots, dtype=torch.int64), non_blocking=True)
            advances = [int(not chunk.drafted) for chunk in chunks] + absent
            self.advances.copy_(torch.tensor(advances, dtype=torch.int32), non_blocking=True)
        self.tokens[: len(chunks)].copy_(tokens, non_blocking=True)
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)
        for table, windowed in ((self.block_table, False), (self.window_table, True)):
            if table is not None:
                rows = torch.tensor(table_rows(chunks, used, windowed), dtype=torch.int32)
                table[: len(chunks), :used].copy_(rows.clamp_(min=0), non_blocking=True)


def capture_or_launch(capture: Capture, works: Sequence[Launches], report: OnDecline) -> Sequence[Launches]:
    """Capture `works`; without memory for a graph, report that and return `works`, whose launches have succeeded.

    A later one may read tensors of an earlier one that its launches keep.
    """
    # A graph takes its memory from a pool of its own, so that a pass which runs may still be too large to be captured.
    try:
        return [capture(work) for work in works]
    except torch.OutOfMemoryError:
        report(Declined("no-graph-memory"))
        return works


class Step(Protocol):
    def takes(self, sequences: int, tokens: int) -> bool: ...

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor: ...


class LayeredStep(Step, Protocol):
    """A step whose layers can also run alone, to be compared with the plain ones."""

    def run_layer(
        self,
        layer: int,
        stream: Tensor,
        inputs: StepInput,
        rope: Rope,
        cache: KVCache,
        router_scores: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream [rows, size] after one layer; the cache takes its keys and values.

        router_scores: [rows, experts], of a mixture of experts, instead of the layer's own.
        """
        ...


def block_table_width(work: PassInput) -> int:
    """Return the most cache blocks of any sequence of this cache; 1 where kernels need a sequence in one block."""
    size = work.cache.block_size
    if size % KEY_BLOCK:
        return 1
    return -(-min(work.rope.positions, work.cache.blocks * size) // size)


class GraphCapture:
    """Captures launches as CUDA graphs that share one memory pool (torch.cuda.graph_pool_handle).

    Replays follow each other on one stream, so they may share working memory; only results are separate. With a pool
    for each graph, the working memory of a pass would be allocated once for each graph.
    """

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None  # owns the pool

    def __call__(self, work: Launches) -> Launches:
        """Capture `work` on the current device; it must have run before, so that all its kernels are compiled."""
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        # torch leaves its capturing stream the current one if a capture fails; the outer context does not.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            out = work()
        self._first = self._first or graph

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
