"""Test the KV cache against lists that are extended and truncated."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import PACKED, KVCache, Stored, quantize_vectors
from mycli.runtime.errors import ModelError
from tests.support.prefix_model import CONFIG as TINY

CONFIG = replace(TINY, hidden_size=32, layers=2, heads=2, head_dim=16, intermediate_size=8, vocab_size=16)


CPU = torch.device("cpu")
LAYERS, VECTOR = 2, (1, 16)
KINDS = {"fp32": torch.float32, "int8": torch.int8, "int4": PACKED}


def make(kind: torch.dtype, blocks: int, block_size: int) -> KVCache:
    return KVCache(CONFIG, blocks, block_size, CPU, kind)


def write(cache: KVCache, parts: list[tuple[int, tuple[int, ...], torch.Tensor]]) -> None:
    """Write each sequence's (start, blocks, values [layers, 2, tokens, kv_heads, head_dim]) in one pass."""
    count = [values.shape[2] for *_, values in parts]
    chunks = [Chunk([0] * n, start, blocks, 0) for n, (start, blocks, _) in zip(count, parts, strict=True)]
    batch = Batch.of(chunks, cache.block_size, CPU)
    values = torch.cat([one for *_, one in parts], dim=2)
    for layer in range(LAYERS):
        cache.write(layer, batch, *(Stored.of(one, cache.dtype) for one in values[layer]))


@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 20)), min_size=1, max_size=3),
        max_size=8,
    ),
    block_size=st.sampled_from([1, 3, 4, 20]),
    kind=st.sampled_from(list(KINDS.values())),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_any_writes_and_cuts_of_sequences_in_any_blocks(
    steps: list[list[tuple[int, int, int]]], block_size: int, kind: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    needed = -(-20 // block_size)
    cache = make(kind, 3 * needed, block_size)
    order = torch.randperm(3 * needed, generator=generator).tolist()
    blocks = [tuple(order[index * needed : (index + 1) * needed]) for index in range(3)]
    texts = [torch.zeros(LAYERS, 2, 0, *VECTOR) for _ in range(3)]
    for step in steps:
        parts = []
        for index, count, cut in {one[0]: one for one in step}.values():
            start = min(cut, texts[index].shape[2], 20 - count)
            new = torch.randn(LAYERS, 2, count, *VECTOR, generator=generator)
            texts[index] = torch.cat((texts[index][:, :, :start], new), dim=2)
            parts.append((start, blocks[index], new))
        write(cache, parts)
    for text, table in zip(texts, blocks, strict=True):
        length = text.shape[2]
        for layer in range(LAYERS):
            for stored, expected in zip(cache.read(layer, table, length), text[layer].transpose(1, 2), strict=True):
                assert stored.data.shape[:3] == (1, *expected.shape[:2])
                in_one_pass = Stored.of(expected, kind)
                assert torch.equal(stored.data[0], in_one_pass.data), "no trace of how the text came in"
                assert (stored.scales is None) == (in_one_pass.scales is None)
                assert stored.scales is None or torch.equal(stored.scales[0], torch.as_tensor(in_one_pass.scales))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_copied_block_is_what_its_source_was(kind: torch.dtype) -> None:
    cache, text = make(kind, 3, 4), torch.randn(LAYERS, 2, 4, *VECTOR)
    write(cache, [(0, (0,), text)])
    cache.copy(0, 2)
    write(cache, [(0, (0,), torch.zeros_like(text))])
    for layer in range(LAYERS):
        for stored, expected in zip(cache.read(layer, (2,), 4), text[layer].transpose(1, 2), strict=True):
            away = 0.4 if kind == PACKED else 0.05
            torch.testing.assert_close(stored.dense(torch.float32)[0], expected, atol=away, rtol=0)
        assert not cache.read(layer, (0,), 4)[0].dense(torch.float32).any()


@given(seed=st.integers(0, 999), magnitude=st.sampled_from([1e-30, 1e-6, 1.0, 1e4, 1e30]))
@settings(max_examples=40, deadline=None)
def test_codes_are_within_half_a_step(seed: int, magnitude: float) -> None:
    values = magnitude * torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(seed))
    values[0, 0] = 0
    codes, scales = quantize_vectors(values)
    assert codes.shape == values.shape and codes.dtype == torch.int8 and scales.shape == (3, 5)
    assert int(codes.min()) >= -127
    assert ((codes * scales.unsqueeze(-1) - values).abs() <= 0.5001 * scales.unsqueeze(-1)).all()
    torch.testing.assert_close(scales * 127, values.abs().amax(-1))


def test_what_is_not_finite_is_not_hidden_by_rounding() -> None:
    values = torch.ones(3, 4)
    values[0, 1], values[1, 2] = torch.nan, torch.inf
    codes, scales = quantize_vectors(values)
    assert (codes * scales.unsqueeze(-1)).isnan().all(1).tolist() == [True, True, False]


def test_memory_is_taken_once_and_is_what_it_says() -> None:
    assert make(torch.bfloat16, 3, 20).nbytes == 2 * CONFIG.layers * 3 * CONFIG.kv_heads * 20 * CONFIG.head_dim * 2
    assert make(torch.int8, 12, 5).nbytes == 2 * CONFIG.layers * 60 * CONFIG.kv_heads * (CONFIG.head_dim + 4)
    assert make(PACKED, 12, 5).nbytes == 2 * CONFIG.layers * 60 * CONFIG.kv_heads * (CONFIG.head_dim // 2 + 2)


def test_heads_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ModelError, match="this model has 12"):
        KVCache(replace(CONFIG, head_dim=12), 1, 4, CPU, PACKED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_the_last_positions_are_cut_with_their_scales(dtype: torch.dtype) -> None:
    stored = Stored.of(torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0)), dtype)
    dense = stored.dense(torch.float32)
    last = stored.last(2)
    assert torch.equal(last.dense(torch.float32), dense[:, :, 4:])
    whole = last.contiguous()
    assert torch.equal(whole.dense(torch.float32), dense[:, :, 4:]) and whole.data.is_contiguous()
    assert (whole.scales is None) == (dtype == torch.float32)
