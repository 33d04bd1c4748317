"""Token mixers with a recurrent state: Gated DeltaNet (arXiv 2412.06464), Kimi Delta Attention (2510.26692), Mamba.

The states of a pass are in the slots of a `StateStore` (`BatchStates`), or start at zero for whole prompts
(`PromptStates`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.state_store import StateStore
from mycli.runtime.kernels.recurrent import DeltaSizes, DeviceRuns, Runs, ScanSizes
from mycli.runtime.kernels.registry import ACTIVATION, CONVOLUTION, DELTA_RULE, GATED_NORM, GROUP_NORM, RMS_NORM, SCAN
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm, make_norm
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.recurrent_spec import (
    ConvolutionSpec,
    DeltaNetSpec,
    KimiDeltaSpec,
    MambaSpec,
    RecurrentSpec,
    SelectiveSpec,
    ShortConvSpec,
)

Rows = tuple[Tensor, ...]  # [rows, ...] each
# Rows and states to [rows, width]; updates the states.
Advance = Callable[[Rows, tuple[Tensor, ...], Runs | DeviceRuns], Tensor]


class RecurrentStates(Protocol):
    def advance(self, layer: int, spec: RecurrentSpec, rows: Rows, step: Advance) -> Tensor:
        """Apply `step` to rows [sequences, tokens, ...] and a layer's states; return [sequences, tokens, width]."""
        ...


class PromptStates:
    """The states of whole prompts of equal length: zero before the first token, dropped after the last."""

    def advance(self, layer: int, spec: RecurrentSpec, rows: Rows, step: Advance) -> Tensor:
        sequences, tokens = rows[0].shape[:2]
        states = tuple(torch.zeros(sequences, *shape, device=rows[0].device) for shape in spec.state_shapes())
        result = step(tuple(tensor.flatten(0, 1) for tensor in rows), states, Runs.alike(sequences, tokens))
        return result.view(sequences, tokens, -1)


def clear_new_states(chunks: Sequence[Chunk], store: StateStore) -> None:
    for chunk in chunks:
        if not chunk.start:
            store.clear(chunk.state)


class BatchStates:
    """The states of a ragged batch, in the slots of a store; call `clear_new_states` first.

    With drafted tokens a state does not change in the pass: `StateStore.commit_drafts` advances it by those accepted.
    """

    def __init__(self, batch: Batch, store: StateStore) -> None:
        self._batch, self._store = batch, store
        self._drafts = any(chunk.drafted for chunk in batch.chunks)
        self._runs = Runs(tuple(batch.first_rows), tuple(chunk.state for chunk in batch.chunks))

    def advance(self, layer: int, spec: RecurrentSpec, rows: Rows, step: Advance) -> Tensor:
        states = self._store.layer(layer)
        if not self._drafts:
            return step(tuple(tensor[0] for tensor in rows), states, self._runs)[None]
        firsts = zip(self._batch.chunks, self._batch.first_rows, strict=False)
        return torch.cat([self._advance_one(chunk, first, rows, states, step) for chunk, first in firsts])[None]

    def _advance_one(self, chunk: Chunk, first: int, rows: Rows, states: tuple[Tensor, ...], step: Advance) -> Tensor:
        new_rows = tuple(tensor[0, first : first + chunk.count] for tensor in rows)
        state = tuple(tensor[chunk.state : chunk.state + 1] for tensor in states)
        if not chunk.drafted:
            return step(new_rows, state, Runs.alike(1, chunk.count))
        defer_advance(self._store, chunk, first, rows, states, step)
        return step(new_rows, tuple(tensor.clone() for tensor in state), Runs.alike(1, chunk.count))


def defer_advance(
    store: StateStore, chunk: Chunk, first: int, rows: Rows, states: tuple[Tensor, ...], step: Advance
) -> None:
    """Queue the state update of one layer until the number of accepted draft tokens is known; none if all are drafts.

    rows: [1, T, ...] each, of which those of `chunk` begin at `first`; states: of all slots.
    """
    if chunk.drafted == chunk.count:
        return
    new_rows = tuple(tensor[0, first : first + chunk.count] for tensor in rows)
    state = tuple(tensor[chunk.state : chunk.state + 1] for tensor in states)

    @torch.inference_mode()
    def replay(accepted: Mapping[int, int]) -> None:
        if count := accepted.get(chunk.state, 0):
            step(tuple(tensor[:count] for tensor in new_rows), state, Runs.alike(1, count))

    store.defer((chunk.state,), replay)


