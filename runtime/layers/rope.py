"""Rotary positions: the frequencies of each scaling rule, and the tables of cosines and sines a pass needs.

Follows RoFormer (arXiv 2104.09864) in the half-split layout of the Hugging Face checkpoints, position interpolation
(2306.15595), dynamic NTK, YaRN (2309.00071) and the rule of Llama 3.1. Does not know attention or caches.
"""

import math

import torch
from torch import Tensor

from mycli.runtime.kernels.registry import ROTATION
from mycli.runtime.models.config import ModelConfig, RopeScaling


def frequencies(config: ModelConfig, length: int, device: torch.device) -> Tensor:
    """Inverse frequencies fp32 [head_dim / 2] for a sequence of `length` tokens (dynamic scaling depends on it)."""
    scaling, dim, theta = config.rope, config.head_dim, config.rope_theta
    if scaling.kind == "dynamic" and length > scaling.original_context and dim > 2:
        stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    inverse = 1.0 / theta**exponents
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling)
    if scaling.kind == "yarn":
        return _yarn(inverse, scaling, theta, dim)
    return inverse


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / scaling.factor + smooth * inverse


def _yarn(inverse: Tensor, scaling: RopeScaling, theta: float, dim: int) -> Tensor:
    """A ramp over the dimensions, from kept (many rotations within the trained context) to interpolated (few)."""

    def dimension(rotations: float) -> float:
        return dim * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32, device=inverse.device)
    ramp = ((index - low) / (high - low or 0.001)).clamp(0, 1)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)


class Rope:
    """Tables for the positions of one cache: made once, except for dynamic scaling past the trained context."""

    def __init__(self, config: ModelConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._length = min(capacity, config.rope.original_context) if config.rope.kind == "dynamic" else capacity
        self._cos, self._sin = self._table(self._length)

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, dtype=torch.float32, device=self._device).unsqueeze(1)
        angles = angles * frequencies(self._config, length, self._device)
        factor = self._config.rope.attention_factor
        return (angles.cos() * factor).to(self._dtype), (angles.sin() * factor).to(self._dtype)

    def fixed(self, capacity: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [capacity or more, head_dim / 2] of all positions; None where they depend on the length."""
        return (self._cos, self._sin) if capacity <= self._length else None

    def tables(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [count, head_dim / 2] of positions start .. start + count - 1."""
        cos, sin = self._cos, self._sin
        if start + count > self._length:
            cos, sin = self._table(start + count)
        return cos[start : start + count], sin[start : start + count]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, tokens, heads, head_dim] turned by tables [tokens, head_dim / 2]; pairs are (i, i + head_dim / 2)."""
    return ROTATION(x, cos, sin)
