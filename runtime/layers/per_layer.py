"""Per-layer embeddings (Gemma 3n and 4): one input row per token and layer, in addition to the residual stream.

Combines a table row of the token with the normed projection of its embedding; `runtime.layers.block` uses the result.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.kernels.registry import DENSE_PRODUCT
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.config import ModelConfig


class PerLayerInputs(nn.Module):
    """Table [vocab, layers * width], projection [layers * width, hidden] and norm [width], dense."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        self.table = torch.empty(config.per_layer_vocab, config.layers * config.per_layer_width, device="meta")
        self.projection = torch.empty(config.layers * config.per_layer_width, config.hidden_size, device="meta")
        self.norm = RMSNorm(config.per_layer_norm())

    @property
    def nbytes(self) -> int:
        # Without the norm, which `Transformer.nbytes` counts.
        return self.table.nbytes + self.projection.nbytes

    def load(self, weights: CheckpointWeights) -> None:
        config = self._config
        self.table = weights.read(f"{config.per_layer_table().name}.weight")
        self.projection = weights.read(f"{config.per_layer_projection().name}.weight")
        self.norm.load(weights)

    def rows(self, tokens: Tensor) -> Tensor:
        """Return the row of the table for each of `tokens`: tokens of images and sounds have none and take the first.

        transformers does the same in Gemma 3n.
        """
        if self._config.per_layer_vocab >= self._config.vocab_size:
            return tokens
        # Not `where` with a number, which may be copied to the GPU: a graph under capture does not allow that.
        return tokens * (tokens < self._config.per_layer_vocab)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Compute [..., layers, width] from tokens int64 [...] and the scaled embeddings [..., hidden]."""
        rows = functional.embedding(self.rows(tokens), self.table)
        projected = DENSE_PRODUCT(embedded.reshape(-1, embedded.shape[-1]), self.projection)
        shape = (*tokens.shape, self._config.layers, self._config.per_layer_width)
        return self.join(rows.view(shape), projected.view(shape))

    def join(self, rows: Tensor, projected: Tensor) -> Tensor:
        """Combine table `rows` and projected embeddings, both [..., width]."""
        config = self._config
        scale = torch.tensor(config.per_layer_width**0.5, dtype=rows.dtype).item()  # rounded like `embedding_scale`
        combined: Tensor = (self.norm(projected * config.hidden_size**-0.5) + rows * scale) * 2.0**-0.5
        return combined
