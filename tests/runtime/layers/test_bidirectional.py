"""Test the attention of embedding models against its definition, one query at a time."""

import pytest
import torch

from mycli.runtime.layers.bidirectional import BidirectionalAttention
from mycli.runtime.models.part_spec import AttentionSpec, LinearSpec
from tests.support.random_tensors import normal

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@pytest.mark.parametrize("window", [None, 1, 3, 6, 20], ids=str)
def test_a_token_sees_its_own_text_as_far_as_the_window_on_both_sides(window: int | None) -> None:
    spec = AttentionSpec(
        HEADS, KV_HEADS, HEAD_DIM, window, None, (LinearSpec("qkv", 1, 1),), None, None, LinearSpec("o", 1, 1)
    )
    texts = [range(9), range(9, 10), range(10, 15)]
    query = normal(1, 15, HEADS, HEAD_DIM)
    key, value = (normal(1, 15, KV_HEADS, HEAD_DIM, seed=seed) for seed in (1, 2))
    found = BidirectionalAttention([len(text) for text in texts]).attend(0, query, (key, value), spec)
    for text in texts:
        for at in text:
            seen = [other for other in text if window is None or abs(other - at) < window]
            for head in range(HEADS):
                scores = key[0, seen, head // 2] @ query[0, at, head] / HEAD_DIM**0.5
                expected = scores.softmax(0) @ value[0, seen, head // 2]
                part = found[0, at, head * HEAD_DIM : (head + 1) * HEAD_DIM]
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)
