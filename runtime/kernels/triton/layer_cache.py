"""The KV cache of one layer as kernels read it: tensors whose shapes and strides are checked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS, int4_head_dim


@dataclass(frozen=True)
class LayerCache:
    """Keys and values [blocks, kv_heads, block_size, head_dim].

    int8: fp32 scales [.., block_size], x = code * scale. int4: the last axis is the bytes of int4 vectors
    (`runtime.cache.int4`), uint8. The last two axes are contiguous; keys and values have equal strides.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        block_size, last = self.keys.shape[2:]
        if self.keys.stride() != self.values.stride() or self.keys.stride()[2:] != (last, 1):
            raise ValueError(f"cache strides of keys {self.keys.stride()} and values {self.values.stride()} do not fit")
        if (self.keys.dtype is torch.int8) != (self.key_scales is not None and self.value_scales is not None):
            raise ValueError("scales are required for an int8 cache and for no other")
        if self.int4 and self.head_dim not in FUSED_INT4_HEADS:
            raise ValueError(f"no int4 cache for a head_dim of {self.head_dim}")
        for scales in (self.key_scales, self.value_scales):
            if scales is not None and (scales.shape != self.keys.shape[:3] or not scales.is_contiguous()):
                raise ValueError(f"cache scales {tuple(scales.shape)} for blocks of {block_size}")

    @property
    def int4(self) -> bool:
        return self.keys.dtype is torch.uint8

    @property
    def head_dim(self) -> int:
        return int4_head_dim(self.keys.shape[3]) if self.int4 else self.keys.shape[3]

    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the scales of keys and values; for int4 the cache itself as bf16: scales are among the codes."""
        if self.int4:
            return self.keys.view(torch.bfloat16), self.values.view(torch.bfloat16)
        return self.key_scales, self.value_scales
