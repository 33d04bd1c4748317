"""Position and type embeddings of encoders: a table row for each position (BERT), and one for the type of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.models.part_spec import PositionSpec


class PositionEmbeddings(nn.Module):
    """The table [positions, hidden], maybe none, and the embedding of the token type 0 [hidden], dense."""

    def __init__(self, spec: PositionSpec) -> None:
        super().__init__()
        self._spec = spec
        self.table: Tensor | None = None
        self.first_type = torch.empty(spec.types.in_features, device="meta")

    @property
    def nbytes(self) -> int:
        return self.first_type.nbytes + (0 if self.table is None else self.table.nbytes)

    def load(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        if self._spec.table is not None:
            self.table = checkpoint.read(f"{self._spec.table.name}.weight").to(device, dtype)
        self.first_type = checkpoint.read(f"{self._spec.types.name}.weight")[0].to(device, dtype)

    def forward(self, embedded: Tensor, lengths: Sequence[int]) -> Tensor:
        """Add to `embedded` [1, T, hidden] of texts with `lengths` tokens, one after the other."""
        embedded = embedded + self.first_type
        if self.table is None:
            return embedded
        positions = torch.cat([torch.arange(length) for length in lengths]) + self._spec.first
        return embedded + functional.embedding(positions.to(self.table.device), self.table)
