"""Falcon (7B): multi-query attention and a GELU MLP in parallel after one LayerNorm, q, k and v in one tensor."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, NORM_BIASES, Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS, TensorRule


def _read_config(model: GgufModel, config: Config) -> Config:
    large = "blk.0.attn_norm_2.weight" in model.tensors or config["num_key_value_heads"] != 1
    return {
        "hidden_act": "gelu",
        "ffn_hidden_size": config["intermediate_size"],
        "multi_query": not large,
        "new_decoder_architecture": large,
    }


ARCHITECTURE = Architecture(
    name="falcon",
    model_type="falcon",
    written_types=("falcon",),
    requires=(HIDDEN_WIDE_HEADS, WHOLE_ROTATION),
    biases=NORM_BIASES,
    layer_tensors={
        "attn_norm": TensorRule("input_layernorm"),
        "attn_norm_2": TensorRule("ln_attn"),  # of 40B, which the family refuses by name
        "attn_qkv": TensorRule("self_attention.query_key_value"),
        "attn_output": TensorRule("self_attention.dense"),
        "ffn_up": TensorRule("mlp.dense_h_to_4h"),
        "ffn_down": TensorRule("mlp.dense_4h_to_h"),
    },
    model_tensors=MODEL_TENSORS,
    epsilon=LAYER_NORM_EPSILON,
    read_config=_read_config,
)
