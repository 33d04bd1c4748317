"""GPT-NeoX and Pythia: q, k and v in one tensor, without the order of its rows in Hugging Face's files."""

from mycli.runtime.checkpoint.gguf.architecture import (
    ALL_BIASES,
    LAYER_NORM_EPSILON,
    NORM_BIASES,
    Architecture,
    Config,
    GgufKey,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS, TensorRule


def _read_config(model: GgufModel, config: Config) -> Config:
    return {"hidden_act": "gelu", "attention_bias": "blk.0.attn_qkv.bias" in model.tensors}


ARCHITECTURE = Architecture(
    name="gptneox",
    model_type="gpt_neox",
    written_types=("gpt_neox",),
    requires=(
        HIDDEN_WIDE_HEADS,
        Requirement("biases in attention", lambda config: config.qkv_bias),
    ),
    biases=(*ALL_BIASES, *NORM_BIASES),
    own_head=True,
    layer_tensors={
        "attn_norm": TensorRule("input_layernorm"),
        "attn_qkv": TensorRule("attention.q_proj", more_names=("attention.k_proj", "attention.v_proj")),
        "attn_output": TensorRule("attention.dense"),
        "ffn_norm": TensorRule("post_attention_layernorm"),
        "ffn_up": TensorRule("mlp.dense_h_to_4h"),
        "ffn_down": TensorRule("mlp.dense_4h_to_h"),
    },
    model_tensors=MODEL_TENSORS,
    keys=(
        GgufKey(
            "use_parallel_residual",
            "use_parallel_residual",
            bool,
            required=True,
            write=lambda config: config.layer_specs[0].parallel,
        ),
    ),
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_eps",
    read_config=_read_config,
)
