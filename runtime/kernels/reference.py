"""The kernels that always work, in plain torch on any device; packed weights are slow. The others are held to them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.kernels.routed import Route, in_groups
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, dequantize, dequantize_rows
from mycli.runtime.quantization.scheme import Packing


class DenseMatmul:
    """A dense weight [N, K] as a `Matmul`, by `product` of activations and weight."""

    def __init__(self, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor] = functional.linear) -> None:
        self._weight, self._product = weight, product

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, K] to [rows, N] in the dtype of x."""
        return self._product(x, self._weight)

    def dequantize(self) -> Tensor:
        """The weight itself."""
        return self._weight


class DequantizeMatmul:
    """A weight as on disk; dense rows of it live only during a call, `packed_weight.PART` weights at a time."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, K] to [rows, N] in the dtype of x."""
        y = x.new_empty(x.shape[0], self._weight.out_features)
        for rows, values in dequantize_rows(self._weight):
            y[:, rows] = functional.linear(x, values.to(x.dtype))
        return y

    def dequantize(self) -> Tensor:
        """The weight [N, K] in the dtype of its scales."""
        return dequantize(self._weight)


class DequantizeKernel:
    """Takes every product."""

    name = "dequantize"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        """Never declines."""
        return None

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Keeps the tensors as they are."""
        return DequantizeMatmul(weight)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [..., size] over the root of its mean square, times gain [size]; in the dtype of x, rounded once."""
    if gain.dtype != x.dtype:
        return functional.rms_norm(x.to(gain.dtype), gain.shape, gain, eps).to(x.dtype)
    return functional.rms_norm(x, gain.shape, gain, eps)


