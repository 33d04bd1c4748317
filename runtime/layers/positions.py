"""Position and token type embeddings, which encoders add to the embeddings of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.models.part_spec import PositionSpec


class PositionEmbeddings(nn.Module):
    """Adds the row of each position, if there is a table [positions, hidden], and that of token type 0 [hidden]."""

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
        """Return `embedded` [1, T, hidden] with both added; lengths: tokens of each text in the pass, in order."""
        embedded = embedded + self.first_type
        if self.table is None:
            return embedded
        positions = torch.cat([torch.arange(length) for length in lengths]) + self._spec.first
        return embedded + functional.embedding(positions.to(self.table.device), self.table)
