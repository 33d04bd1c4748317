"""Products in 8-bit floats (E4M3, arXiv 2209.05433), both operands with a scale per row."""

import torch
from torch import Tensor

from mycli.runtime.utils.dtypes import FP8_PIECE

E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(E4M3).max


def round_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [rows, K] to E4M3 codes [rows, K] and fp32 scales [rows, 1]: codes * scales is near x."""
    scales = x.abs().amax(dim=1, keepdim=True).float().div_(_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = torch.empty_like(x, dtype=E4M3)
    step = max(1, FP8_PIECE // x.shape[1])
    for first in range(0, len(x), step):
        piece = slice(first, first + step)
        # The division may round up to more than the largest number, which the conversion would make NaN.
        codes[piece] = (x[piece].float() / scales[piece]).clamp_(-_LARGEST, _LARGEST).to(E4M3)
    return codes, scales


class Fp8Weight:
    """A weight [N, K] in E4M3 with a scale per output, by which activations are multiplied in E4M3 too.

    N and K are multiples of 16. GPUs need compute capability 8.9; torch has a product for the CPU as well.
    """

    def __init__(self, weight: Tensor) -> None:
        self._codes, self._scales = round_to_fp8(weight)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = round_to_fp8(x)
        # Without use_fast_accum: Hopper's tensor cores add products of E4M3 in 14 bits, and this sums in fp32.
        return torch._scaled_mm(codes, self._codes.T, scales, self._scales.T, out_dtype=x.dtype)

    def dequantize(self) -> Tensor:
        return self._codes.float() * self._scales
