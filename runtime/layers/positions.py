"""Position and token type embeddings, which encoders add to the embeddings of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.models.part_spec import PositionSpec


class PositionEmbeddings(nn.Module):
    """Adds rows of the tables `types` [types, hidden] and, if there is one, `table` [positions, hidden]."""

    def __init__(self, spec: PositionSpec) -> None:
        super().__init__()
        self._spec = spec
        self.table: Tensor | None = None
        self.types = torch.empty(spec.types.out_features, spec.types.in_features, device="meta")

    @property
    def nbytes(self) -> int:
        return self.types.nbytes + (0 if self.table is None else self.table.nbytes)

    def load(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        if self._spec.table is not None:
            self.table = checkpoint.read(f"{self._spec.table.name}.weight").to(device, dtype)
        self.types = checkpoint.read(f"{self._spec.types.name}.weight").to(device, dtype)

    def forward(self, embedded: Tensor, lengths: Sequence[int], types: Sequence[Sequence[int]]) -> Tensor:
        """Return `embedded` [1, T, hidden] with both added.

        lengths: tokens of each text in the pass, in order; types: of the tokens of each text, empty for type 0.
        """
        if any(types):
            rows = [type for text, length in zip(types, lengths, strict=True) for type in text or [0] * length]
            embedded = embedded + functional.embedding(torch.tensor(rows, device=self.types.device), self.types)
        else:
            embedded = embedded + self.types[0]
        if self.table is None:
            return embedded
        positions = torch.cat([torch.arange(length) for length in lengths]) + self._spec.first
        return embedded + functional.embedding(positions.to(self.table.device), self.table)
