"""The cache against the obvious: lists that are cut and extended."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.cache import StaticCache
from mycli.runtime.config import ModelConfig, RopeScaling
from mycli.runtime.errors import UsageError

CONFIG = ModelConfig(
    model_type="llama",
    hidden_size=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate_size=8,
    vocab_size=16,
    max_context=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope=RopeScaling(),
    tie_embeddings=True,
    dtype="float32",
)


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
            assert torch.equal(keys, expected[layer, 0])
            assert torch.equal(values, expected[layer, 1])
        cache.advance(count)
        assert cache.length == expected.shape[-2]


def test_memory_is_taken_once_and_is_what_it_says() -> None:
    cache = StaticCache(CONFIG, 20, torch.device("cpu"), torch.bfloat16, sequences=3)
    assert cache.nbytes == 2 * CONFIG.layers * 3 * CONFIG.kv_heads * 20 * CONFIG.head_dim * 2


def test_cannot_be_cut_to_what_it_does_not_hold() -> None:
    with pytest.raises(ValueError, match="cannot cut"):
        StaticCache(CONFIG, 20, torch.device("cpu"), torch.float32).truncate(1)
