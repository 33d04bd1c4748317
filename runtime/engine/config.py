"""What was asked of an engine: one frozen record, made once from flags or settings, read by field name everywhere.

Holds wishes, not decisions: what a device makes of them is a `Placement`. Does not import torch, and does not know
where the wishes were written.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.utils.dtypes import Dtype

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.device.placement import Placement

NGRAM = "ngram"  # as `draft`: a lookup in the text instead of a model
MTP = "mtp"  # as `draft`: the model's own head that predicts further tokens


@dataclass(frozen=True)
class EngineConfig:
    """How a model is to be run.

    device: auto, cpu, cuda or cuda:N; dtype: of activations, None for the model's own; kv: how the cache holds keys and
    values; context: tokens of a sequence, None for as many as usual and fitting; sequences: that there is room for at
    full length; running: at once, sharing that room, None for as many as `sequences`; draft: the name of a model that
    drafts, `NGRAM`, `MTP`, or None; dense_prefill_copy: keep packed weights in `dtype` too, for prompts;
    allow_nonfinite: load weights that are NaN or infinite as they are; adapter: the name of a LoRA adapter that is
    added to them; expert_bytes: that experts may take in memory, others being read when they are chosen, None for as
    many as fit; prefix_folder: where what was read is kept over restarts, in `prefix_bytes` at most.
    """

    device: str = "auto"
    dtype: Dtype | None = None
    kv: KvDtype = "auto"
    context: int | None = None
    sequences: int = 1
    running: int | None = None
    draft: str | None = None
    dense_prefill_copy: bool = False
    allow_nonfinite: bool = False
    adapter: str | None = None
    expert_bytes: int | None = None
    prefix_folder: Path | None = None
    prefix_bytes: int = 8 << 30

    def place(self, model: ModelConfig) -> "Placement":
        """Where and how `model` runs. Raises what `runtime.device.placement.place` raises."""
        from mycli.runtime.device.placement import place

        return place(model, self.device, self.dtype, self.kv, dense_prefill_copy=self.dense_prefill_copy)
