"""The kernels that always work, in plain torch on any device; packed weights are slow. The others are held to them."""

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, dequantize, dequantize_rows
from mycli.runtime.quantization.scheme import Packing


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
    ) -> str | None:
        """Never declines."""
        return None

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Keeps the tensors as they are."""
        return DequantizeMatmul(weight)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [..., size] over the root of its mean square, times gain [size]; in the dtype of x."""
    return functional.rms_norm(x, gain.shape, gain, eps)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, tokens, heads, head_dim] turned by tables [tokens, head_dim / 2]; pairs are (i, i + head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_multiply(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up: gate_up [..., 2 * size], gate first, to [..., size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def attend_dense(query: Tensor, keys: Stored, values: Stored, mask: Tensor | None, window: int | None) -> Tensor:
    """As `runtime.layers.attention.attend`; codes become dense in the dtype of the query, those of this layer only."""
    batch, tokens, heads, head_dim = query.shape
    kv_heads = keys.data.shape[1]
    if tokens == 1 and window is not None:
        keys, values = keys.last(window), values.last(window)
    key, value = keys.dense(query.dtype), values.dense(query.dtype)
    if tokens == 1:
        # The queries of one kv head become the rows of one product: nothing is repeated, nothing is masked.
        grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
        return functional.scaled_dot_product_attention(grouped, key, value).reshape(batch, 1, -1)
    attended = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv_heads
    )
    return attended.transpose(1, 2).reshape(batch, tokens, -1)
