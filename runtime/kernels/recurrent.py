"""Causal convolution, gated delta rule (arXiv 2412.06464), state space scan (2405.21060), gated norms: the references.

Results have gradients; states have none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.kernels.reference import rms_norm

DELTA_CHUNK = 64  # tokens of one chunk, inside which the recurrence is a triangular solve
CHANNEL_CHUNK = 16  # with decays by channel, where each pair of tokens of a chunk has a decay for each
L2_EPS = 1e-6  # added to the sum of squares of a query or key


@dataclass(frozen=True)
class Runs:
    """The tokens of one pass, sequence after sequence, and the state slot of each sequence."""

    starts: tuple[int, ...]  # sequence s has the rows starts[s] to starts[s + 1]
    slots: tuple[int, ...]  # all different

    @classmethod
    def alike(cls, sequences: int, tokens: int) -> "Runs":
        """Return runs of the same number of tokens, sequence s in slot s."""
        return cls(tuple(range(0, (sequences + 1) * tokens, tokens)), tuple(range(sequences)))


@dataclass(frozen=True)
class DeviceRuns:
    """The tokens of a captured pass: `tokens` rows of each sequence, the first `counts` of which are not padding.

    starts int32 [sequences]: positions of the first tokens; at 0 a state is zero. slots int64 [sequences]; counts int32
    [sequences], 0 for a padding sequence. Result rows of padding are undefined. advances int32 [sequences]: 0 where the
    state must not change.
    """

    tokens: int
    starts: Tensor
    slots: Tensor
    counts: Tensor
    advances: Tensor

    def run(
        self,
        step: Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Runs], Tensor],
        rows: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> Tensor | None:
        """Apply `step` to the rows that are not padding, sequence by sequence: rows and states on the CPU.

        Returns None if there are no such rows.
        """
        result: Tensor | None = None
        runs = (self.starts, self.slots, self.counts, self.advances)
        for place, (start, slot, count, advances) in enumerate(zip(*(run.tolist() for run in runs), strict=True)):
            if not count:
                continue
            current = tuple(state[slot : slot + 1] for state in states)
            current = current if advances else tuple(state.clone() for state in current)
            if not start:
                for state in current:
                    state.zero_()
            tokens = slice(place * self.tokens, place * self.tokens + count)
            part = step(tuple(row[tokens] for row in rows), current, Runs.alike(1, count))
            result = part.new_zeros(len(rows[0]), *part.shape[1:]) if result is None else result
            result[tokens] = part
        return result


@dataclass(frozen=True)
class DeltaSizes:
    """`heads` states [key_dim, value_dim]; heads / key_heads adjacent heads share a query and key."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    beta_scale: float = 1.0  # multiplies beta
    by_channel: bool = False  # each row of a state has a decay of its own (Kimi Delta Attention); one key per head
    floor: float = 0.0  # where it is not 0, a decay is exp(floor * sigmoid(exp(A) (a + dt)))

    @property
    def decays(self) -> int:
        return self.heads * (self.key_dim if self.by_channel else 1)


