"""Test the vector of a text against sums computed by hand."""

import pytest
import torch

from mycli.runtime.checkpoint.sentence_transformers import EmbeddingSpec, PoolingMode
from mycli.runtime.engine.replies.embedder import Embedder


@pytest.mark.parametrize(
    ("mode", "vector"),
    [
        ("cls", [6.0, -3.0]),
        ("max", [6.0, 9.0]),
        ("mean", [3.0, 3.0]),
        ("mean_sqrt_len", [9 / 3**0.5, 9 / 3**0.5]),
        ("weighted_mean", [(6 + 2 * 0 + 3 * 3) / 6, (-3 + 2 * 9 + 3 * 3) / 6]),
        ("last", [3.0, 3.0]),
    ],
)
def test_hidden_states_are_pooled(mode: PoolingMode, vector: list[float]) -> None:
    states = torch.tensor([[6.0, -3.0], [0.0, 9.0], [3.0, 3.0]])
    torch.testing.assert_close(Embedder(EmbeddingSpec((mode,)), 2).vector(states), torch.tensor(vector))
