"""Values of the codes of packed weights: signed integers, or entries of tables of 16 or 256 values."""

import torch
from torch import Tensor

from mycli.runtime.quantization.scheme import INTEGER_TABLES, Packing

# E4M3, E5M2 and E2M1 follow OCP's "8-bit Floating Point Specification" and "Microscaling Formats", NF4 is QLoRA's
# (arXiv 2305.14314), FP4 is bitsandbytes', which has an order of its own.

# Quantiles of a normal distribution, as published with QLoRA; every value is exact in fp32.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the sign is the fourth bit, here and below
_FP4 = tuple(value / 12.0 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def code_table(packing: Packing) -> Tensor:
    """Return the value of every code, fp32 [2^bits]; some codes of 8-bit floats are NaN."""
    if packing.codes == "int":
        return torch.arange(1 << packing.bits, dtype=torch.float32) - (1 << (packing.bits - 1))
    if packing.codes in _FLOAT8:
        return torch.arange(256, dtype=torch.uint8).view(_FLOAT8[packing.codes]).float()
    if packing.codes == "nf4":
        return torch.tensor(_NF4)
    if packing.codes in INTEGER_TABLES:
        values = torch.tensor(INTEGER_TABLES[packing.codes], dtype=torch.float32)
        return values.repeat((1 << packing.bits) // len(values))  # a GPU's codes of 4 bits may be of a table of 8
    positive = torch.tensor(_E2M1 if packing.codes == "e2m1" else _FP4)
    return torch.cat([positive, -positive])


def code_values(codes: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Return the values of codes uint8 [N, K] in `dtype`, exact if it can represent them."""
    if packing.codes == "int":
        return codes.to(dtype) - (1 << (packing.bits - 1))
    if packing.codes in _FLOAT8:
        return codes.view(_FLOAT8[packing.codes]).to(dtype)
    return code_table(packing).to(codes.device, dtype)[codes.int()]