@dataclass(frozen=True)
class ScanSizes:
    """`heads` states [state_dim, head_dim]; heads / groups adjacent heads share B and C; `limits` of a step."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    limits: tuple[float, float]
    by_channel: bool = False  # a step of each column and a rate of each value of a state (Mamba-1); one head

    @property
    def steps(self) -> int:
        return self.head_dim if self.by_channel else self.heads


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: Runs, silu: bool) -> Tensor:
    """Convolve each channel of x [rows, channels] with fp32 weight [taps, channels]; the last tap is the row itself."""
    # state fp32 [slots, taps - 1, channels]: the preceding inputs, replaced by those that precede the next row. Sums,
    # fp32 bias [channels] and `silu` are computed in fp32; the result has the dtype of x.
    taps = weight.shape[0]
    parts = []
    for (first, end), slot in zip(pairwise(runs.starts), runs.slots, strict=True):
        if first == end:
            continue
        inputs = torch.cat((state[slot], x[first:end].float()))
        total = inputs[: end - first] * weight[0]
        for tap in range(1, taps):
            total = total + inputs[tap : tap + end - first] * weight[tap]
        if bias is not None:
            total = total + bias
        parts.append((functional.silu(total) if silu else total).to(x.dtype))
        state[slot] = inputs[end - first :].detach()
    return torch.cat(parts)


def delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, dt_bias: Tensor, state: Tensor, runs: Runs, sizes: DeltaSizes
) -> Tensor:
    """Apply the rule to qkv [rows, 2 * key_heads * key_dim + heads * value_dim]: [rows, heads * value_dim]."""
    # gates [rows, heads + decays]: b of every head, then a; rate fp32 [heads] = -exp(A), dt_bias fp32 [decays], as in
    # `DeltaNetSpec`. state fp32 [slots, heads, key_dim, value_dim] is updated.
    parts = [
        _scan(qkv[first:end], gates[first:end], rate, dt_bias, state[slot], sizes)
        for (first, end), slot in zip(pairwise(runs.starts), runs.slots, strict=True)
        if first < end
    ]
    return torch.cat(parts).to(qkv.dtype)


def _scan(qkv: Tensor, gates: Tensor, rate: Tensor, dt_bias: Tensor, state: Tensor, sizes: DeltaSizes) -> Tensor:
    width, copies = sizes.key_heads * sizes.key_dim, sizes.heads // sizes.key_heads
    exact, rows = qkv.float(), qkv.shape[0]
    query, key = (
        _normalize(part.reshape(rows, sizes.key_heads, sizes.key_dim)).repeat_interleave(copies, 1)
        for part in (exact[:, :width], exact[:, width : 2 * width])
    )
    query = query * sizes.key_dim**-0.5
    value = exact[:, 2 * width :].reshape(rows, sizes.heads, sizes.value_dim)
    beta = gates[:, : sizes.heads].float().sigmoid() * sizes.beta_scale
    step = (gates[:, sizes.heads :].float() + dt_bias).view(rows, sizes.heads, -1)
    rate = rate.view(-1, 1)
    decay = sizes.floor * torch.sigmoid(-rate * step) if sizes.floor else rate * functional.softplus(step)
    # [heads, rows, ...]
    query, key, value, beta, decay = (part.transpose(0, 1) for part in (query, key, value, beta, decay))
    current, outputs = state.clone(), []
    size = CHANNEL_CHUNK if sizes.by_channel else DELTA_CHUNK
    for first in range(0, rows, size):
        chunk = slice(first, first + size)
        output, current = _chunk(current, *(part[:, chunk] for part in (query, key, value, beta, decay)))
        outputs.append(output)
    state.copy_(current.detach())
    return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk, operands being [heads, tokens, ...], and the state after it."""
    # With G the running sum of decays, the values u that tokens write solve (1 + L) u = beta (v - exp(G) S^T k), where
    # L[i, j] = beta_i exp(G_i - G_j) k_i k_j for j < i: each token corrects what earlier tokens have written.
    total = decay.cumsum(-2)  # [heads, tokens, 1 or key_dim]
    later = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).triu(1)
    between = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(later.unsqueeze(-1), -torch.inf).exp()
    grown = total.exp()
    system = _decayed_products(key * beta.unsqueeze(-1), key, between)
    target = (value - (key * grown) @ state) * beta.unsqueeze(-1)
    written = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    read = (query * grown) @ state + _decayed_products(query, key, between) @ written
    left = (total[:, -1:] - total).exp()
    return read, state * grown[:, -1].unsqueeze(-1) + (key * left).transpose(-1, -2) @ written


def _decayed_products(x: Tensor, y: Tensor, between: Tensor) -> Tensor:
    """Return sum_c x_ic y_jc between_ijc for each pair of tokens; `between` [heads, tokens, tokens, 1 or channels]."""
    if between.shape[-1] == 1:
        return x @ y.transpose(-1, -2) * between.squeeze(-1)
    return (x.unsqueeze(-2) * y.unsqueeze(-3) * between).sum(-1)


def gated_norm(x: Tensor, gain: Tensor, eps: float, gate: Tensor, silu: bool) -> Tensor:
    """RMSNorm of each head of x [rows, heads * size] with gain [size], times SiLU(gate) or its sigmoid; in fp32."""
    normed = rms_norm(x.reshape(len(x), -1, gain.shape[0]).float(), gain.float(), eps).flatten(1)
    return (normed * (functional.silu if silu else torch.sigmoid)(gate.float())).to(x.dtype)


