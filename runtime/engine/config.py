"""The options of an engine, set once from flags or by a caller. The device decides on a `Placement`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.quantization.activations import Activations
from mycli.runtime.tokenizer.chat_template import TemplateOptions
from mycli.runtime.utils.dtypes import Dtype, PromptCopy

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.device.placement import Placement

NGRAM = "ngram"  # as `draft`: prompt lookup instead of a model
MTP = "mtp"  # as `draft`: the model's own multi-token prediction head


@dataclass(frozen=True)
class EngineConfig:
    """How to run a model."""

    device: str = "auto"  # auto, cpu, cuda or cuda:N
    dtype: Dtype | None = None  # of activations; None: the model's own
    kv: KvDtype = "auto"  # of the KV cache
    activations: Activations = "auto"  # bits of the integers that CPU kernels round bf16 activations to
    portable: bool = False  # compute the same bits on every CPU
    context: int | None = None  # tokens per sequence; None: the model's own, at most 8192, or what fits
    sequences: int = 1  # sequences of full length that the cache holds
    running: int | None = None  # sequences that share this cache; None: `sequences`
    whole_windows: bool = False  # layers with a sliding window store every position, so any prefix can be reused
    draft: str | None = None  # the name of a draft model, `NGRAM`, `MTP`, or None
    prompt_copy: PromptCopy = "none"  # also store packed weights so, for prompts on a GPU
    allow_nonfinite: bool = False  # load weights that are NaN or infinite
    adapter: str | None = None  # the name of a LoRA adapter to merge
    expert_bytes: int | None = None  # limit for experts in memory, the rest are read on demand; None: what fits
    prefix_folder: Path | None = None  # of the disk prefix cache, at most `prefix_bytes` large
    prefix_bytes: int = 8 << 30
    template: TemplateOptions = field(default_factory=TemplateOptions)  # the chat template and its arguments
    memory_limit: int | None = None  # bytes that the process may use for the model; None: what is free

    def place(self, model: ModelConfig) -> "Placement":
        """Choose device and dtypes for `model`. Raises what `runtime.device.placement.place` raises."""
        from mycli.runtime.device.placement import place

        return place(
            model,
            self.device,
            self.dtype,
            self.kv,
            prompt_copy=self.prompt_copy,
            activations=self.activations,
            portable=self.portable,
        )
