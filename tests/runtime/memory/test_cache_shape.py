"""Test the size of a KV cache, in which layers with a sliding window have fewer blocks."""

from dataclasses import replace

import pytest

from mycli.runtime.memory.cache_shape import SHARED_BLOCK, CacheShape, cache_shape, window_blocks
from mycli.runtime.memory.ceiling import bytes_per_step
from mycli.runtime.memory.estimate import cache_bytes, estimate
from mycli.runtime.memory.weights import embedding_bytes, weight_bytes
from tests.support.published import plan


@pytest.mark.parametrize("name, blocks", [("gemma-3-4b", 47), ("gpt-oss-20b", 19), ("Llama-3.1-8B", None)])
def test_the_blocks_of_one_sequence(name: str, blocks: int | None) -> None:
    """The blocks are those of two windows, of the tokens ahead and of a pass of 512 tokens."""
    assert window_blocks(plan(name).config, 1, 1, 512) == blocks


def test_a_sliding_window_bounds_what_is_read_and_held() -> None:
    model = plan("Mistral-7B-v0.1", context=32768)
    assert bytes_per_step(model, 4096) == bytes_per_step(model, 32768)
    assert cache_bytes(model) == cache_bytes(replace(model, context=16384))
    assert cache_bytes(replace(model, context=8192)) == 2 * cache_bytes(replace(model, context=4096))
    assert cache_bytes(replace(model, whole_windows=True)) == 8 * cache_bytes(replace(model, context=4096))


@pytest.mark.parametrize("gpu, blocks", [(False, 47), (True, 71)])
def test_layers_with_a_window_hold_fewer_blocks_than_the_others(gpu: bool, blocks: int) -> None:
    """In Gemma 3 every sixth layer sees all positions; the others 1,024, besides the tokens of a pass."""
    model = replace(plan("gemma-3-4b", context=32768), gpu=gpu)
    layer = 2 * 4 * 256 * 2
    assert cache_bytes(model) == 5 * 32768 * layer + 29 * blocks * 64 * layer
    assert cache_bytes(replace(model, running=32, batch=32)) < 32 * cache_bytes(model)


def test_a_longer_context_never_needs_a_smaller_cache() -> None:
    for name in ("gemma-3-1b", "gpt-oss-20b", "Mistral-7B-v0.1"):
        for batch in (1, 3):
            sizes = [cache_bytes(replace(plan(name, context=64 * count), batch=batch)) for count in range(1, 200)]
            assert sizes == sorted(sizes)


def test_a_draft_model_holds_every_position() -> None:
    draft = plan("gemma-3-270m")
    model = replace(plan("gemma-3-4b", context=32768), draft=draft)
    all_positions = replace(draft, context=32768, whole_windows=True)
    assert estimate(model).draft == weight_bytes(draft) + embedding_bytes(draft) + cache_bytes(all_positions)


def test_layers_with_a_window_have_fewer_blocks_or_the_same() -> None:
    config = plan("gpt-oss-20b").config
    needed = window_blocks(config, 1, 1, 512)
    assert needed == 19
    assert cache_shape(config, needed * SHARED_BLOCK, 1, 1, 512) == CacheShape.contiguous(needed * SHARED_BLOCK)
    longer = (needed + 1) * SHARED_BLOCK
    assert cache_shape(config, longer, 1, 1, 512) == CacheShape(longer, needed + 1, SHARED_BLOCK, needed)


@pytest.mark.parametrize("sequences, running", [(1, 2), (2, 1)])
def test_sequences_share_blocks(sequences: int, running: int) -> None:
    shape = cache_shape(plan("Llama-3.1-8B").config, 128, sequences, running, 512)
    assert shape == CacheShape(128, 2 * sequences, SHARED_BLOCK)
