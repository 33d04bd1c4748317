"""The small fused steps against plain torch, in the interpreter."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.kernels.triton_tiles import Chip
from mycli.runtime.packing import Packing
from mycli.runtime.rope import rotate
from tests.test_triton_shuffle import weight
from tests.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

from mycli.runtime.kernels.triton_packed import Activation, TritonMatmul  # noqa: E402  (only where Triton is)

__all__ = ["interpret"]

# The interpreter cuts bf16 off where a GPU rounds, at each of a few steps.
TOLERANCE = {torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


def product(k: int, packing: Packing, processors: int = 1) -> TritonMatmul:
    return TritonMatmul(weight(packing, 16, k, 0), Chip((9, 0), processors))


def numbers(activation: Activation) -> Tensor:
    """What an operand stands for, [rows, K'], fp32; checks the sums that go with it."""
    rows, tiles = activation.values.shape[0], activation.tiles
    scaled = activation.values.float().view(rows, tiles, -1) * activation.sums[:, :rows, 0].t().unsqueeze(-1)
    torch.testing.assert_close(scaled.sum(-1).t(), activation.sums[:, :rows, 1], rtol=1e-4, atol=1e-4)
    flat = scaled.view(rows, -1)
    if activation.tile.permuted:  # (k half, t, pair of pairs, pair) -> (t, pair of pairs, k half, pair)
        flat = flat.view(rows, -1, 2, 4, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(rows, -1)
    return flat


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Norm:
    size: int
    rows: int
    parts: int
    dtype: torch.dtype
    packing: Packing | None

    def __str__(self) -> str:
        into = self.packing.name if self.packing else "plain"
        return f"{self.size}-rows{self.rows}-parts{self.parts}-{self.dtype}-{into}".replace("torch.", "")


def norm(case: Norm) -> tuple[float, float, float]:
    from mycli.runtime.kernels.triton_decode import add_norm

    residual, gain = normal(case.rows, case.size).to(case.dtype), normal(case.size, seed=1).to(case.dtype)
    parts = normal(case.parts, case.rows, case.size, seed=2) if case.parts else None
    into = None if case.packing is None else product(case.size, case.packing)
    stream, result = add_norm(parts, residual, gain, 1e-5, into)
    expected = residual if parts is None else residual + parts.sum(0).to(case.dtype)
    found = numbers(result) if isinstance(result, Activation) else result
    normed = functional.rms_norm(expected.float(), (case.size,), gain.float(), 1e-5)
    beyond = float(found[:, case.size :].abs().sum())
    return difference(stream, expected), difference(found[:, : case.size], normed), beyond


@pytest.mark.parametrize(
    "case",
    [
        Norm(256, 1, 0, torch.bfloat16, None),
        Norm(200, 3, 2, torch.float16, None),
        Norm(384, 2, 3, torch.bfloat16, Packing(4, 128)),
        Norm(200, 2, 1, torch.float16, Packing(8, None)),
        Norm(128, 12, 1, torch.float16, Packing(4, 32)),
    ],
    ids=str,
)
def test_add_norm(case: Norm, interpret: Interpret) -> None:
    stream, normed, beyond = interpret(norm, case)  # type: ignore[misc]  # the pool carries any result
    assert stream < TOLERANCE[case.dtype] and normed < TOLERANCE[case.dtype] and beyond == 0


def silu(size: int, rows: int, count: int, dtype: torch.dtype, packing: Packing) -> float:
    from mycli.runtime.kernels.triton_decode import silu_multiply

    parts = normal(count, rows, 2 * size) * 3
    gate, up = parts.sum(0).chunk(2, dim=-1)
    found = numbers(silu_multiply(parts, dtype, product(size, packing)))
    return difference(found[:, :size], functional.silu(gate) * up) + float(found[:, size:].abs().sum())


@pytest.mark.parametrize(
    ("size", "rows", "count", "dtype", "packing"),
    [
        (256, 1, 4, torch.bfloat16, Packing(4, 128)),
        (704, 3, 1, torch.float16, Packing(4, 64)),
        (200, 2, 2, torch.float16, Packing(3, None)),
        (128, 10, 2, torch.float16, Packing(2, 64)),
    ],
    ids=lambda value: value.name if isinstance(value, Packing) else str(value),
)
def test_silu_multiply(
    size: int, rows: int, count: int, dtype: torch.dtype, packing: Packing, interpret: Interpret
) -> None:
    assert interpret(silu, size, rows, count, dtype, packing) < TOLERANCE[dtype]  # type: ignore[operator]  # any result


@dataclass(frozen=True)
class Rotation:
    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]  # after the new tokens
    tokens: int = 1
    count: int = 1
    bias: bool = False
    norm: bool = False
    int8: bool = False
    dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        options = "".join(f"-{name}" for name in ("bias", "norm", "int8") if getattr(self, name))
        shape = f"{self.heads}q{self.kv_heads}kv{self.head_dim}"
        return f"{shape}-lengths{self.lengths}-tokens{self.tokens}-parts{self.count}{options}-{self.dtype}"


def rotation(case: Rotation) -> tuple[float, float, float, bool]:
    """Errors of queries, keys and values; whether nothing else of the cache was touched."""
    from mycli.runtime.kernels.triton_decode import LayerCache, Projection, rotate_and_store

    (sequences, capacity), dim, new = (len(case.lengths), 24), case.head_dim, case.tokens
    width = (case.heads + 2 * case.kv_heads) * dim
    parts = normal(case.count, sequences * new, width)
    bias = normal(width, seed=1).to(case.dtype) if case.bias else None
    gains = [normal(dim, seed=seed).to(case.dtype) if case.norm else None for seed in (2, 3)]
    angles = normal(capacity, dim // 2, seed=4)
    cos, sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
    layers = torch.zeros((2, sequences, case.kv_heads, capacity, dim), dtype=torch.int8 if case.int8 else case.dtype)
    layers += 7
    scales = [torch.zeros((sequences, case.kv_heads, capacity)) if case.int8 else None for _ in range(2)]
    cache = LayerCache(layers[0], layers[1], *scales)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    projection = Projection(case.heads, bias, *gains, 1e-6)
    query = rotate_and_store(parts, projection, cos, sin, lengths, cache, case.dtype)

    wide = parts.sum(0) + (0 if bias is None else bias.float())
    split = wide.view(sequences, new, -1, dim).split([case.heads, case.kv_heads, case.kv_heads], dim=2)
    q, k, v = (
        part if gain is None else functional.rms_norm(part, (dim,), gain.float(), 1e-6)
        for part, gain in zip(split, (*gains, None), strict=True)
    )
    errors, kept = [0.0, 0.0, 0.0], torch.ones((sequences, capacity), dtype=torch.bool)
    for sequence, length in enumerate(case.lengths):
        at = slice(length - new, length)
        kept[sequence, at] = False
        table = cos[at].float(), sin[at].float()
        stored = [layers[i, sequence, :, at].float() for i in range(2)]
        if case.int8:
            stored = [
                s * scale[sequence, :, at, None] for s, scale in zip(stored, scales, strict=True) if scale is not None
            ]
        pairs = (
            (query[sequence], rotate(q[sequence, None], *table)[0]),
            (stored[0], rotate(k[sequence, None], *table)[0].transpose(0, 1)),
            (stored[1], v[sequence].transpose(0, 1)),
        )
        errors = [max(error, difference(*pair)) for error, pair in zip(errors, pairs, strict=True)]
    untouched = layers.transpose(2, 3)[:, kept]
    return (*errors, bool((untouched == 7).all()))


@pytest.mark.parametrize(
    "case",
    [
        Rotation(4, 2, 64, (5,)),
        Rotation(4, 4, 32, (9, 3), tokens=3, count=3, bias=True),
        Rotation(2, 1, 128, (24, 1), norm=True, dtype=torch.bfloat16),
        Rotation(3, 1, 80, (4,), tokens=2, count=2, int8=True),
    ],
    ids=str,
)
def test_rotate_and_store(case: Rotation, interpret: Interpret) -> None:
    *errors, untouched = interpret(rotation, case)  # type: ignore[misc]  # the pool carries any result
    query, keys, values = errors
    stored = 1e-2 if case.int8 else TOLERANCE[case.dtype]
    assert query < TOLERANCE[case.dtype] and keys < stored and values < stored and untouched
