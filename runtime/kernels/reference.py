"""The reference kernels in plain torch, which run on any device; tests compare all others with them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.device.placement import decline_packed
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.kernels.routed import Route, mask_groups
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, dequantize, dequantize_rows
from mycli.runtime.quantization.scheme import Packing


class DenseMatmul:
    """A dense weight [N, K] as a `Matmul`; `product` multiplies activations by it."""

    def __init__(self, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor] = functional.linear) -> None:
        self._weight, self._product = weight, product

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._weight)

    def dequantize(self) -> Tensor:
        return self._weight


class DequantizeMatmul:
    """A weight in its stored layout, decoded in every call, `packed_weight.PART` weights at a time."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], self._weight.out_features)
        for rows, values in dequantize_rows(self._weight):
            y[:, rows] = functional.linear(x, values.to(x.dtype))
        return y

    def dequantize(self) -> Tensor:
        return dequantize(self._weight)


class DequantizeKernel:
    """Multiplies any packed weight, slowly."""

    name = "dequantize"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        return None

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        return DequantizeMatmul(weight)


class UnpackedKernel:
    """Decodes packed weights at load and multiplies them densely, on GPUs too old for the Triton kernels."""

    name = "unpacked"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        # Dense weights take four times the memory of 4-bit ones, which the memory plan counts; decoding them in every
        # pass would take a second per token.
        return None if decline_packed(device) else Declined("only-for-older-gpus", {"capability": "8.0"})

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        return DenseMatmul(dequantize(weight).to(dtype))


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., size] with gain [size], in the dtype of x, rounded once."""
    if gain.dtype != x.dtype:
        return functional.rms_norm(x.to(gain.dtype), gain.shape, gain, eps).to(x.dtype)
    return functional.rms_norm(x, gain.shape, gain, eps)


def layer_norm(x: Tensor, gain: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """LayerNorm of x [..., size] with gain and bias [size] of one dtype, in the dtype of x, rounded once."""
    return functional.layer_norm(x.to(gain.dtype), gain.shape, gain, bias, eps).to(x.dtype)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first `dim` values of each head: x [batch, tokens, heads, head_dim], tables [tokens, dim / 2]."""
    # The pairs are (i, i + dim / 2), or `interleaved` (2i, 2i + 1), which are returned as (i, i + dim / 2).
    dim = 2 * cos.shape[-1]
    rotary, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    if interleaved:
        rotary = rotary.reshape(*rotary.shape[:-1], dim // 2, 2).transpose(-1, -2).flatten(-2)
    first, second = rotary.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(parts if rest is None else (*parts, rest), dim=-1)


def silu_multiply(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up: gate_up [..., 2 * size], gate first, to [..., size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_multiply(gate_up: Tensor) -> Tensor:
    """GELU(gate) * up by the tanh approximation (arXiv 1606.08415); shapes as in `silu_multiply`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def relu_square_multiply(gate_up: Tensor) -> Tensor:
    """ReLU(gate)^2 * up; shapes as in `silu_multiply`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return relu_square(gate) * up


def relu_square(x: Tensor) -> Tensor:
    """ReLU(x)^2 (arXiv 2109.08668)."""
    return functional.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """GELU(x) by the tanh approximation."""
    return functional.gelu(x, approximate="tanh")


def xielu(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """xIELU (arXiv 2411.13010); parameters: alpha_p and alpha_n before softplus, beta and eps, one value each."""
    alpha_p, alpha_n, beta, eps = parameters
    positive = functional.softplus(alpha_p) * x * x + beta * x
    negative = (torch.expm1(torch.min(x, eps)) - x) * (beta + functional.softplus(alpha_n)) + beta * x
    return torch.where(x > 0, positive, negative)


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate) of gpt-oss, with gate <= 7 and -7 <= up <= 7."""
    # gate_up [..., 2 * size], gate and up alternating, to [..., size].
    return _clamped_swiglu(gate_up[..., ::2], gate_up[..., 1::2])


def swiglu_halves(gate_up: Tensor) -> Tensor:
    """`clamped_swiglu` of gate_up [..., 2 * size] with all of gate before up."""
    return _clamped_swiglu(*gate_up.chunk(2, dim=-1))


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def weigh_rows(x: Tensor, gate: Tensor) -> Tensor:
    """x [..., size] times the sigmoid of gate [..., 1] or [..., size], in their common dtype."""
    return x * torch.sigmoid(gate)


def route(scores: Tensor, choice: RoutingSpec, correction: Tensor | None = None) -> Route:
    """Route tokens by `scores` [tokens, experts], in fp32; `correction` fp32 [experts] affects the choice only."""
    # A token's route does not depend on other tokens.
    exact, top_k = scores.float(), choice.top_k
    if choice.softcap:
        exact = torch.tanh(exact / choice.softcap) * choice.softcap
    values = exact.softmax(-1) if choice.scoring == "softmax" else exact.sigmoid()
    if choice.scoring == "sparse_mixer":
        chosen, weights = _sparse_mixer(exact, choice.jitter)
    else:
        ranked = exact if choice.scoring == "sigmoid_of_corrected" else values
        chosen = mask_groups(ranked if correction is None else ranked + correction, choice).topk(top_k).indices
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


def _sparse_mixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    # The second expert is chosen as the first, without it (transformers' sparsemixer outside of training).
    chosen, weights, left = [], [], logits
    for _ in range(2):
        most, best = left.max(-1, keepdim=True)
        far = (most - logits) / logits.abs().clamp(min=most) > 2 * jitter
        chosen.append(best)
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(chosen, 1), torch.cat(weights, 1)


def routed_product(weights: Sequence[Matmul | Tensor], x: Tensor, starts: Tensor, tokens: Tensor | None) -> Tensor:
    """Multiply the rows of each expert by its weight: [pairs, N] in the dtype of x."""
    # `weights` of the hit experts, packed or dense [N, K]; `starts` as in `Route`. Pair p is row tokens[p] of
    # x [tokens, K], or row p if `tokens` is None.
    bounds, parts = starts.tolist(), []
    for index, weight in enumerate(weights):
        pairs = slice(*bounds[index : index + 2])
        if pairs.start == pairs.stop:
            continue
        rows = x[pairs] if tokens is None else x.index_select(0, tokens[pairs])
        parts.append(functional.linear(rows, weight) if isinstance(weight, Tensor) else weight(rows))
    return torch.cat(parts)


def weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum the rows of x [pairs, N] of each token: rows `places`, times weights fp32, both [tokens, top_k]."""
    # Summed in fp32 in the order of `places`; [tokens, N] in the dtype of x.
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
    chunk: int | None = None,
) -> Tensor:
    """Attention of query [batch, tokens, heads, head_dim] to keys, values [batch, kv_heads, length, head_dim]."""
    # The new tokens are the last positions. Returns [batch, tokens, heads * head_dim]. mask: bool [tokens, length],
    # True where a token attends to a position; None if each attends to all before it, or for a single token, which
    # attends to its last `window` positions. scale, softcap: as in `AttentionSpec`. Quantized ones are decoded first.
    batch, tokens, heads, head_dim = query.shape
    kv_heads = keys.data.shape[1]
    if tokens == 1 and chunk is not None:
        window = (keys.data.shape[2] - 1) % chunk + 1
    if tokens == 1 and window is not None:
        keys, values = keys.last(window), values.last(window)
    key, value = keys.dense(query.dtype), values.dense(query.dtype)
    if softcap is not None or sinks is not None:
        return _attend_fp32(
            query,
            key,
            value,
            mask,
            Scoring(head_dim**-0.5 if scale is None else scale, None, softcap or 0.0, sinks=sinks),
        )
    if tokens == 1:
        # The query heads of one key head become the rows of one product: no key is repeated, nothing is masked.
        grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
        return functional.scaled_dot_product_attention(grouped, key, value, scale=scale).reshape(batch, 1, -1)
    attended = _attend_prompt(query.transpose(1, 2), key, value, mask, scale)
    return attended.transpose(1, 2).reshape(batch, tokens, -1)


def _attend_prompt(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    heads, kv_heads, tokens, length = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    if mask is None and tokens < length:
        if (attended := _flash(query, key, value, scale)) is not None:
            return attended
        mask = torch.ones(tokens, length, dtype=torch.bool, device=query.device).tril(length - tokens)
    if mask is not None and query.is_cuda and heads != kv_heads:
        # For a mask with grouped heads torch takes its math kernel, which writes out all scores in fp32: flash rejects
        # masks, and the memory-efficient kernel rejects grouped heads.
        key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=key.shape[1] != heads,
        scale=scale,
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
    # Flash attention of the last positions without a mask, as torch.nn.attention.bias.causal_lower_right calls it; that
    # module takes seconds to import. None where torch has no flash kernel for these tensors.
    if not query.is_cuda or query.shape[3] % 8:
        return None
    params = SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1])
    if not can_use_flash_attention(params):
        return None
    scale = query.shape[3] ** -0.5 if scale is None else scale
    # To this operator "causal" means that the last query sees the last key.
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal=True, return_debug_mask=False, scale=scale
    )[0]
    return attended


