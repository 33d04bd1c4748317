"""What recurrent layers do with their states, in plain torch on any device: the kernels that always work.

A causal convolution of each channel, the gated delta rule (arXiv 2412.06464) cut into chunks of tokens, and the gated
norm of what it gives. The others are held to these. Results have gradients; states get none.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.kernels.reference import rms_norm

DELTA_CHUNK = 64  # tokens whose products are made at once
_L2_EPS = 1e-6  # of the sum of squares of a query or key


@dataclass(frozen=True)
class Runs:
    """The tokens of one pass, sequence after sequence, and where the state of each lies.

    starts: sequence s has the rows starts[s] to starts[s + 1]; slots: where its state is read and written, each once.
    """

    starts: tuple[int, ...]
    slots: tuple[int, ...]

    @classmethod
    def alike(cls, sequences: int, tokens: int) -> "Runs":
        """Sequences with equally many tokens, sequence s having slot s."""
        return cls(tuple(range(0, (sequences + 1) * tokens, tokens)), tuple(range(sequences)))


@dataclass(frozen=True)
class DeltaSizes:
    """Of the delta rule: `heads` with a state [key_dim, value_dim] each; heads / key_heads neighbours share a key."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: Runs, silu: bool) -> Tensor:
    """x [rows, channels] by fp32 weight [taps, channels] and bias [channels], the last tap being for the row itself.

    state fp32 [slots, taps - 1, channels]: the inputs before, and after the call those before the next row. Sums are
    fp32; `silu` is applied to them, before they are rounded to the dtype of x.
    """
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
    """qkv [rows, 2 * key_heads * key_dim + heads * value_dim] to what heads read, [rows, heads * value_dim].

    gates [rows, 2 * heads]: b of every head, then a; rate fp32 [heads] = -exp(A), dt_bias fp32 [heads]: as
    `DeltaNetSpec` says. state fp32 [slots, heads, key_dim, value_dim]: before the rows of a sequence, and after.
    """
    parts = [
        _scan(qkv[first:end], gates[first:end], rate, dt_bias, state[slot], sizes)
        for (first, end), slot in zip(pairwise(runs.starts), runs.slots, strict=True)
        if first < end
    ]
    return torch.cat(parts).to(qkv.dtype)


def _scan(qkv: Tensor, gates: Tensor, rate: Tensor, dt_bias: Tensor, state: Tensor, sizes: DeltaSizes) -> Tensor:
    """The rows of one sequence, chunk by chunk; state [heads, key_dim, value_dim] is taken on."""
    width, copies = sizes.key_heads * sizes.key_dim, sizes.heads // sizes.key_heads
    exact, rows = qkv.float(), qkv.shape[0]
    query, key = (
        _unit(each.reshape(rows, sizes.key_heads, sizes.key_dim)).repeat_interleave(copies, 1)
        for each in (exact[:, :width], exact[:, width : 2 * width])
    )
    query = query * sizes.key_dim**-0.5
    value = exact[:, 2 * width :].reshape(rows, sizes.heads, sizes.value_dim)
    beta = gates[:, : sizes.heads].float().sigmoid()
    decay = rate * functional.softplus(gates[:, sizes.heads :].float() + dt_bias)
    # [heads, rows, ...]
    query, key, value, beta, decay = (each.transpose(0, 1) for each in (query, key, value, beta, decay))
    now, outputs = state.clone(), []
    for first in range(0, rows, DELTA_CHUNK):
        some = slice(first, first + DELTA_CHUNK)
        output, now = _chunk(query[:, some], key[:, some], value[:, some], beta[:, some], decay[:, some], now)
        outputs.append(output)
    state.copy_(now.detach())
    return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """[heads, tokens, ...] of a chunk: what is read, and the state after it.

    With G the running sum of decays, what tokens write, u, solves (1 + L) u = beta (v - exp(G) S^T k), where L[i, j] =
    beta_i exp(G_i - G_j) k_i k_j for j < i: a token corrects what those before it have written.
    """
    total = decay.cumsum(-1)
    later = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    grown = total.exp().unsqueeze(-1)
    system = (key * beta.unsqueeze(-1)) @ key.transpose(-1, -2) * between
    wanted = (value - (key * grown) @ state) * beta.unsqueeze(-1)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = (query * grown) @ state + (query @ key.transpose(-1, -2) * between) @ written
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    return read, state * grown[:, -1:] + (key * left).transpose(-1, -2) @ written


def gated_norm(x: Tensor, gain: Tensor, eps: float, gate: Tensor) -> Tensor:
    """x [rows, heads * size], RMSNorm over each head with gain [size], times SiLU(gate), gate as x; in fp32."""
    normed = rms_norm(x.reshape(len(x), -1, gain.shape[0]).float(), gain.float(), eps).flatten(1)
    return (normed * functional.silu(gate.float())).to(x.dtype)
