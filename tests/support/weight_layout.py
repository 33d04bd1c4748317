"""Inverts the order in which the Triton kernels store weights: from repacked data to codes and scales."""

import torch
from torch import Tensor

from mycli.runtime.kernels.triton.product.weight_layout import Layout, layout_axes, layout_of
from mycli.runtime.quantization.scheme import Packing


def _from_fields(codes: Tensor, layout: Layout) -> Tensor:
    """Return codes [n chunk, k chunk, field row, k half, g, t, 8 fields] as [rows, K]."""
    sizes, order = layout_axes(layout)
    sizes = (codes.shape[0], *sizes[1:4], codes.shape[1], *sizes[5:])
    split = codes.reshape([sizes[axis] for axis in order])
    natural = split.permute([order.index(axis) for axis in range(len(order))])
    return natural.reshape(codes.shape[0] * layout.chunk_n, codes.shape[1] * layout.chunk_k)


def codes_from_layout(repacked: Tensor, packing: Packing, out_features: int, in_features: int) -> Tensor:
    """Invert `repack` and return codes uint8 [out_features, in_features]."""
    layout = layout_of(packing)
    chunks, k_chunks = repacked.shape[:2]
    words = repacked.view(chunks, k_chunks, layout.words, 8, 4, 8).to(torch.int32) & 0xFFFF
    shape = (chunks, k_chunks, len(layout.fields), len(layout.fields[0]), 8, 4, 8)
    codes = repacked.new_empty(shape, dtype=torch.uint8)
    for row, fields in enumerate(layout.fields):
        for half, (word, shift) in enumerate(fields):
            if word is None:
                bits = [(words[:, :, bit] >> shift & 1) << bit for bit in range(layout.words)]
                value = torch.stack(bits).sum(0)
            else:
                value = words[:, :, word] >> shift & ((1 << packing.bits) - 1)
            codes[:, :, row, half] = value.to(torch.uint8)
    return _from_fields(codes, layout)[:out_features, :in_features].contiguous()


def scales_from_layout(repacked: Tensor, dtype: torch.dtype, out_features: int, groups: int) -> Tensor:
    """Invert `repack_scales` and return [out_features, groups] in `dtype`."""
    if repacked.dtype == torch.int32:
        rows = repacked.view(dtype).view(repacked.shape[0], -1, 8, 2).transpose(2, 3)
        repacked = rows.reshape(repacked.shape[0], -1)
    return repacked[:groups, :out_features].t().contiguous()
