"""The reference kernels in plain torch, which run on any device; tests compare all others with them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.device.placement import decline_packed
from mycli.runtime.errors import Declined
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


def relu_multiply(gate_up: Tensor) -> Tensor:
    """ReLU(gate) * up; shapes as in `silu_multiply`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.relu(gate) * up


def relu_square_multiply(gate_up: Tensor) -> Tensor:
    """ReLU(gate)^2 * up; shapes as in `silu_multiply`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return relu_square(gate) * up


def relu_square(x: Tensor) -> Tensor:
    """ReLU(x)^2 (arXiv 2109.08668)."""
    return functional.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU(x) by the tanh approximation."""
    return functional.gelu(x, approximate="tanh")


def gelu(x: Tensor) -> Tensor:
    """GELU(x): x times the normal distribution up to x (arXiv 1606.08415)."""
    return functional.gelu(x)


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


def routed_product(
    weights: Sequence[Matmul | Tensor],
    x: Tensor,
    starts: Tensor,
    tokens: Tensor | None,
    product: Callable[[Tensor, Tensor], Tensor] = functional.linear,
) -> Tensor:
    """Multiply the rows of each expert by its weight, a dense one by `product`: [pairs, N] in the dtype of x."""
    # `weights` of the hit experts, packed or dense [N, K]; `starts` as in `Route`. Pair p is row tokens[p] of
    # x [tokens, K], or row p if `tokens` is None.
    bounds, parts = starts.tolist(), []
    for index, weight in enumerate(weights):
        pairs = slice(*bounds[index : index + 2])
        if pairs.start == pairs.stop:
            continue
        rows = x[pairs] if tokens is None else x.index_select(0, tokens[pairs])
        parts.append(product(rows, weight) if isinstance(weight, Tensor) else weight(rows))
    return torch.cat(parts)


def weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum the rows of x [pairs, N] of each token: rows `places`, times weights fp32, both [tokens, top_k]."""
    # Summed in fp32 in the order of `places`; [tokens, N] in the dtype of x.
    total = torch.zeros(len(places), x.shape[1], device=x.device)
    for place, weight in zip(places.T, weights.T, strict=True):
        total = total + x.index_select(0, place).float() * weight.unsqueeze(1)
    return total.to(x.dtype)


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head of x [tokens, heads, inputs] by its weight [outputs, inputs]: [tokens, heads, outputs]."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