class Convolution(nn.Module):
    """The weights of a `ConvolutionSpec`, in fp32: `weight` [taps, channels], `bias` [channels] or None."""

    def __init__(self, spec: ConvolutionSpec) -> None:
        super().__init__()
        self._spec = spec
        self.weight = torch.empty(spec.taps, spec.channels, device="meta")
        self.bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def load(self, weights: CheckpointWeights) -> None:
        stored = torch.cat([weights.read(name, torch.float32) for name, _ in self._spec.weights()])
        self.weight = stored[:, 0].T.contiguous()
        if self._spec.bias:
            self.bias = weights.read(f"{self._spec.name}.bias", torch.float32)


def _by_part(x: Tensor, groups: int, widths: Sequence[int]) -> Tensor:
    parts = torch.split(x.view(*x.shape[:-1], groups, -1), list(widths), dim=-1)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


class _DeltaRule(nn.Module):
    convolution: Convolution
    rate: Tensor
    dt_bias: Tensor
    sizes: DeltaSizes

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are neither linears nor norms."""
        return self.convolution.nbytes + self.rate.nbytes + self.dt_bias.nbytes

    def advance(self, rows: Rows, states: tuple[Tensor, ...], runs: Runs | DeviceRuns) -> Tensor:
        """Advance the states by rows of (convolution input, gates); an `Advance`."""
        (mixed, gates), (inputs, matrices) = rows, states
        qkv = CONVOLUTION(mixed, self.convolution.weight, self.convolution.bias, inputs, runs, True)
        return DELTA_RULE(qkv, gates, self.rate, self.dt_bias, matrices, runs, self.sizes)


class DeltaNet(_DeltaRule):
    """Gated DeltaNet between the products `projection` and `out`; see `DeltaNetSpec`."""

    def __init__(self, spec: DeltaNetSpec, layer: int) -> None:
        super().__init__()
        self.spec, self._layer = spec, layer
        self.sizes = DeltaSizes(spec.heads, spec.key_heads, spec.key_dim, spec.value_dim, spec.beta_scale)
        self.widths = spec.convolution.channels, 2 * spec.heads  # of the rows by which the states advance
        self.projection = Linear(spec.projections)
        self.gates = Linear(spec.gates)
        self.convolution = Convolution(spec.convolution)
        self.norm = RMSNorm(spec.head_norm)
        self.out = Linear((spec.out,))
        self.unquantized = (self.gates,)
        self.rate = torch.empty(spec.heads, device="meta")
        self.dt_bias = torch.empty(spec.heads, device="meta")

    def load(self, weights: CheckpointWeights) -> None:
        self.convolution.load(weights)
        self.rate = -weights.read(self.spec.decay, torch.float32).exp()
        self.dt_bias = weights.read(self.spec.dt_bias, torch.float32)

    def forward(self, x: Tensor, projected: Tensor, states: RecurrentStates) -> Tensor:
        """Compute the input of `out` from x and `projected`, the output of `projection`: [sequences, tokens, ...]."""
        spec, gates = self.spec, self.gates(x)
        channels, copies = spec.convolution.channels, spec.heads // spec.key_heads
        if spec.by_key_head:
            width = copies * spec.value_dim
            projected = _by_part(projected, spec.key_heads, (spec.key_dim, spec.key_dim, width, width))
            gates = _by_part(gates, spec.key_heads, (copies, copies))
        mixed, gate = projected[..., :channels], projected[..., channels:]
        mixed_tokens = states.advance(self._layer, spec, (mixed, gates), self.advance)
        normed = GATED_NORM(mixed_tokens.flatten(0, 1), self.norm.weight, self.norm.eps, gate.flatten(0, 1), True)
        return normed.view_as(mixed_tokens)


class KimiDelta(_DeltaRule):
    """Kimi Delta Attention between the products `projection` and `out`; see `KimiDeltaSpec`."""

    def __init__(self, spec: KimiDeltaSpec, layer: int) -> None:
        super().__init__()
        self.spec, self._layer, width = spec, layer, spec.width
        self.sizes = DeltaSizes(spec.heads, spec.heads, spec.head_dim, spec.head_dim, by_channel=True, floor=spec.floor)
        self.widths = spec.convolution.channels, spec.heads + width  # of the rows by which the states advance
        self.projection = Linear(spec.projections)
        self.gates = Linear(spec.gates)
        self.decay_b = None if spec.decay_b is None else Linear((spec.decay_b,))
        self.gate_b = None if spec.gate_b is None else Linear((spec.gate_b,))
        self.convolution = Convolution(spec.convolution)
        self.norm = RMSNorm(spec.head_norm)
        self.out = Linear((spec.out,))
        dense = (self.gates, self.decay_b, self.gate_b)
        self.unquantized = tuple(linear for linear in dense if linear is not None)
        self.rate = torch.empty(spec.heads, device="meta")
        self.dt_bias = torch.empty(width, device="meta")

    def load(self, weights: CheckpointWeights) -> None:
        self.convolution.load(weights)
        self.rate = -weights.read(self.spec.decay[0], torch.float32).flatten().exp()
        self.dt_bias = weights.read(self.spec.dt_bias, torch.float32)

    def forward(self, x: Tensor, projected: Tensor, states: RecurrentStates) -> Tensor:
        """Compute the input of `out` from x and `projected`, the output of `projection`: [sequences, tokens, ...]."""
        spec, channels, gates = self.spec, self.spec.convolution.channels, self.gates(x)
        mixed, rest = projected[..., :channels], projected[..., channels:]
        beta, low = gates[..., : spec.heads], gates[..., spec.heads :]
        rank = 0 if spec.decay_b is None else spec.decay_b.in_features
        gate = rest[..., : spec.width] if self.gate_b is None else self.gate_b(low[..., rank:].contiguous())
        decay = rest[..., -spec.width :] if self.decay_b is None else self.decay_b(low[..., :rank].contiguous())
        steps = torch.cat((beta, decay), dim=-1)
        read = states.advance(self._layer, spec, (mixed, steps), self.advance)
        normed = GATED_NORM(read.flatten(0, 1), self.norm.weight, self.norm.eps, gate.flatten(0, 1), False)
        return normed.view_as(read)


class ShortConv(nn.Module):
    """A gated short convolution between the products `projection` and `out`; see `ShortConvSpec`."""

    def __init__(self, spec: ShortConvSpec, layer: int) -> None:
        super().__init__()
        self.spec, self._layer = spec, layer
        self.projection = Linear((spec.projection,))
        self.convolution = Convolution(spec.convolution)
        self.widths = (spec.convolution.channels,)
        self.out = Linear((spec.out,))
        self.unquantized: tuple[Linear, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are neither linears nor norms."""
        return self.convolution.nbytes

    def load(self, weights: CheckpointWeights) -> None:
        self.convolution.load(weights)

    def forward(self, x: Tensor, projected: Tensor, states: RecurrentStates) -> Tensor:
        before, after, inner = projected.chunk(3, dim=-1)
        return after * states.advance(self._layer, self.spec, (before * inner,), self.advance)

    def advance(self, rows: Rows, states: tuple[Tensor, ...], runs: Runs | DeviceRuns) -> Tensor:
        """Advance the states by rows of the convolution input; an `Advance`."""
        return CONVOLUTION(rows[0], self.convolution.weight, self.convolution.bias, states[0], runs, False)


