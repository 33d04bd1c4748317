"""Test the epilogues of Triton products against plain torch in the interpreter."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from mycli.runtime.cache.int4 import pack_int4
from mycli.runtime.layers.rope import rotate
from mycli.runtime.quantization.int4_vectors import int4_groups
from mycli.runtime.quantization.scheme import Packing
from tests.support.random_tensors import normal, permutation
from tests.support.triton_interpreter import Interpret, backwards, interpret

pytest.importorskip("triton")

from tests.support.triton_products import difference, numbers, product  # noqa: E402  (only where Triton is)

__all__ = ["interpret"]

# The interpreter truncates to bf16 where a GPU rounds, at each of a few steps.
TOLERANCE = {torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


@dataclass(frozen=True)
class Sum:
    """Describes a product of `k` columns added to a residual of `size`, and the norm for a product to `into`."""

    k: int
    size: int
    rows: int
    dtype: torch.dtype
    packing: Packing
    into: Packing | None

    def __str__(self) -> str:
        into = self.into.name if self.into else "nothing"
        return f"{self.k}x{self.size}-rows{self.rows}-{self.packing.name}-{self.dtype}-{into}".replace("torch.", "")


def summed(case: Sum) -> tuple[float, float, bool]:
    """Return errors of residual and next product, whether counters are zero and program order does not matter."""
    from mycli.runtime.kernels.triton.residual import Norm, add

    first = product(case.k, case.packing, 8, n=case.size)
    x = first.prepare(normal(case.rows, case.k).to(case.dtype))
    residual, gain = normal(case.rows, case.size, seed=3).to(case.dtype), normal(case.size, seed=1).to(case.dtype)
    following = None if case.into is None else product(case.size, case.into)
    norm = None if following is None else Norm(gain, 1e-3, following)
    parts = first.partial(x)
    assert len(parts) > 1 or case.k == 256
    expected = residual + parts.sum(0).to(case.dtype)
    counters, results = torch.zeros(64, dtype=torch.int32), []
    for order in (nullcontext, backwards):
        stream = residual.clone()
        with order():
            into = add(x, first, stream, norm, counters)
        result = stream
        if following is not None and into is not None:
            assert not numbers(into)[:, case.size :].any()
            result = following.multiply(into, torch.float32)
        results.append((stream, result))
    (stream, result), (again, result_again) = results
    normed = expected
    if following is not None:
        normed = functional.rms_norm(expected.double(), (case.size,), gain.double(), 1e-3)
        normed = normed @ following.dequantize().double().t()
    same = torch.equal(stream, again) and torch.equal(result, result_again) and not counters.any()
    return difference(stream, expected), difference(result, normed), same


@pytest.mark.parametrize(
    "case",
    [
        Sum(512, 256, 1, torch.bfloat16, Packing(4, 128), Packing(4, 128)),
        Sum(1024, 384, 3, torch.float16, Packing(4, 32), Packing(3, 64)),
        Sum(512, 200, 8, torch.float16, Packing(8, None), Packing(8, None)),
        Sum(512, 96, 2, torch.bfloat16, Packing(2, 64), Packing(4, 32)),
        Sum(512, 200, 2, torch.float16, Packing(4, 128), None),
        Sum(256, 192, 20, torch.float16, Packing(3, 64), Packing(4, 32)),  # two blocks, each computed in row groups
        pytest.param(Sum(2048, 256, 12, torch.bfloat16, Packing(8, 64), Packing(4, 128)), marks=pytest.mark.slow),
        pytest.param(Sum(2944, 96, 17, torch.float16, Packing(3, 64), None), marks=pytest.mark.slow),
        pytest.param(Sum(2304, 128, 33, torch.float16, Packing(8, 128), Packing(3, 128)), marks=pytest.mark.slow),
        pytest.param(Sum(4096, 128, 61, torch.bfloat16, Packing(8, 32), Packing(4, 32)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_add(case: Sum, interpret: Interpret) -> None:
    stream, normed, same = interpret(summed, case)  # type: ignore[misc]  # the pool carries any result
    assert stream < TOLERANCE[case.dtype] and normed < TOLERANCE[case.dtype] and same


def embedded(tokens: int) -> tuple[bool, float]:
    from mycli.runtime.kernels.triton.residual import Norm, embed

    embedding, drawn = normal(9, 200).half(), torch.tensor([(8 + 5 * index) % 9 for index in range(tokens)])
    gain, following = normal(200, seed=1).half(), product(200, Packing(4, None))
    stream, into = embed(drawn, embedding, Norm(gain, 1e-5, following))
    expected = functional.rms_norm(embedding[drawn].double(), (200,), gain.double(), 1e-5)
    expected = expected @ following.dequantize().double().t()
    return torch.equal(stream, embedding[drawn]), difference(following.multiply(into, torch.float32), expected)


@pytest.mark.parametrize("tokens", [3, 37])
def test_embed(tokens: int, interpret: Interpret) -> None:
    same, error = interpret(embedded, tokens)  # type: ignore[misc]  # the pool carries any result
    assert same and error < TOLERANCE[torch.float16]


def silu(size: int, rows: int, dtype: torch.dtype, packing: Packing, into: Packing) -> tuple[float, bool]:
    from mycli.runtime.kernels.triton.gated_silu import activate

    first, following = product(512, packing, 8, n=2 * size), product(size, into)
    wide = normal(rows, 512)
    wide *= 3 / (wide @ first.dequantize().float().t()).std()  # both sides of the bend of SiLU
    x = first.prepare(wide.to(dtype))
    counters = torch.zeros(64, dtype=torch.int32)
    found = numbers(activate(x, first, dtype, following, counters))
    with backwards():
        again = numbers(activate(x, first, dtype, following, counters))
    gate, up = first.partial(x).sum(0).chunk(2, dim=-1)
    beyond = float(found[:, size:].abs().sum())
    same = torch.equal(found, again) and not counters.any()
    return difference(found[:, :size], functional.silu(gate) * up) + beyond, same


@pytest.mark.parametrize(
    ("size", "rows", "dtype", "packing", "into"),
    [
        (256, 1, torch.bfloat16, Packing(4, 128), Packing(4, 128)),
        (320, 3, torch.float16, Packing(4, 64), Packing(4, 64)),  # a block has rows of gate and of up
        (40, 2, torch.float16, Packing(4, 64), Packing(3, None)),  # and both in one piece of them
        (160, 8, torch.float16, Packing(8, 32), Packing(2, 32)),
        (192, 19, torch.float16, Packing(3, 64), Packing(4, 64)),  # two blocks of rows
        pytest.param(256, 61, torch.bfloat16, Packing(4, 128), Packing(4, 128), marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, Packing) else str(value),
)
def test_activate(
    size: int, rows: int, dtype: torch.dtype, packing: Packing, into: Packing, interpret: Interpret
) -> None:
    error, same = interpret(silu, size, rows, dtype, packing, into)  # type: ignore[misc]  # any result
    assert error < TOLERANCE[dtype] and same


def refused(rows: int, counters: int) -> str:
    from mycli.runtime.kernels.triton.gated_silu import activate

    first, following = product(128, Packing(4, 128), n=1024), product(512, Packing(4, 128))
    try:
        activate(first.activation(rows), first, torch.float16, following, torch.zeros(counters, dtype=torch.int32))
    except ValueError as error:
        return str(error)
    return ""


def test_refuses_too_few_counters(interpret: Interpret) -> None:
    assert "1 rows" in str(interpret(refused, 1, 1))


@dataclass(frozen=True)
class Rotation:
    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]  # after the new tokens
    tokens: int = 1
    bias: bool = False
    norm: bool = False
    int8: bool = False
    int4: bool = False
    dtype: torch.dtype = torch.float16
    block: int = 24  # size of a cache block; that of every sequence by default

    def __str__(self) -> str:
        options = "".join(f"-{name}" for name in ("bias", "norm", "int8", "int4") if getattr(self, name))
        options += f"-blocks{self.block}" * (self.block < 24)
        shape = f"{self.heads}q{self.kv_heads}kv{self.head_dim}"
        return f"{shape}-lengths{self.lengths}-tokens{self.tokens}{options}-{self.dtype}"


def rotation(case: Rotation) -> tuple[float, float, float, bool]:
    """Return errors of queries, keys and values, and whether the rest of the cache is unchanged.

    A length of 0 is a padding sequence. Cache blocks are in shuffled order, and one is unused.
    """
    from mycli.runtime.kernels.triton import rope
    from mycli.runtime.kernels.triton.layer_cache import LayerCache
    from mycli.runtime.kernels.triton.rope import Projection, project

    (sequences, capacity), dim, new = (len(case.lengths), 24), case.head_dim, case.tokens
    width = (case.heads + 2 * case.kv_heads) * dim
    k = 1024 if sequences * new <= 8 else 256
    qkv = product(k, Packing(4 if k == 1024 else 3, 64), 8, n=width)
    wide = normal(sequences * new, k)
    x = qkv.prepare((wide / (wide @ qkv.dequantize().float().t()).std()).to(case.dtype))
    parts = qkv.partial(x)
    bias = normal(width, seed=1).to(case.dtype) if case.bias else None
    gains = [normal(dim, seed=seed).to(case.dtype) if case.norm else None for seed in (2, 3)]
    angles = normal(capacity, dim // 2, seed=4)
    cos, sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
    kind = torch.int8 if case.int8 else torch.uint8 if case.int4 else case.dtype
    pages = capacity // case.block
    order = permutation(sequences * pages + 1, seed=5)
    table = order[: sequences * pages].reshape(sequences, pages).to(torch.int32)
    places = 2, len(order), case.kv_heads, case.block
    blocks = torch.full((*places, dim // 2 if case.int4 else dim), 7, dtype=kind)
    factors = torch.full((*places, int4_groups(dim)), 7, dtype=torch.bfloat16) if case.int4 else torch.zeros(places)
    cache = LayerCache(blocks[0], blocks[1], *(factors if case.int8 or case.int4 else (None, None)))
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    projection = Projection(case.heads, bias, *gains, eps=1e-6)
    counters = torch.zeros(64, dtype=torch.int32)
    with backwards():
        again = project(x, qkv, projection, rope.Rotation(cos, sin), lengths, table, cache, case.dtype, counters)
    query = project(x, qkv, projection, rope.Rotation(cos, sin), lengths, table, cache, case.dtype, counters)
    kept_blocks = torch.zeros((2, *blocks.shape[1:-1], dim), dtype=case.dtype)
    if case.int4:
        dense_cache = LayerCache(kept_blocks[0], kept_blocks[1])
        project(x, qkv, projection, rope.Rotation(cos, sin), lengths, table, dense_cache, case.dtype, counters)
    nobody = blocks[:, order[-1]]

    def contiguous(paged: torch.Tensor) -> torch.Tensor:
        return paged[:, table.long()].transpose(2, 3).flatten(3, 4)

    layers, scales, dense = contiguous(blocks), contiguous(factors), contiguous(kept_blocks)
    assert not counters.any() and (len(parts) > 1 or k == 256) and torch.equal(query, again)

    wide = parts.sum(0) + (0 if bias is None else bias.float())
    split = wide.view(sequences, new, -1, dim).split([case.heads, case.kv_heads, case.kv_heads], dim=2)
    q, k, v = (
        part if gain is None else functional.rms_norm(part, (dim,), gain.float(), 1e-6)
        for part, gain in zip(split, (*gains, None), strict=True)
    )
    errors, kept = [0.0, 0.0, 0.0], torch.ones((sequences, capacity), dtype=torch.bool)
    for sequence, length in enumerate(case.lengths):
        if not length:
            continue
        at = slice(length - new, length)
        kept[sequence, at] = False
        table = cos[at].float(), sin[at].float()
        stored = [layers[i, sequence, :, at].float() for i in range(2)]
        if case.int4:
            for i in range(2):
                packed, twin = (layers[i, sequence, :, at], scales[i, sequence, :, at]), dense[i, sequence, :, at]
                assert all(map(torch.equal, packed, pack_int4(twin))), "bit by bit what the twin packs"
            stored = [dense[i, sequence, :, at].float() for i in range(2)]
        if case.int8:
            stored = [s * scale[sequence, :, at, None] for s, scale in zip(stored, scales, strict=True)]
        pairs = (
            (query[sequence], rotate(q[sequence, None], *table)[0]),
            (stored[0], rotate(k[sequence, None], *table)[0].transpose(0, 1)),
            (stored[1], v[sequence].transpose(0, 1)),
        )
        errors = [max(error, difference(*pair)) for error, pair in zip(errors, pairs, strict=True)]
    untouched = layers.transpose(2, 3)[:, kept]
    if case.int4:
        assert (scales.transpose(2, 3)[:, kept] == 7).all() and (factors[:, order[-1]] == 7).all()
    return (*errors, bool((untouched == 7).all() and (nobody == 7).all()))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Rotation(4, 2, 64, (5,)), marks=pytest.mark.slow),  # the other cases cover this and more
        Rotation(4, 4, 32, (9, 3), tokens=3, bias=True),
        pytest.param(Rotation(2, 1, 128, (24, 1), norm=True, dtype=torch.bfloat16), marks=pytest.mark.slow),
        Rotation(3, 1, 80, (4,), tokens=2, int8=True),
        Rotation(3, 1, 64, (9, 4), tokens=3, int4=True),
        Rotation(2, 1, 64, (9, 0, 19, 4), tokens=3, int8=True, block=8),
        pytest.param(Rotation(2, 2, 128, (7,), norm=True, int4=True, dtype=torch.bfloat16), marks=pytest.mark.slow),
        pytest.param(Rotation(2, 1, 256, (24, 20), tokens=6, int4=True), marks=pytest.mark.slow),
        Rotation(2, 1, 64, (24, 9, 20), tokens=6, norm=True),  # two blocks of rows
        pytest.param(Rotation(2, 1, 64, (24, 23, 20), tokens=18, int8=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_project(case: Rotation, interpret: Interpret) -> None:
    *errors, untouched = interpret(rotation, case)  # type: ignore[misc]  # the pool carries any result
    query, keys, values = errors
    stored = 1e-2 if case.int8 else TOLERANCE[case.dtype]
    assert query < TOLERANCE[case.dtype] and keys < stored and values < stored and untouched
