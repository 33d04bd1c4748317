"""Rotary position embeddings: the frequencies of each scaling rule, and tables of cosines and sines.

RoFormer (arXiv 2104.09864) with the half-split layout of Hugging Face checkpoints or the interleaved one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.kernels.registry import ROTATION
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import RopeScaling, RopeSpec


def frequencies(
    spec: RopeSpec, length: int, context: int, device: torch.device, precise: torch.dtype = torch.float32
) -> Tensor:
    """Return inverse frequencies fp32 [dim / 2].

    `length`: tokens of the sequence, for dynamic scaling; `context`: of the cache, for longrope. `precise`: the dtype
    of the powers before they are rounded to fp32.
    """
    scaling, dim, theta = spec.scaling, spec.dim, spec.theta
    # Dynamic NTK, as in transformers.
    if scaling.kind == "dynamic" and length > scaling.original_context and dim > 2:
        stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    if scaling.kind == "ntk":
        theta *= scaling.factor
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    powers = (theta ** exponents.to(precise)).float()
    inverse = 1.0 / powers
    if scaling.kind == "linear":  # position interpolation, arXiv 2306.15595
        return inverse / scaling.factor
    if scaling.kind == "ntk":  # of GTE: equation 6 of https://kexue.fm/archives/9706
        return inverse / math.pow(scaling.factor, 2 / dim)
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling)
    if scaling.kind == "yarn":
        return _yarn(inverse, scaling, theta, dim)
    if scaling.kind == "longrope":  # arXiv 2402.13753
        factors = scaling.long_factors if context > scaling.original_context else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * powers)
    if scaling.kind == "proportional":  # Gemma 4: rotates only the first pairs of a head
        rotated = int(scaling.partial_factor * dim // 2)
        return torch.cat((inverse[:rotated], torch.zeros_like(inverse[rotated:]))) / scaling.factor
    return inverse


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    # Llama 3.1: low frequencies are divided by the factor, high ones are not changed, those between are blended.
    wavelengths = 2 * math.pi / inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_context / wavelengths - low) / max(high - low, 1e-9)).clamp(0, 1)
    return (1 - smooth) * inverse / scaling.factor + smooth * inverse


def _yarn(inverse: Tensor, scaling: RopeScaling, theta: float, dim: int) -> Tensor:
    # YaRN (arXiv 2309.00071): dimensions with many rotations within the trained context are not changed, those with few
    # are interpolated, with a ramp between.

    def dimension(rotations: float) -> float:
        return dim * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32, device=inverse.device)
    ramp = ((index - low) / (high - low or 0.001)).clamp(0, 1)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines [tokens, dim / 2] of consecutive positions, and optionally a factor for queries [tokens]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    query_scale: Tensor | None = None

    def rows(self, start: int, count: int) -> "RopeTables":
        rows = slice(start, start + count)
        scale = None if self.query_scale is None else self.query_scale[rows]
        return RopeTables(self.cos[rows], self.sin[rows], self.interleaved, scale)


class Rope:
    """The rotary tables of all positions of a cache; computed once, except dynamic ones past the trained context.

    With longrope a cache longer than the trained context always uses the long factors.
    """

    # Choosing by the length of the sequence, as transformers does, would mix both factors: cached keys stay rotated.

    def __init__(
        self, config: ModelConfig, capacity: int, device: torch.device, dtype: torch.dtype, portable: bool = False
    ) -> None:
        """portable: the same bits on every CPU."""
        self.device = device
        self.portable = portable
        # Vectorized functions differ in the last bit from one instruction set to another. Of fp64 results the bits that
        # remain in fp32 are the same.
        self._precise = torch.float64 if portable else torch.float32
        self._dtype = dtype
        self._capacity = capacity
        self._tables = {spec: self._table(spec, self._length(spec)) for spec in config.distinct_ropes}
        self._fixed_length = min((self._length(spec) for spec in self._tables), default=capacity)

    def _length(self, spec: RopeSpec) -> int:
        dynamic = spec.scaling.kind == "dynamic"
        return min(self._capacity, spec.scaling.original_context) if dynamic else self._capacity

    def _table(self, spec: RopeSpec, length: int) -> RopeTables:
        positions = torch.arange(length, dtype=torch.float32, device=self.device)
        angles = positions.unsqueeze(1) * frequencies(spec, length, self._capacity, self.device, self._precise)
        scaling = spec.scaling
        angles = angles.to(self._precise)
        cos, sin = (part.float() * scaling.attention_factor for part in (angles.cos(), angles.sin()))
        sin = -sin if spec.clockwise else sin
        scale = None
        if scaling.query_beta:
            steps = torch.floor((positions + scaling.query_offset) / scaling.original_context)
            logs = torch.log((1 + steps).to(self._precise)).float()
            scale = (1 + scaling.query_beta * logs).to(self._dtype)
        return RopeTables(cos.to(self._dtype), sin.to(self._dtype), spec.interleaved, scale)

    @property
    def positions(self) -> int:
        return self._capacity

    def every(self, length: int) -> Mapping[RopeSpec, RopeTables] | None:
        """Return the tables of all positions; None if those of a sequence of `length` tokens depend on its length."""
        return None if length > self._fixed_length else self._tables

    def rows(self, chunks: Sequence[Chunk]) -> Mapping[RopeSpec, RopeTables]:
        return concatenated([self.tables(chunk.start, chunk.count) for chunk in chunks])

    def tables(self, start: int, count: int) -> Mapping[RopeSpec, RopeTables]:
        """Return the tables of positions start .. start + count - 1."""
        result = {}
        for spec, tables in self._tables.items():
            long = start + count > self._length(spec)
            result[spec] = (self._table(spec, start + count) if long else tables).rows(start, count)
        return result


def concatenated(parts: Sequence[Mapping[RopeSpec, RopeTables]]) -> Mapping[RopeSpec, RopeTables]:
    if len(parts) == 1:
        return parts[0]
    result = {}
    for spec, first in parts[0].items():
        tables = [part[spec] for part in parts]
        scales = [table.query_scale for table in tables if table.query_scale is not None]
        result[spec] = RopeTables(
            torch.cat([table.cos for table in tables]),
            torch.cat([table.sin for table in tables]),
            first.interleaved,
            torch.cat(scales) if scales else None,
        )
    return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first dim values of each head of x [batch, tokens, heads, head_dim] by tables [tokens, dim / 2].

    Pairs are (i, i + dim / 2), or (2i, 2i + 1) if `interleaved`, whose result is in half-split order.
    """
    # The order does not matter: queries and keys are both reordered, so their products are the same.
    return ROTATION(x, cos, sin, interleaved)
