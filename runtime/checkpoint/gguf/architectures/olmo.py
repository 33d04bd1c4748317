"""OLMo 1: Llama with LayerNorms without gain and bias; queries, keys and values may be clipped."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, Architecture, GgufKey, linear_biases
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS

ARCHITECTURE = Architecture(
    name="olmo",
    model_type="olmo",
    written_types=("olmo",),
    requires=(HIDDEN_WIDE_HEADS, WHOLE_ROTATION),
    layer_tensors=PAIRED_TENSORS,
    epsilon=LAYER_NORM_EPSILON,
    write_keys=lambda config: {} if config.attention_clip is None else {"attention.clamp_kqv": config.attention_clip},
    keys=(GgufKey("attention.clamp_kqv", "clip_qkv", float),),
    read_config=linear_biases,
)
