"""The head of rerankers that are encoders: one score from the final hidden states of a pair."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.part_spec import ClassifierSpec, LinearSpec

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": functional.gelu}


class Classifier(nn.Module):
    """Computes the head that `spec` declares in fp32 on the CPU, as vectors of embedding models are computed."""

    def __init__(self, spec: ClassifierSpec) -> None:
        super().__init__()
        self._spec = spec
        self._dense: tuple[Tensor, Tensor | None] = (torch.empty(0), None)
        self._out: tuple[Tensor, Tensor | None] = (torch.empty(0), None)
        self._norm: tuple[Tensor, Tensor | None] = (torch.empty(0), None)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self._dense, *self._norm, *self._out) if part is not None)

    def load(self, weights: CheckpointWeights) -> None:
        self._dense, self._out = _read(weights.checkpoint, self._spec.dense), _read(weights.checkpoint, self._spec.out)
        norm = self._spec.norm
        if norm is not None:
            bias = weights.checkpoint.read(norm.bias_tensor).float() if norm.bias else None
            self._norm = weights.checkpoint.read(norm.tensor).float(), bias

    @torch.inference_mode()
    def forward(self, states: Tensor) -> Tensor:
        """Return the score fp32 [1] of a text from its final hidden states [tokens, hidden]."""
        x = states.to("cpu", torch.float32)
        x = x.mean(0, keepdim=True) if self._spec.mean else x[:1]
        x = _ACTIVATIONS[self._spec.activation](functional.linear(x, *self._dense))
        if self._spec.norm is not None:
            x = functional.layer_norm(x, x.shape[-1:], *self._norm, eps=self._spec.norm.eps)
        return functional.linear(x, *self._out)[0]


def _read(checkpoint: Checkpoint, linear: LinearSpec) -> tuple[Tensor, Tensor | None]:
    bias = checkpoint.read(f"{linear.name}.bias").float() if linear.bias else None
    return checkpoint.read(f"{linear.name}.weight").float(), bias
