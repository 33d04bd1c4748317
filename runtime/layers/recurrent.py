"""Mixers that keep a state: Gated DeltaNet (arXiv 2412.06464) and gated short convolutions, between their products.

Also where states are: those of the sequences of a batch, in the slots of a cache, or of whole texts, which begin with
nothing. Knows `RecurrentSpec`, not the residual stream, nor whose a slot is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from mycli.runtime.cache.state_store import StateStore
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.recurrent import DeltaSizes, Runs
from mycli.runtime.kernels.registry import CONVOLUTION, DELTA_RULE, GATED_NORM
from mycli.runtime.layers.batch import Batch, Span
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.models.recurrent_spec import ConvolutionSpec, DeltaNetSpec, RecurrentSpec, ShortConvSpec

Rows = tuple[Tensor, ...]  # [rows, ...] each
Advance = Callable[[Rows, tuple[Tensor, ...], Runs], Tensor]  # rows and states to [rows, width]; states go on in place


class RecurrentStates(Protocol):
    """Where the states of a pass are."""

    def advance(self, layer: int, spec: RecurrentSpec, rows: Rows, step: Advance) -> Tensor:
        """`rows` [sequences, tokens, ...] each, of which `step` makes [sequences, tokens, width] from the states of a
        layer, as after the tokens before."""
        ...


class TextStates:
    """Of whole texts of equal length: nothing came before, and nothing is kept."""

    def advance(self, layer: int, spec: RecurrentSpec, rows: Rows, step: Advance) -> Tensor:
        """As `RecurrentStates.advance`: each sequence is a text."""
        sequences, tokens = rows[0].shape[:2]
        states = tuple(torch.zeros(sequences, *shape, device=rows[0].device) for shape in spec.state_shapes())
        result = step(tuple(one.flatten(0, 1) for one in rows), states, Runs.alike(sequences, tokens))
        return result.view(sequences, tokens, -1)


def begin_texts(batch: Batch, store: StateStore) -> None:
    """Clear the states of those sequences of a batch whose texts begin."""
    for span in batch.spans:
        if not span.start:
            store.clear(span.state)


class BatchStates:
    """Of the sequences of a ragged batch, in the slots of a store; `begin_texts` comes first.

    Where tokens are drafted a state stays what it was, until `StateStore.settle` says how many of them stand.
    """

    def __init__(self, batch: Batch, store: StateStore) -> None:
        self._spans, self._store = batch.spans, store
        self._drafts = any(span.drafted for span in batch.spans)
        starts = (*(span.row for span in batch.spans), batch.rows)
        self._runs = Runs(starts, tuple(span.state for span in batch.spans))

    def advance(self, layer: int, spec: RecurrentSpec, rows: Rows, step: Advance) -> Tensor:
        """As `RecurrentStates.advance`, with all rows of the batch as one sequence: [1, T, ...]."""
        states = self._store.layer(layer)
        if not self._drafts:
            return step(tuple(one[0] for one in rows), states, self._runs)[None]
        parts = [self._advanced(span, rows, states, step) for span in self._spans]
        return torch.cat(parts)[None]

    def _advanced(self, span: Span, rows: Rows, states: tuple[Tensor, ...], step: Advance) -> Tensor:
        own = tuple(one[0, span.row : span.row + span.count] for one in rows)
        place = tuple(one[span.state : span.state + 1] for one in states)
        if not span.drafted:
            return step(own, place, Runs.alike(1, span.count))
        wait_for_drafts(self._store, span, rows, states, step)
        return step(own, tuple(one.clone() for one in place), Runs.alike(1, span.count))


def wait_for_drafts(store: StateStore, span: Span, rows: Rows, states: tuple[Tensor, ...], step: Advance) -> None:
    """The `states` of a layer, of all slots, go on by as many `rows` [1, T, ...] of a sequence as will turn out to
    stand."""
    own = tuple(one[0, span.row : span.row + span.count] for one in rows)
    store.wait(span.state, partial(_replay, own, tuple(one[span.state : span.state + 1] for one in states), step))


@torch.inference_mode()
def _replay(rows: Rows, states: tuple[Tensor, ...], step: Advance, count: int) -> None:
    if count:
        step(tuple(one[:count] for one in rows), states, Runs.alike(1, count))


class Convolution(nn.Module):
    """The weights of a `ConvolutionSpec`, in fp32: `weight` [taps, channels], `bias` [channels] or None."""

    def __init__(self, spec: ConvolutionSpec) -> None:
        super().__init__()
        self._spec = spec
        self.weight = torch.empty(spec.taps, spec.channels, device="meta")
        self.bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def load(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """Read the tensors."""
        stored = checkpoint.read(f"{self._spec.name}.weight")
        self.weight = stored[:, 0].to(device, torch.float32).T.contiguous()
        if self._spec.bias:
            self.bias = checkpoint.read(f"{self._spec.name}.bias").to(device, torch.float32)


def _in_order(x: Tensor, groups: int, widths: Sequence[int]) -> Tensor:
    """x [..., groups * sum(widths)], the parts of each group side by side, to the parts of all groups side by side."""
    parts = torch.split(x.view(*x.shape[:-1], groups, -1), list(widths), dim=-1)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


class DeltaNet(nn.Module):
    """Gated DeltaNet, as `DeltaNetSpec` describes it, between `projection` and `out`."""

    def __init__(self, spec: DeltaNetSpec, layer: int) -> None:
        super().__init__()
        self.spec, self._layer = spec, layer
        self.sizes = DeltaSizes(spec.heads, spec.key_heads, spec.key_dim, spec.value_dim)
        self.widths = spec.convolution.channels, 2 * spec.heads  # of the rows that states go on by
        self.projection = Linear(spec.projections)
        self.gates = Linear(spec.gates)
        self.convolution = Convolution(spec.convolution)
        self.norm = RMSNorm(spec.head_norm)
        self.out = Linear((spec.out,))
        self.norms, self.kept = (self.norm,), (self.gates,)
        self.rate = torch.empty(spec.heads, device="meta")
        self.dt_bias = torch.empty(spec.heads, device="meta")

    @property
    def nbytes(self) -> int:
        """Bytes of memory held beside linears and norms."""
        return self.convolution.nbytes + self.rate.nbytes + self.dt_bias.nbytes

    @property
    def tensors(self) -> tuple[tuple[object, str], ...]:
        """Where the tensors of that memory are: attributes."""
        return (self.convolution, "weight"), (self.convolution, "bias"), (self, "rate"), (self, "dt_bias")

    def load(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """Read what is neither norm nor linear."""
        self.convolution.load(checkpoint, device)
        self.rate = -checkpoint.read(self.spec.decay).to(device, torch.float32).exp()
        self.dt_bias = checkpoint.read(self.spec.dt_bias).to(device, torch.float32)

    def forward(self, x: Tensor, projected: Tensor, states: RecurrentStates) -> Tensor:
        """What `out` multiplies, of the part's input x and what `projection` made of it, [sequences, tokens, ...]."""
        spec, gates = self.spec, self.gates(x)
        channels, copies = spec.convolution.channels, spec.heads // spec.key_heads
        if spec.by_key_head:
            width = copies * spec.value_dim
            projected = _in_order(projected, spec.key_heads, (spec.key_dim, spec.key_dim, width, width))
            gates = _in_order(gates, spec.key_heads, (copies, copies))
        mixed, gate = projected[..., :channels], projected[..., channels:]
        read = states.advance(self._layer, spec, (mixed, gates), self.advance)
        normed = GATED_NORM(read.flatten(0, 1), self.norm.weight, self.norm.eps, gate.flatten(0, 1))
        return normed.view_as(read)

    def advance(self, rows: Rows, states: tuple[Tensor, ...], runs: Runs) -> Tensor:
        """An `Advance`, by rows of what is to be convolved and of the gates."""
        (mixed, gates), (inputs, matrices) = rows, states
        qkv = CONVOLUTION(mixed, self.convolution.weight, self.convolution.bias, inputs, runs, True)
        return DELTA_RULE(qkv, gates, self.rate, self.dt_bias, matrices, runs, self.sizes)


