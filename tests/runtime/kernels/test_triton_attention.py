"""Test Triton paged attention against plain torch in the interpreter: grouped heads, windows, splits, int8, int4."""

from dataclasses import dataclass

import pytest
import torch

from mycli.runtime.cache.int4 import pack_int4, unpack_int4
from mycli.runtime.cache.kv_cache import Stored, quantize_vectors
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.kernels.reference_attention import attend_gathered
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.layers.attention import attention_mask
from mycli.runtime.quantization.scheme import Packing
from tests.support.random_tensors import normal, permutation
from tests.support.triton_interpreter import Interpret, backwards, interpret

pytest.importorskip("triton")

from mycli.runtime.kernels.triton.attention import (  # noqa: E402  (only where Triton is)
    BLOCK_K,
    decode_attention,
    splits,
    tokens_per_program,
)
from tests.support.triton_products import difference, numbers, product  # noqa: E402  (as above)

__all__ = ["interpret"]


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    tokens: int = 1
    window: int | None = None
    int8: bool = False
    int4: bool = False
    dtype: torch.dtype = torch.float16
    processors: int = 8
    packing: Packing = Packing(4, 128)
    block: int = 640  # cache block size, and the default for every sequence
    size: float = 1.0  # of values

    def __str__(self) -> str:
        options = f"-window{self.window}" * (self.window is not None) + "-int8" * self.int8
        options += f"-values{self.size:g}" * (self.size != 1.0)
        options += "-int4" * self.int4 + f"-blocks{self.block}" * (self.block < 640)
        into = f"-to-{self.packing.name}"
        shape = f"{self.heads}q{self.kv_heads}kv{self.head_dim}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{shape}-lengths{self.lengths}-tokens{self.tokens}{options}-{dtype}-on{self.processors}{into}"