class _StateSpace(nn.Module):
    spec: MambaSpec | SelectiveSpec
    convolution: Convolution
    rate: Tensor
    dt_bias: Tensor
    skip: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are neither linears nor norms."""
        return self.convolution.nbytes + self.rate.nbytes + self.dt_bias.nbytes + self.skip.nbytes

    def load(self, weights: CheckpointWeights) -> None:
        self.convolution.load(weights)
        names = (self.spec.decay, self.spec.dt_bias, self.spec.skip)
        decay, self.dt_bias, self.skip = (weights.read(name, torch.float32) for name in names)
        self.rate = -decay.exp()


class Mamba(_StateSpace):
    """Mamba-2 between the products `projection` and `out`; see `MambaSpec`."""

    spec: MambaSpec

    def __init__(self, spec: MambaSpec, layer: int) -> None:
        super().__init__()
        self.spec, self._layer = spec, layer
        self.sizes = ScanSizes(spec.heads, spec.groups, spec.head_dim, spec.state_dim, spec.step_limits)
        self.widths = spec.convolution.channels, spec.heads
        self.projection = Linear((spec.projection,))
        self.convolution = Convolution(spec.convolution)
        self.norm = make_norm(spec.gated_norm)
        self.out = Linear((spec.out,))
        self.unquantized: tuple[Linear, ...] = ()
        self.rate, self.dt_bias, self.skip = (torch.empty(spec.heads, device="meta") for _ in range(3))
        self._multipliers: Tensor | None = None  # fp64, of each column of `projection`

    def load(self, weights: CheckpointWeights) -> None:
        super().load(weights)
        spec = self.spec
        if spec.multipliers:
            counts = torch.tensor((spec.inner, spec.inner, *2 * (spec.groups * spec.state_dim,), spec.heads))
            values = torch.tensor(spec.multipliers, dtype=torch.float64)
            self._multipliers = values.repeat_interleave(counts).to(weights.device)

    def forward(self, x: Tensor, projected: Tensor, states: RecurrentStates) -> Tensor:
        spec = self.spec
        if self._multipliers is not None:
            projected = projected * self._multipliers.to(projected.dtype)
        gate, mixed, steps = torch.split(projected, [spec.inner, spec.convolution.channels, spec.heads], dim=-1)
        scanned = states.advance(self._layer, spec, (mixed, steps), self.advance)
        if self.norm is None:
            return ACTIVATION["silu", True](torch.cat((gate, scanned), dim=-1))
        if spec.norm_first:
            heads = scanned.view(*scanned.shape[:-1], spec.norm_groups, -1)
            gain = self.norm.weight.view(spec.norm_groups, -1)
            normed = RMS_NORM(heads, torch.ones_like(gain[0]), self.norm.eps) * gain
            return ACTIVATION["silu", True](torch.cat((gate, normed.flatten(-2)), dim=-1))
        rows = scanned.flatten(0, 1), self.norm.weight, self.norm.eps, gate.flatten(0, 1)
        return GROUP_NORM(*rows, spec.norm_groups).view_as(scanned)

    def advance(self, rows: Rows, states: tuple[Tensor, ...], runs: Runs | DeviceRuns) -> Tensor:
        """Advance the states by rows of (convolution input, steps); an `Advance`."""
        (mixed, steps), (inputs, matrices) = rows, states
        x = CONVOLUTION(mixed, self.convolution.weight, self.convolution.bias, inputs, runs, True)
        return SCAN(x, steps, self.rate, self.dt_bias, self.skip, matrices, runs, self.sizes)


class Selective(_StateSpace):
    """Mamba-1 between the products `projection` and `out`; see `SelectiveSpec`."""

    spec: SelectiveSpec

    def __init__(self, spec: SelectiveSpec, layer: int) -> None:
        super().__init__()
        self.spec, self._layer = spec, layer
        self.sizes = ScanSizes(1, 1, spec.channels, spec.state_dim, (0.0, float("inf")), by_channel=True)
        self.widths = (spec.channels,)
        self.projection = Linear((spec.projection,))
        self.convolution = Convolution(spec.convolution)
        self.select = Linear((spec.select,))
        self.norms = nn.ModuleList(RMSNorm(norm) for norm in spec.select_norms)
        self.step = Linear((spec.step,))
        self.out = Linear((spec.out,))
        self.unquantized = (self.select, self.step)
        self.rate, self.dt_bias, self.skip = (torch.empty(0, device="meta") for _ in range(3))

    def load(self, weights: CheckpointWeights) -> None:
        super().load(weights)
        self.rate = self.rate.T.contiguous()  # [state_dim, channels]

    def forward(self, x: Tensor, projected: Tensor, states: RecurrentStates) -> Tensor:
        """Compute the input of `out` from x and `projected`, the output of `projection`: [sequences, tokens, ...]."""
        mixed, gate = projected.chunk(2, dim=-1)
        scanned = states.advance(self._layer, self.spec, (mixed,), self.advance)
        return ACTIVATION["silu", True](torch.cat((gate, scanned), dim=-1))

    def advance(self, rows: Rows, states: tuple[Tensor, ...], runs: Runs | DeviceRuns) -> Tensor:
        """Advance the states by rows of the convolution input; an `Advance`."""
        inputs, matrices = states
        x = CONVOLUTION(rows[0], self.convolution.weight, self.convolution.bias, inputs, runs, True)
        dimension = self.spec.state_dim
        selected = torch.split(self.select(x), [self.spec.step.in_features, dimension, dimension], dim=-1)
        if self.norms:
            selected = tuple(norm(part) for norm, part in zip(self.norms, selected, strict=True))
        low, *matrix_rows = selected
        steps = self.step(low.contiguous())
        row = torch.cat((x, *matrix_rows), dim=-1)
        return SCAN(row, steps, self.rate, self.dt_bias, self.skip, matrices, runs, self.sizes)


Mixer = DeltaNet | KimiDelta | Mamba | Selective | ShortConv


def make_mixer(spec: RecurrentSpec, layer: int) -> Mixer:
    """Return the mixer of `spec`, which takes no memory until it is loaded."""
    if isinstance(spec, DeltaNetSpec):
        return DeltaNet(spec, layer)
    if isinstance(spec, KimiDeltaSpec):
        return KimiDelta(spec, layer)
    if isinstance(spec, SelectiveSpec):
        return Selective(spec, layer)
    return Mamba(spec, layer) if isinstance(spec, MambaSpec) else ShortConv(spec, layer)
