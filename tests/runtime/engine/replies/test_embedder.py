"""Test the vector of a text against sums computed by hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mycli.runtime.checkpoint.sentence_transformers import DenseSpec, EmbeddingSpec, PoolingMode
from mycli.runtime.engine.replies.embedder import Embedder
from mycli.runtime.errors import ModelError


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


@pytest.mark.parametrize(
    ("stored", "cause"), [({}, "linear.bias is missing"), ({"linear.bias": torch.zeros(3)}, "linear.bias has shape")]
)
def test_a_dense_module_without_a_tensor_of_its_size_is_refused(
    stored: dict[str, torch.Tensor], cause: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"linear.weight": torch.zeros(2, 2), **stored}, path)
    spec = EmbeddingSpec(("mean",), dense=(DenseSpec(path, 2, 2, bias=True, activation="Tanh"),))
    with pytest.raises(ModelError, match=f"{cause}.*; expected .2."):
        Embedder(spec, 2)