def paged(tensor: torch.Tensor, block: int, table: torch.Tensor) -> torch.Tensor:
    """Cut [sequences, kv_heads, positions, ..] into cache blocks as `table` says; fill the rest with 0xFF or NaN."""
    sequences, heads, positions, *rest = tensor.shape
    empty = torch.nan if tensor.is_floating_point() else -1 if tensor.dtype == torch.int8 else 0xFF
    shape = (int(table.max()) + 2, heads, block, *rest)
    blocks = torch.full(shape, empty, dtype=tensor.dtype)
    cut = tensor.reshape(sequences, heads, positions // block, block, *rest).transpose(1, 2)
    blocks[table.long()] = cut
    return blocks


def shuffled(sequences: int, width: int) -> torch.Tensor:
    """Return a block table in shuffled order with an unused block in it."""
    order = permutation(sequences * width + 1, seed=3)
    return order[: sequences * width].reshape(sequences, width).to(torch.int32)


def filled(case: Case) -> tuple[LayerCache, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a cache with NaN or garbage in unwritten places, its block table, and its contents as fp32."""
    capacity = 640
    table = shuffled(len(case.lengths), capacity // case.block)
    shape = (2, len(case.lengths), case.kv_heads, capacity, case.head_dim)
    wide = normal(*shape)
    wide[1] *= case.size
    wide[1, :, :, 5] = 0  # its int8 scale is 0 too
    present = torch.arange(capacity) < torch.tensor(case.lengths)[:, None, None]
    if case.int8:
        codes, scales = quantize_vectors(wide)
        scales = torch.where(present, scales, torch.nan)
        wide = codes.float() * scales[..., None]
        parts = [paged(tensor, case.block, table) for tensor in (*codes, *scales)]
        return LayerCache(*parts), table, wide[0], wide[1]
    if case.int4:
        codes, scales = pack_int4(wide)
        scales = scales.masked_fill(~present[..., None], torch.nan)
        wide = unpack_int4(codes, scales, torch.float32)
        parts = [paged(tensor, case.block, table) for tensor in (*codes, *scales)]
        return LayerCache(*parts), table, wide[0], wide[1]
    stored = torch.where(present[..., None], wide, torch.nan).to(case.dtype)
    return LayerCache(*(paged(part, case.block, table) for part in stored)), table, *stored.float()


def attention(case: Case) -> float:
    cache, table, keys, values = filled(case)
    sequences, group = len(case.lengths), case.heads // case.kv_heads
    query = normal(sequences, case.tokens, case.heads, case.head_dim, seed=1).to(case.dtype)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    into = product(case.heads * case.head_dim, case.packing, case.processors)
    counters = torch.zeros(sequences * case.tokens * case.kv_heads, dtype=torch.int32)
    scoring = Scoring(query.shape[3] ** -0.5, case.window)
    first = numbers(decode_attention(query, cache, lengths, table, scoring, into, counters))
    with backwards():
        again = numbers(decode_attention(query, cache, lengths, table, scoring, into, counters))
    if counters.any() or not torch.equal(first, again):
        return float("inf")
    found, beyond = first.tensor_split([case.heads * case.head_dim], dim=1)
    if beyond.any():
        return float("inf")
    found = found.view(sequences, case.tokens, -1)
    worst = 0.0
    for sequence, length in enumerate(case.lengths):
        if not length:  # padding
            worst = max(worst, float(found[sequence].abs().max()))
            continue
        start = length - case.tokens
        seen = attention_mask(start, case.tokens, case.window, query.device)
        if seen is None:
            seen = torch.arange(length) <= torch.arange(start, length)[:, None]
            seen &= torch.arange(length) > torch.arange(start, length)[:, None] - (case.window or length + 1)
        k, v = (t[sequence, :, :length].repeat_interleave(group, 0) for t in (keys, values))
        score = query[sequence].float().transpose(0, 1) @ k.transpose(1, 2) * case.head_dim**-0.5
        weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
        worst = max(worst, difference(found[sequence], (weight @ v).transpose(0, 1).flatten(1)))
    return worst


@pytest.mark.parametrize(
    "case",
    [
        Case((1,)),
        Case((64, 65, 300)),
        Case((570,), heads=8, kv_heads=1, processors=64),
        Case((200,), heads=7, kv_heads=7, head_dim=80, packing=Packing(8, None)),
        Case((300, 7), tokens=4, heads=4, kv_heads=1),
        Case((300, 5), window=100),
        Case((64, 0, 65, 300), block=64, processors=64),
        Case((300, 0, 129), tokens=3, window=70, block=128, processors=64),
        Case((0, 130, 40), int8=True, block=64, processors=64),
        Case((0, 150), int4=True, tokens=20, heads=8, block=64, dtype=torch.bfloat16),
        Case((300,), window=64, tokens=3, processors=64),
        Case((130, 40), int8=True),
        Case((300,), int8=True, tokens=5, heads=8, window=150, dtype=torch.bfloat16),
        Case((130, 9), int8=True, dtype=torch.bfloat16, size=1e-9, processors=64),
        Case((130,), int8=True, dtype=torch.bfloat16, size=1e9),
        Case((300, 70), int4=True, processors=64),
        Case((150,), int4=True, tokens=5, heads=8, window=90, head_dim=128, dtype=torch.bfloat16),
        Case((100,), dtype=torch.bfloat16, head_dim=128, packing=Packing(4, 128)),
        Case((100,), head_dim=64, heads=6, kv_heads=3, packing=Packing(4, 128)),
        Case((100,), head_dim=80, heads=2, kv_heads=1, packing=Packing(4, 32)),
        Case((300, 9), heads=3, kv_heads=3, packing=Packing(4, None), processors=64),
        Case((70,), heads=2, kv_heads=2, tokens=12, packing=Packing(8, 64)),
        Case((90, 35), heads=16, kv_heads=2, tokens=17, window=50, packing=Packing(4, 64)),  # in three splits
        pytest.param(Case((400,), heads=4, kv_heads=1, tokens=64, int8=True), marks=pytest.mark.slow),
        pytest.param(Case((130, 67), heads=4, kv_heads=1, tokens=17, int4=True, head_dim=256), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attend(case: Case, interpret: Interpret) -> None:
    bound = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[case.dtype]
    assert interpret(attention, case) < bound  # type: ignore[operator]  # the pool carries any result


def test_splits_fill_the_chip_and_keep_whole_turns() -> None:
    h200 = Chip((9, 0), 132)
    assert splits(h200, 8, 8192) == 32 and splits(h200, 8 * 64, 8192) == 1
    for capacity in (1, 256, 4096, 1 << 17):
        assert 1 <= splits(h200, 8, capacity) <= max(1, capacity // (4 * BLOCK_K))


def test_refuses_what_the_kernels_take_for_granted() -> None:
    keys = torch.zeros((1, 2, 8, 64), dtype=torch.float16)
    scales = torch.zeros((1, 2, 8))
    for wrong in (
        lambda: LayerCache(keys, keys.transpose(2, 3).contiguous().transpose(2, 3)),
        lambda: LayerCache(keys.to(torch.int8), keys.to(torch.int8)),
        lambda: LayerCache(keys, keys, scales, scales),
        lambda: LayerCache(*[torch.zeros((1, 2, 8, 46), dtype=torch.uint8)] * 2),  # a head size of 80
        lambda: LayerCache(keys.to(torch.int8), keys.to(torch.int8), scales, scales[:, :, :4]),
    ):
        with pytest.raises(ValueError, match="cache"):
            wrong()
    lengths = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="more than 64"):
        wide = torch.zeros((1, 1, 130, 64))
        table = torch.zeros((1, 1), dtype=torch.int32)
        decode_attention(
            wide, LayerCache(keys, keys), lengths, table, Scoring(1.0), product(130 * 64, Packing(4, 32)), lengths
        )
    with pytest.raises(ValueError, match="no multiple of 64"):
        query, table = torch.zeros((1, 1, 2, 64)), torch.zeros((1, 2), dtype=torch.int32)
        decode_attention(
            query, LayerCache(keys, keys), lengths, table, Scoring(1.0), product(128, Packing(4, 32)), lengths
        )


def test_lots_of_tokens_are_as_few_and_as_even_as_columns_allow() -> None:
    assert [tokens_per_program(tokens, 4) for tokens in (1, 8, 16, 17, 33, 64)] == [1, 8, 16, 9, 11, 16]
    assert tokens_per_program(64, 1) == 64 and tokens_per_program(2, 64) == 1 and tokens_per_program(1, 65) == 0


@dataclass(frozen=True)
class Scored:
    """Runs attention with a custom scale, softcap, sinks, window or chunk and returns plain values."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    tokens: int = 1
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    kind: torch.dtype = torch.float16
    block: int = 64
    chunk: int | None = None

    def __str__(self) -> str:
        options = f"-window{self.window}" * (self.window is not None) + f"-cap{self.softcap}" * bool(self.softcap)
        options += f"-chunk{self.chunk}" * (self.chunk is not None)
        shape = f"{self.heads}q{self.kv_heads}kv{self.head_dim}"
        return f"{shape}-lengths{self.lengths}-tokens{self.tokens}{options}{'-sinks' * self.sinks}-{self.kind}"


def scored(case: Scored) -> float:
    from mycli.runtime.kernels.triton.attention import launch_paged_attention

    sequences, width = len(case.lengths), 320 // case.block
    table = shuffled(sequences, width)
    wide = normal(2, sequences, case.kv_heads, 320, case.head_dim)
    stored = [Stored.of(part.half(), case.kind) for part in wide]
    blocks = [
        Stored(*(None if part is None else paged(part, case.block, table) for part in (one.data, one.scales)))
        for one in stored
    ]
    query = 2 * normal(sequences * case.tokens, case.heads, case.head_dim, seed=1).half()
    sinks = 3 * normal(case.heads, seed=2) if case.sinks else None
    starts = torch.arange(0, (sequences + 1) * case.tokens, case.tokens, dtype=torch.int32)
    ragged = Ragged(starts, torch.tensor(case.lengths, dtype=torch.int32), table, case.tokens)
    scoring = Scoring(0.3, case.window, case.softcap, sinks, case.chunk)
    found = launch_paged_attention(query, *blocks, ragged, scoring, Chip((9, 0), 16))
    assert isinstance(found, torch.Tensor)
    keep = torch.tensor(case.lengths).repeat_interleave(case.tokens) > 0
    expected = attend_gathered(query, *blocks, ragged, scoring)
    assert not found[~keep].any()
    return difference(found[keep], expected[keep])


@pytest.mark.parametrize(
    "case",
    [
        Scored((130, 7), softcap=5.0),
        Scored((300, 0, 1), sinks=True, heads=6, kv_heads=2),
        Scored((200, 90), softcap=2.0, sinks=True, window=40, tokens=3, kind=torch.int8),
        Scored((150,), head_dim=80, heads=3, kv_heads=1, sinks=True, tokens=20, block=320),
        Scored((90, 64), head_dim=128, softcap=30.0, kind=torch.uint8),
        Scored((130, 7), head_dim=17, heads=3, kv_heads=1, tokens=4, window=50),
        Scored((300, 0, 131, 5), tokens=4, chunk=130, kind=torch.int8),
    ],
    ids=str,
)
def test_attend_with_softcap_and_sinks(case: Scored, interpret: Interpret) -> None:
    assert interpret(scored, case) < 4e-3  # type: ignore[operator]  # the pool carries any result
