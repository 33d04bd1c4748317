"""The KV cache of one layer as kernels read it: tensors whose shapes and strides are checked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS, int4_groups


@dataclass(frozen=True)
class LayerCache:
    """Keys and values [blocks, kv_heads, block_size, head_dim].

    int8: fp32 scales [.., block_size], x = code * scale. int4 (`runtime.cache.int4`): codes uint8 [.., head_dim / 2],
    scales bf16 [.., block_size, groups]. The last two axes are contiguous; keys and values have equal strides.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        last = self.keys.shape[3]
        if self.keys.stride() != self.values.stride() or self.keys.stride()[2:] != (last, 1):
            raise ValueError(f"cache strides of keys {self.keys.stride()} and values {self.values.stride()} do not fit")
        quantized = self.keys.dtype in (torch.int8, torch.uint8)
        if quantized != (self.key_scales is not None and self.value_scales is not None):
            raise ValueError("scales are required for an int8 or int4 cache and for no other")
        if self.int4 and self.head_dim not in FUSED_INT4_HEADS:
            raise ValueError(f"no int4 cache for a head_dim of {self.head_dim}")
        expected = *self.keys.shape[:3], *((int4_groups(self.head_dim),) if self.int4 else ())
        for scales in (self.key_scales, self.value_scales):
            if scales is not None and (scales.shape != expected or not scales.is_contiguous()):
                raise ValueError(f"cache scales {tuple(scales.shape)} instead of {expected}")

    @property
    def int4(self) -> bool:
        return self.keys.dtype is torch.uint8

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3] * (2 if self.int4 else 1)