def layer_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [..., size] less its mean, over the root of its variance, times gain [size]; in the dtype of x."""
    return functional.layer_norm(x, gain.shape, gain, None, eps)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As `runtime.layers.rope.rotate`: x [batch, tokens, heads, head_dim], tables [tokens, dim / 2]."""
    dim = 2 * cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    if interleaved:
        turned = turned.reshape(*turned.shape[:-1], dim // 2, 2).transpose(-1, -2).flatten(-2)
    first, second = turned.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(parts if rest is None else (*parts, rest), dim=-1)


def silu_multiply(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up: gate_up [..., 2 * size], gate first, to [..., size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_multiply(gate_up: Tensor) -> Tensor:
    """GELU(gate) * up, by the tanh approximation (arXiv 1606.08415); shapes as in `silu_multiply`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def relu_square(x: Tensor) -> Tensor:
    """ReLU(x)^2 (arXiv 2109.08668)."""
    return functional.relu(x).square()


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate) of gpt-oss, gate at most 7, up within -7 and 7: gate_up [..., 2 * size], a
    gate and what goes up beside it in turn, to [..., size]."""
    gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def weigh_rows(x: Tensor, gate: Tensor) -> Tensor:
    """x [..., size] times the sigmoid of gate [..., 1] or [..., size]; in the dtype of both."""
    return x * torch.sigmoid(gate)


def route(scores: Tensor, choice: RoutingSpec, correction: Tensor | None = None) -> Route:
    """Where tokens of `scores` [tokens, experts] go, and with what weights, in fp32. `correction`: fp32 [experts].

    All but the weights is exact, so no token's route depends on others.
    """
    exact, top_k = scores.float(), choice.top_k
    values = exact.softmax(-1) if choice.scoring == "softmax" else exact.sigmoid()
    chosen = in_groups(values if correction is None else values + correction, choice).topk(top_k).indices
    weights = values.gather(1, chosen)
    if choice.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + choice.epsilon)
    weights = weights * choice.scale
    order = chosen.flatten().argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(chosen.flatten(), minlength=scores.shape[1])
    hit = counts.nonzero().flatten()
    starts = torch.cat((counts.new_zeros(1), counts[hit].cumsum(0)))
    tokens = order // top_k
    return Route(hit.tolist(), starts.int(), tokens.int(), places.view(chosen.shape).int(), weights)


def routed_product(weights: Sequence[Matmul | Tensor], x: Tensor, starts: Tensor, tokens: Tensor | None) -> Tensor:
    """Rows of several experts, each by its own weight: [pairs, N] in the dtype of x.

    `weights` of the experts that may have pairs, packed or dense [N, K]; `starts` as in `Route`. Pair p is row
    tokens[p] of x [tokens, K], or row p where there are no `tokens`.
    """
    bounds, parts = starts.tolist(), []
    for index, weight in enumerate(weights):
        pairs = slice(*bounds[index : index + 2])
        if pairs.start == pairs.stop:
            continue
        rows = x[pairs] if tokens is None else x.index_select(0, tokens[pairs])
        parts.append(functional.linear(rows, weight) if isinstance(weight, Tensor) else weight(rows))
    return torch.cat(parts)


def weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Of each token the sum of its rows of x [pairs, N], by places [tokens, top_k], times weights fp32 [tokens, top_k].

    Summed in fp32 in the order of `places`; [tokens, N] in the dtype of x.
    """
    total = torch.zeros(len(places), x.shape[1], device=x.device)
    for place, weight in zip(places.T, weights.T, strict=True):
        total = total + x.index_select(0, place).float() * weight.unsqueeze(1)
    return total.to(x.dtype)


def attend_dense(
    query: Tensor,
    keys: Stored,
    values: Stored,
    mask: Tensor | None,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [batch, tokens, heads, head_dim]; keys, values of [batch, kv_heads, length, head_dim], the new tokens last.

    Returns [batch, tokens, heads * head_dim]. mask: bool [tokens, length], True where a token sees a position, None for
    a plain causal limit or for a single token, which sees its last `window` positions. scale, softcap: those of
    `AttentionSpec`. Codes become dense in the dtype of the query, those of this layer only.
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads = keys.data.shape[1]
    if tokens == 1 and window is not None:
        keys, values = keys.last(window), values.last(window)
    key, value = keys.dense(query.dtype), values.dense(query.dtype)
    if softcap is not None or sinks is not None:
        return _attend_written_out(
            query, key, value, mask, Scoring(head_dim**-0.5 if scale is None else scale, None, softcap or 0.0, sinks)
        )
    if tokens == 1:
        # The queries of one kv head become the rows of one product: nothing is repeated, nothing is masked.
        grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
        return functional.scaled_dot_product_attention(grouped, key, value, scale=scale).reshape(batch, 1, -1)
    attended = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=heads != kv_heads,
        scale=scale,
    )
    return attended.transpose(1, 2).reshape(batch, tokens, -1)


def _attend_written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """What no kernel of torch has: a softcap, and sinks. In fp32, for one key head at a time: scores are large."""
    batch, tokens, heads, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    if mask is None and tokens > 1:
        mask = torch.ones(tokens, length, dtype=torch.bool, device=query.device).tril(length - tokens)
    grouped = query.view(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    out = torch.empty_like(grouped)
    for head in range(kv_heads):
        rows = grouped[:, :, head].transpose(1, 2).float()  # [batch, copies, tokens, head_dim]
        scores = rows @ key[:, head].float().transpose(-1, -2).unsqueeze(1)
        scores = scores * scoring.scale
        if scoring.softcap:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if scoring.sinks is not None:
            copies = heads // kv_heads
            sink = scoring.sinks[head * copies : (head + 1) * copies].float().view(1, copies, 1, 1)
            scores = torch.cat((scores, sink.expand(batch, copies, tokens, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[:, :, head] = (weights @ value[:, head].float().unsqueeze(1)).transpose(1, 2).to(query.dtype)
    return out.view(batch, tokens, -1)


def attend_gathered(query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring) -> Tensor:
    """Attention of a ragged batch over blocks: query [tokens, heads, head_dim] to [tokens, heads * head_dim].

    keys, values: [blocks, kv_heads, block_size, head_dim] (of int4 vectors bytes), query heads in groups of heads /
    kv_heads. Scores and sums are fp32 (fp64 for a query of fp64), the result has the dtype of the query; one sequence
    after another.
    """
    starts, lengths = ragged.starts.tolist(), ragged.lengths.tolist()
    out = torch.empty_like(query)
    for s, length in enumerate(lengths):
        first, end = starts[s], starts[s + 1]
        if first < end:
            blocks = ragged.block_table[s].long()
            rows = query[first:end].transpose(0, 1)
            out[first:end] = _attend_one(rows, keys, values, blocks, length, scoring).transpose(0, 1)
    return out.flatten(1)


def _attend_one(query: Tensor, keys: Stored, values: Stored, blocks: Tensor, length: int, scoring: Scoring) -> Tensor:
    """query [heads, tokens, head_dim] of one sequence, whose positions lie in `blocks` [blocks], to the same shape."""
    heads, tokens, _ = query.shape
    kv_heads, block_size = keys.data.shape[1:3]
    exact = torch.promote_types(query.dtype, torch.float32)
    start = length - tokens
    oldest = 0 if scoring.window is None else max(0, start - scoring.window + 1)
    position = torch.arange(oldest, length, device=query.device)
    token = torch.arange(start, length, device=query.device).unsqueeze(1)
    seen = position <= token
    if scoring.window is not None:
        seen &= token - position < scoring.window
    block, inside = blocks[position // block_size], position % block_size
    out = torch.empty_like(query)
    group = heads // kv_heads
    for head in range(kv_heads):  # one at a time: scores are [group, tokens, length]
        some = slice(head * group, (head + 1) * group)
        key, value = (_vectors(one, block, head, inside, exact) for one in (keys, values))
        scores = query[some].to(exact) @ key.T * scoring.scale
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if scoring.sinks is not None:
            sink = scoring.sinks[some].to(exact).view(group, 1, 1).expand(group, tokens, 1)
            scores = torch.cat((scores, sink), dim=-1)
        out[some] = (scores.softmax(-1)[..., : len(position)] @ value).to(query.dtype)
    return out


def _vectors(stored: Stored, block: Tensor, head: int, inside: Tensor, dtype: torch.dtype) -> Tensor:
    """[positions, head_dim] in `dtype` of what lies at (block, head, inside)."""
    scales = None if stored.scales is None else stored.scales[block, head, inside]
    return Stored(stored.data[block, head, inside], scales).dense(dtype)
