"""One layer's cache as kernels reach it: tensors whose shapes and strides are checked. Knows no kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS, int4_head_dim


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache, [sequences, kv_heads, capacity, head_dim]; int8 with scales fp32 [.., capacity] per token.

    Of int4 vectors (`runtime.cache.int4`) the last axis is bytes, uint8. The last two axes are contiguous, keys and
    values lie alike; x = code * scale.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        capacity, last = self.keys.shape[2:]
        if self.keys.stride() != self.values.stride() or self.keys.stride()[2:] != (last, 1):
            raise ValueError(f"cache strides {self.keys.stride()} and {self.values.stride()}")
        if (self.keys.dtype is torch.int8) != (self.key_scales is not None and self.value_scales is not None):
            raise ValueError("an int8 cache, and no other, has scales")
        if self.int4 and self.head_dim not in FUSED_INT4_HEADS:
            raise ValueError(f"an int4 cache of heads of {self.head_dim}")
        for scales in (self.key_scales, self.value_scales):
            if scales is not None and (scales.shape != self.keys.shape[:3] or not scales.is_contiguous()):
                raise ValueError(f"cache scales {tuple(scales.shape)} for a capacity of {capacity}")

    @property
    def int4(self) -> bool:
        """Whether it holds int4 vectors."""
        return self.keys.dtype is torch.uint8

    @property
    def head_dim(self) -> int:
        """Numbers of a vector."""
        return int4_head_dim(self.keys.shape[3]) if self.int4 else self.keys.shape[3]

    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and of values, as kernels reach them: those of int4 vectors lie among their bytes."""
        if self.int4:
            return self.keys.view(torch.bfloat16), self.values.view(torch.bfloat16)
        return self.key_scales, self.value_scales
