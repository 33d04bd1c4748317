"""Falcon (7B): multi-query attention and a GELU MLP in parallel after one LayerNorm, q, k and v in one tensor."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, NORM_BIASES, Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufHeader, GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS, TensorRule


def is_small(header: GgufHeader) -> bool:
    """Return whether a file has one head of keys and values, as 7B."""
    return header.metadata.integer("falcon.attention.head_count_kv", 1, low=1) == 1


def read_falcon_config(model: GgufModel, config: Config) -> Config:
    """Return the fields of all Falcons; removes `head_dim`, which their class does not take."""
    del config["head_dim"]
    return {"hidden_act": "gelu", "ffn_hidden_size": config["intermediate_size"]}


ARCHITECTURE = Architecture(
    name="falcon",
    model_type="falcon",
    written_types=("falcon",),
    requires=(HIDDEN_WIDE_HEADS, WHOLE_ROTATION),
    biases=NORM_BIASES,
    layer_tensors={
        "attn_norm": TensorRule("input_layernorm"),
        "attn_qkv": TensorRule("self_attention.query_key_value"),
        "attn_output": TensorRule("self_attention.dense"),
        "ffn_up": TensorRule("mlp.dense_h_to_4h"),
        "ffn_down": TensorRule("mlp.dense_4h_to_h"),
    },
    model_tensors=MODEL_TENSORS,
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_epsilon",
    reads=lambda header, experts: is_small(header),
    writes=lambda config: len(config.layer_specs[0].attention.qkv) == 1,
    read_config=read_falcon_config,
)