def scan(
    x: Tensor, steps: Tensor, rate: Tensor, dt_bias: Tensor, skip: Tensor, state: Tensor, runs: Runs, sizes: ScanSizes
) -> Tensor:
    """Apply Mamba's recurrence to x [rows, heads * head_dim + 2 * groups * state_dim]: [rows, heads * head_dim]."""
    # x: x, B and C after the convolution; steps [rows, heads]: dt; rate fp32 [heads] = -exp(A), dt_bias and skip fp32
    # [heads], as in `MambaSpec`. By channel, as in `SelectiveSpec`: rate [state_dim, head_dim], the others [..,
    # head_dim]. state fp32 [slots, heads, state_dim, head_dim] is updated.
    scan_states = _scan_channels if sizes.by_channel else _scan_states
    parts = [
        scan_states(x[first:end].float(), steps[first:end].float(), rate, dt_bias, skip, state[slot], sizes)
        for (first, end), slot in zip(pairwise(runs.starts), runs.slots, strict=True)
        if first < end
    ]
    return torch.cat(parts).to(x.dtype)


def _scan_states(
    x: Tensor, steps: Tensor, rate: Tensor, dt_bias: Tensor, skip: Tensor, state: Tensor, sizes: ScanSizes
) -> Tensor:
    rows, inner, width = len(x), sizes.heads * sizes.head_dim, sizes.groups * sizes.state_dim
    values = x[:, :inner].view(rows, sizes.heads, sizes.head_dim).transpose(0, 1)
    key, query = (
        part.reshape(rows, sizes.groups, sizes.state_dim)
        .repeat_interleave(sizes.heads // sizes.groups, 1)
        .transpose(0, 1)
        for part in (x[:, inner : inner + width], x[:, inner + width :])
    )
    # Chunks as for the delta rule, not of transformers' 256: the results are equal, and matrices of a chunk smaller.
    size = functional.softplus(steps + dt_bias).clamp(*sizes.limits).T  # [heads, rows]
    written, decay = values * size.unsqueeze(-1), size * rate.unsqueeze(-1)
    current, outputs = state.clone(), []
    for first in range(0, rows, DELTA_CHUNK):
        chunk = slice(first, first + DELTA_CHUNK)
        output, current = _scan_chunk(current, *(part[:, chunk] for part in (query, key, written, decay)))
        outputs.append(output)
    state.copy_(current.detach())
    return (torch.cat(outputs, dim=1) + values * skip[:, None, None]).transpose(0, 1).flatten(1)


def _scan_chunk(state: Tensor, query: Tensor, key: Tensor, written: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk, operands being [heads, tokens, ...], and the state after it."""
    total = decay.cumsum(-1)
    later = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    grown = total.exp().unsqueeze(-1)
    read = (query * grown) @ state + (query @ key.transpose(-1, -2) * between) @ written
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    return read, state * grown[:, -1:] + (key * left).transpose(-1, -2) @ written


def _scan_channels(
    x: Tensor, steps: Tensor, rate: Tensor, dt_bias: Tensor, skip: Tensor, state: Tensor, sizes: ScanSizes
) -> Tensor:
    # Token by token: for chunks, each pair of tokens would have a decay of each value of the state.
    values, keys, queries = torch.split(x, [sizes.head_dim, sizes.state_dim, sizes.state_dim], dim=-1)
    size = functional.softplus(steps + dt_bias).clamp(*sizes.limits)
    written, current, outputs = values * size, state[0].clone(), []
    for row in range(len(x)):
        current = current * (rate * size[row]).exp() + keys[row].unsqueeze(-1) * written[row]
        outputs.append(queries[row] @ current)
    state.copy_(current.detach())
    return torch.stack(outputs) + values * skip


def group_norm(x: Tensor, gain: Tensor, eps: float, gate: Tensor, groups: int) -> Tensor:
    """RMSNorm of each of `groups` parts of x * SiLU(gate), both [rows, size], times gain [size]; in fp32."""
    gated = (x.float() * functional.silu(gate.float())).view(len(x), groups, -1)
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * gain.float()).to(x.dtype)
