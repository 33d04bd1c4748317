"""The head of rerankers that are encoders: one score from the final hidden state of the first token."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.models.part_spec import ClassifierSpec, LinearSpec


class Classifier(nn.Module):
    """Computes out(tanh(dense(x))) in fp32 on the CPU, as vectors of embedding models are computed."""

    def __init__(self, spec: ClassifierSpec) -> None:
        super().__init__()
        self._spec = spec
        self._weights: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights)

    def load(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._weights = (*_read(checkpoint, self._spec.dense), *_read(checkpoint, self._spec.out))

    @torch.inference_mode()
    def forward(self, states: Tensor) -> Tensor:
        """Return the score fp32 [1] of a text from its final hidden states [tokens, hidden]."""
        dense, dense_bias, out, out_bias = self._weights
        x = states[:1].to("cpu", torch.float32)
        return functional.linear(torch.tanh(functional.linear(x, dense, dense_bias)), out, out_bias)[0]


def _read(checkpoint: Checkpoint, linear: LinearSpec) -> tuple[Tensor, Tensor]:
    return checkpoint.read(f"{linear.name}.weight").float(), checkpoint.read(f"{linear.name}.bias").float()
