"""The plain pass: layer by layer, product by product. It takes everything and is what the others are compared with."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch
from mycli.runtime.cache.kv_cache import cache_dtype
from mycli.runtime.engine.passes.base import OnDecline, PassInput, TokenSteps
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import PromptKind
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.models.part_spec import AttentionSpec

_HOST_SAMPLING = Declined("host-sampling")


class PlainPass:
    """Runs the modules of a model as they are."""

    name = "plain"
    samples = False

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def takes(self, work: PassInput) -> Declined | None:
        return None if work.sampling is None else _HOST_SAMPLING

    def logits(self, work: PassInput) -> Tensor:
        batch = Batch.of(work.chunks, work.cache.block_size, self._model.device)
        logits: Tensor = self._model(batch, work.rope, work.cache, work.hook)
        return logits

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        raise NotImplementedError("the plain pass computes logits")


def compile_plain_pass(model: Transformer, kv: KvDtype, report: OnDecline) -> PlainPass:
    """Return the plain pass of a model; on a GPU, its attention of prompts is compiled and checked first."""
    if model.device.type == "cuda":
        from mycli.runtime.kernels.triton.paged_attention import decline_paged, decline_prompts

        if decline_paged(model.device, model.dtype, 0, 1) is None:
            kinds = prompt_kinds(model.config, model.device, model.dtype, kv)
            declined = [declined for kind in kinds if (declined := decline_prompts(kind)) is not None]
            if declined:
                report(declined[0])
    return PlainPass(model)


def prompt_kinds(config: ModelConfig, device: torch.device, dtype: torch.dtype, kv: KvDtype) -> set[PromptKind]:
    """Return the kinds of attention that prompts of a model need."""
    return {
        PromptKind(
            device,
            dtype,
            cache_dtype(kv, dtype),
            spec.heads // spec.kv_heads,
            spec.head_dim,
            spec.window is not None,
            spec.chunk is not None,
            bool(spec.softcap),
            spec.sinks is not None,
        )
        for spec in config.attentions
        if isinstance(spec, AttentionSpec)
    }
