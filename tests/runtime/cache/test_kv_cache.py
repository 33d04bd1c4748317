"""The cache against the obvious: lists that are cut and extended."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.cache.kv_cache import StaticCache, quantize_vectors
from mycli.runtime.errors import UsageError
from tests.support.prefix_model import CONFIG as TINY

CONFIG = replace(TINY, hidden_size=8, layers=2, heads=2, head_dim=4, intermediate_size=8, vocab_size=16)


@given(steps=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=12), seed=st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_writes_and_cuts(steps: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = StaticCache(CONFIG, 20, torch.device("cpu"), torch.float32, sequences=2)
    expected = torch.zeros(2, 2, 2, 1, 0, 4)
    for count, cut in steps:
        cut = min(cut, cache.length)
        cache.truncate(cut)
        expected = expected[..., :cut, :]
        if cut + count > cache.capacity:
            with pytest.raises(UsageError, match="context is full"):
                cache.write(0, cut, torch.zeros(2, 1, count, 4), torch.zeros(2, 1, count, 4))
            continue
        new = torch.randn(2, 2, 2, 1, count, 4, generator=generator)
        expected = torch.cat((expected, new), dim=-2)
        for layer in range(2):
            keys, values = cache.write(layer, cut, new[layer, 0], new[layer, 1])
            assert torch.equal(keys.data, expected[layer, 0])
            assert torch.equal(values.data, expected[layer, 1])
        cache.advance(count)
        assert cache.length == expected.shape[-2]


@given(
    pieces=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=8), seed=st.integers(0, 999)
)
@settings(max_examples=60, deadline=None)
def test_int8_written_in_pieces_and_over_equals_written_at_once(pieces: list[tuple[int, int]], seed: int) -> None:
    """Guesses that are refused, prefixes that are kept, batches: no trace of how the text came in."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(2, 2, 2, 1, 20, 4, generator=generator)
    wrong = 9 * torch.randn(2, 2, 2, 1, 20, 4, generator=generator)
    whole = StaticCache(CONFIG, 20, torch.device("cpu"), torch.int8, sequences=2)
    cache = StaticCache(CONFIG, 20, torch.device("cpu"), torch.int8, sequences=2)
    for count, guessed in [*pieces, (20, 0)]:
        start = cache.length
        for tokens, kept in ((wrong, 0), (text, count)):
            end = min(start + (guessed if tokens is wrong else count), 20)
            for layer in range(2):
                cache.write(layer, start, *tokens[layer, :, :, :, start:end])
            cache.advance(end - start)
            cache.truncate(min(start + kept, 20))
    for layer in range(2):
        for found, expected in zip(
            cache.write(layer, 20, *text[layer, :, :, :, :0]), whole.write(layer, 0, *text[layer]), strict=True
        ):
            assert found.scales is not None and expected.scales is not None
            assert torch.equal(found.data, expected.data) and torch.equal(found.scales, expected.scales)
    twice = StaticCache(CONFIG, 30, torch.device("cpu"), torch.int8, sequences=2)
    single = StaticCache(CONFIG, 20, torch.device("cpu"), torch.int8)
    for layer in range(2):
        single.write(layer, 0, *text[layer, :, :1])
    single.advance(20)
    twice.copy_from(single)
    keys, _ = twice.write(1, 20, *text[1, :, :, :, :0])
    assert torch.equal(
        keys.dense(torch.float32)[1], single.write(1, 20, *text[1, :, :1, :, :0])[0].dense(torch.float32)[0]
    )


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
    cache = StaticCache(CONFIG, 20, torch.device("cpu"), torch.bfloat16, sequences=3)
    assert cache.nbytes == 2 * CONFIG.layers * 3 * CONFIG.kv_heads * 20 * CONFIG.head_dim * 2
    cache = StaticCache(CONFIG, 20, torch.device("cpu"), torch.int8, sequences=3)
    assert cache.nbytes == 2 * CONFIG.layers * 3 * CONFIG.kv_heads * 20 * (CONFIG.head_dim + 4)


def test_cannot_be_cut_to_what_it_does_not_hold() -> None:
    with pytest.raises(ValueError, match="cannot cut"):
        StaticCache(CONFIG, 20, torch.device("cpu"), torch.float32).truncate(1)
