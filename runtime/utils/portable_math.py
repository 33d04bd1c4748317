"""Functions and sums with the same bits on every processor; those of torch depend on the length of its vectors."""

import math
from collections.abc import Iterable
from decimal import Decimal

import torch
from torch import Tensor

# All is made of products, sums, quotients and roundings of fp64, which are rounded once wherever torch runs.
_LOG2 = math.log2(math.e)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # ln 2; the first has 32 bits
_TERMS = 13  # of the series of e^x, up to x = ln 2 / 2: the next is below 2^-58
_LEAST = -700.0  # e^x is 0 below, instead of a number too small for its exponent


def exponential(x: Tensor) -> Tensor:
    """e^x of fp64 x <= 0, 0 below -700."""
    bounded = x.clamp(min=_LEAST)
    power = (bounded * _LOG2).round()
    rest = (bounded - power * _LN2_HIGH) - power * _LN2_LOW
    value = torch.full_like(rest, 1 / math.factorial(_TERMS))
    for term in range(_TERMS - 1, -1, -1):
        value = value * rest + 1 / math.factorial(term)
    scale = ((power.to(torch.int64) + 1023) << 52).view(torch.float64)
    return torch.where(x < _LEAST, 0.0, value * scale)


def tangent(x: Tensor) -> Tensor:
    rest = exponential(-2 * x.abs())
    return ((1 - rest) / (1 + rest)).copysign(x)


def total(values: Tensor) -> Tensor:
    """The sum over the last dimension, halves added to each other."""
    width = 1 << max(0, values.shape[-1] - 1).bit_length()
    values = torch.nn.functional.pad(values, (0, width - values.shape[-1]))
    while width > 1:
        width //= 2
        values = values[..., :width] + values[..., width:]
    return values[..., 0]


def log_softmax(logits: Tensor) -> Tensor:
    """fp32 log-probabilities [rows, vocabulary] of fp32 logits."""
    shifted = logits.double() - logits.max(dim=1, keepdim=True).values.double()
    logs = [float(Decimal(share).ln()) for share in total(exponential(shifted)).tolist()]
    return (shifted - torch.tensor(logs, dtype=torch.float64)[:, None]).float()


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def exp_of(value: float) -> float:
    return float(Decimal(value).exp())