class ShortConv(nn.Module):
    """A gated short convolution, as `ShortConvSpec` describes it, between `projection` and `out`."""

    def __init__(self, spec: ShortConvSpec, layer: int) -> None:
        super().__init__()
        self.spec, self._layer = spec, layer
        self.projection = Linear((spec.projection,))
        self.convolution = Convolution(spec.convolution)
        self.widths = (spec.convolution.channels,)
        self.out = Linear((spec.out,))
        self.norms: tuple[RMSNorm, ...] = ()
        self.kept: tuple[Linear, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of memory held beside linears and norms."""
        return self.convolution.nbytes

    @property
    def tensors(self) -> tuple[tuple[object, str], ...]:
        """As `DeltaNet.tensors`."""
        return (self.convolution, "weight"), (self.convolution, "bias")

    def load(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """As `DeltaNet.load`."""
        self.convolution.load(checkpoint, device)

    def forward(self, x: Tensor, projected: Tensor, states: RecurrentStates) -> Tensor:
        """As `DeltaNet.forward`."""
        before, after, inner = projected.chunk(3, dim=-1)
        return after * states.advance(self._layer, self.spec, (before * inner,), self.advance)

    def advance(self, rows: Rows, states: tuple[Tensor, ...], runs: Runs) -> Tensor:
        """An `Advance`, by rows of what is to be convolved."""
        return CONVOLUTION(rows[0], self.convolution.weight, self.convolution.bias, states[0], runs, False)


def make_mixer(spec: RecurrentSpec, layer: int) -> DeltaNet | ShortConv:
    """The mixer of `spec`, without memory until it is loaded."""
    return DeltaNet(spec, layer) if isinstance(spec, DeltaNetSpec) else ShortConv(spec, layer)
