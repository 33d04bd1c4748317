"""Tables of position and token type embeddings, which are added to those of tokens, and biases by distance."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.part_spec import LinearSpec, PositionSpec

_MAX_DISTANCE = 128  # all distances from here on are in the last bucket


class PositionEmbeddings(nn.Module):
    """Adds rows of the tables `table` [positions, hidden] and `types` [types, hidden], as far as the model has them.

    `distances` [32, heads], if any: biases of attention scores by the bucket of the distance between two tokens.
    """

    def __init__(self, spec: PositionSpec) -> None:
        super().__init__()
        self._spec = spec
        self.table: Tensor | None = None
        self.types: Tensor | None = None
        self.distances: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.table, self.types, self.distances) if part is not None)

    def load(self, weights: CheckpointWeights) -> None:
        def read(linear: LinearSpec | None) -> Tensor | None:
            return None if linear is None else weights.read(f"{linear.name}.weight")

        spec = self._spec
        self.table, self.types, self.distances = read(spec.table), read(spec.types), read(spec.distances)

    def add_positions(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Return `embedded` [..., T, hidden] plus the rows of `positions` int64 [T], which count from 0."""
        if self.table is None:
            return embedded
        # Passes are compared at the end of the last block of a cache, which the table may not reach.
        rows = (positions + self._spec.first).clamp(max=len(self.table) - 1)
        return embedded + functional.embedding(rows, self.table)

    def forward(self, embedded: Tensor, lengths: Sequence[int], types: Sequence[Sequence[int]]) -> Tensor:
        """Return `embedded` [1, T, hidden] plus the rows of its positions and token types.

        lengths: tokens of each text in the pass, in order; types: of the tokens of each text, empty for type 0.
        """
        if self.types is not None and any(types):
            rows = [type for text, length in zip(types, lengths, strict=True) for type in text or [0] * length]
            embedded = embedded + functional.embedding(torch.tensor(rows, device=self.types.device), self.types)
        elif self.types is not None:
            embedded = embedded + self.types[0]
        positions = torch.cat([torch.arange(length) for length in lengths])
        return self.add_positions(embedded, positions.to(embedded.device))

    def score_biases(self, length: int) -> Tensor | None:
        """Return the biases [1, heads, queries, keys] of the attention scores of a text; None if there are none."""
        if self.distances is None:
            return None
        at = torch.arange(length)
        rows = _buckets(at[None] - at[:, None], len(self.distances)).to(self.distances.device)
        return functional.embedding(rows, self.distances).permute(2, 0, 1)[None]


def _buckets(distance: Tensor, count: int) -> Tensor:
    """Return the bucket, of `count`, of each distance from query to key: the relative position buckets of T5.

    Half are for keys after the query. In each half, half of the buckets hold one distance, the others grow
    exponentially.
    """
    half = count // 2
    exact = half // 2
    size = distance.abs()
    # In the order of operations of transformers: at the bounds of buckets another order may round otherwise.
    logarithm = torch.log(size.float() / exact) / math.log(_MAX_DISTANCE / exact)
    far = (exact + (logarithm * (half - exact)).long()).clamp(max=half - 1)
    return (distance > 0) * half + torch.where(size < exact, size, far)