def _attend_fp32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    # torch has no kernel with a softcap or sinks. One key head at a time: the scores are large.
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
    """Attention of a ragged batch over cache blocks: query [tokens, heads, head_dim] to [tokens, heads * head_dim]."""
    # keys, values: [blocks, kv_heads, block_size, head_dim], int4 vectors as bytes. Scores and sums are fp32 (fp64 for
    # an fp64 query), the result has the dtype of the query. Sequences are computed one after another.
    starts, lengths = ragged.starts.tolist(), ragged.lengths.tolist()
    out = torch.empty_like(query)
    for s, length in enumerate(lengths):
        first, end = starts[s], starts[s + 1]
        if first < end:
            blocks = ragged.block_table[s].long()
            rows = query[first:end].transpose(0, 1)
            out[first:end] = _attend_sequence(rows, keys, values, blocks, length, scoring).transpose(0, 1)
    return out.flatten(1)


def _attend_sequence(
    query: Tensor, keys: Stored, values: Stored, blocks: Tensor, length: int, scoring: Scoring
) -> Tensor:
    # query [heads, tokens, head_dim] to the same shape.
    heads, tokens, _ = query.shape
    kv_heads, block_size = keys.data.shape[1:3]
    exact = torch.promote_types(query.dtype, torch.float32)
    start = length - tokens
    oldest = 0 if scoring.window is None else max(0, start - scoring.window + 1)
    position = torch.arange(oldest, length, device=query.device)
    token = torch.arange(start, length, device=query.device).unsqueeze(1)
    visible = position <= token
    if scoring.window is not None:
        visible &= token - position < scoring.window
    if scoring.chunk is not None:
        visible &= position >= token - token % scoring.chunk
    block, inside = blocks[position // block_size], position % block_size
    out = torch.empty_like(query)
    group = heads // kv_heads
    for head in range(kv_heads):  # one at a time: scores are [group, tokens, length]
        query_heads = slice(head * group, (head + 1) * group)
        key, value = (_vectors(stored, block, head, inside, exact) for stored in (keys, values))
        scores = query[query_heads].to(exact) @ key.T * scoring.scale
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if scoring.sinks is not None:
            sink = scoring.sinks[query_heads].to(exact).view(group, 1, 1).expand(group, tokens, 1)
            scores = torch.cat((scores, sink), dim=-1)
        out[query_heads] = (scores.softmax(-1)[..., : len(position)] @ value).to(query.dtype)
    return out


def _vectors(stored: Stored, block: Tensor, head: int, inside: Tensor, dtype: torch.dtype) -> Tensor:
    scales = None if stored.scales is None else stored.scales[block, head, inside]
    return Stored(stored.data[block, head, inside], scales).dense(dtype)


def attend_latent(
    query: Tensor, rotated_query: Tensor, latents: Stored, rotated: Stored, ragged: Ragged, scale: float
) -> Tensor:
    """Latent attention of a ragged batch: query [tokens, heads, rank] to the same shape; see `LatentAttentionSpec`."""
    # rotated_query: [tokens, heads, rope_dim]; latents, rotated: [blocks, 1, block_size, ...]. Sums as in
    # `attend_gathered`. One head at a time: its scores are [tokens, length].
    # Latents are both keys and values, so they are gathered and decoded once for all heads.
    exact = torch.promote_types(query.dtype, torch.float32)
    starts, lengths, block_size = ragged.starts.tolist(), ragged.lengths.tolist(), latents.data.shape[2]
    out = torch.empty_like(query)
    for s, length in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        tokens = rows.stop - rows.start
        position = torch.arange(length, device=query.device)
        block, inside = ragged.block_table[s].long()[position // block_size], position % block_size
        value, key = (_vectors(stored, block, 0, inside, exact) for stored in (latents, rotated))
        hidden = position > position[length - tokens :].unsqueeze(1)
        for head in range(query.shape[1]):
            scores = query[rows, head].to(exact) @ value.T + rotated_query[rows, head].to(exact) @ key.T
            weights = (scores * scale).masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows, head] = (weights @ value).to(query.dtype)
    return out


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head of x [tokens, heads, inputs] by its weight [outputs, inputs]: [tokens, heads, outputs]."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
