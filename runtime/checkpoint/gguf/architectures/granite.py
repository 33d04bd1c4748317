"""Granite 3 and 4, dense: Llama with four multipliers."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, Architecture, Config, GgufKey, linear_biases
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS

FINETUNED = "rope.scaling.finetuned"  # whether queries and keys rotate
GRANITE_KEYS = (
    GgufKey("embedding_scale", "embedding_multiplier", float, write=lambda config: float(config.embedding_scale)),
    GgufKey("residual_scale", "residual_multiplier", float, write=lambda config: float(config.residual_scale)),
    GgufKey("attention.scale", "attention_multiplier", float, write=lambda config: float(config.attention_scale or 0)),
    GgufKey("logit_scale", "logits_scaling", float, write=lambda config: float(1 / config.logit_scale)),
)


def _read_config(model: GgufModel, config: Config) -> Config:
    if not model.boolean(FINETUNED, True):  # llama.cpp then rotates nothing
        raise model.metadata.fail(model.key(FINETUNED), "= false is not supported for this architecture")
    return linear_biases(model, config)


ARCHITECTURE = Architecture(
    name="granite",
    model_type="granite",
    written_types=("granite",),
    requires=(WHOLE_ROTATION,),
    biases=ALL_BIASES,
    layer_tensors=PAIRED_TENSORS,
    keys=GRANITE_KEYS,
    read_config=_read_config,
)
