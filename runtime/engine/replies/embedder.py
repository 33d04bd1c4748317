"""Computes the vector of a text from its hidden states: pooling, dense layers, normalization, in fp32."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.checkpoint.sentence_transformers import DenseSpec, EmbeddingSpec
from mycli.runtime.errors import ModelError

VECTOR_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
    "Sigmoid": torch.sigmoid,
}


class Embedder:
    """Computes vectors as described by `spec`. Raises ModelError for missing or misshaped dense weights."""

    def __init__(self, spec: EmbeddingSpec, hidden_size: int) -> None:
        self.spec = spec
        self.size = spec.size(hidden_size)
        self._dense = [(*_read(dense), VECTOR_ACTIVATIONS[dense.activation]) for dense in spec.dense]

    @torch.inference_mode()
    def vector(self, states: Tensor, dimensions: int | None = None) -> Tensor:
        """Return the vector fp32 [size] of a text from its hidden states [tokens, hidden], of the last token alone if
        the spec needs no others; `dimensions`: keep only the first values.
        """
        states = states.to("cpu", torch.float32)
        x = torch.cat([_pooled(states, mode) for mode in self.spec.pooling])
        for weight, bias, activation in self._dense:
            # One vector at a time: in a batch its last bits would depend on the number of texts.
            x = activation(functional.linear(x[None], weight, bias)[0])
        if self.spec.normalize:
            x = functional.normalize(x, dim=0)
        if dimensions is not None and dimensions < len(x):
            x = x[:dimensions]
            x = functional.normalize(x, dim=0) if self.spec.normalize else x
        return x

    def prompt(self, name: str | None) -> str:
        """Return the text before an input. Raises KeyError for a name that the model does not have."""
        name = self.spec.default_prompt if name is None else name
        return "" if name is None else self.spec.prompts[name]


def _pooled(states: Tensor, mode: str) -> Tensor:
    count = len(states)
    if mode == "last":
        return states[-1]
    if mode == "cls":
        return states[0]
    if mode == "max":
        return states.amax(0)
    if mode == "weighted_mean":
        weights = torch.arange(1, count + 1, dtype=torch.float32)[:, None]
        return (states * weights).sum(0) / weights.sum()
    total = states.sum(0)
    return total / count if mode == "mean" else total / count**0.5


def _read(dense: DenseSpec) -> tuple[Tensor, Tensor | None]:
    if dense.tensor is not None:
        from mycli.runtime.checkpoint.gguf.checkpoint import read_matrix

        return read_matrix(dense.path, dense.tensor), None
    checkpoint = Checkpoint(Manifest.open(dense.path.parent))
    shapes: dict[str, Sequence[int]] = {"linear.weight": (dense.out_features, dense.in_features)}
    if dense.bias:
        shapes["linear.bias"] = (dense.out_features,)
    tensors = []
    for name, shape in shapes.items():
        entry = checkpoint.manifest.tensors.get(name)
        if entry is None or tuple(entry.shape) != tuple(shape):
            problem = "is missing" if entry is None else f"has shape {list(entry.shape)}"
            raise ModelError(f"{dense.path}: {name} {problem}; expected {list(shape)}")
        tensors.append(checkpoint.read(name).float())
    return tensors[0], tensors[1] if dense.bias else None
