"""GLM 4.5 to 4.7 and Solar Open: sigmoid-routed experts with a correction bias, and a shared expert."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.experts import (
    EXPERT_GROUPS,
    GROUP_KEYS,
    NORM_KEY,
    SCALE_KEY,
    SIGMOID,
    dense_layers_key,
    expert_keys,
    expert_tensors,
    shared_count_key,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule


def _read_config(model: GgufModel, config: Config) -> Config:
    return {
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
    }


ARCHITECTURE = Architecture(
    name="glm4moe",
    model_type="glm4_moe",
    written_types=("glm4_moe", "solar_open"),
    requires=EXPERT_GROUPS,
    has_mtp_blocks=True,
    layer_tensors={
        **{name: rule for name, rule in LLAMA_TENSORS.items() if name != "ffn_norm"},
        **expert_tensors(shared="shared_experts", bias="gate.e_score_correction_bias"),
        "post_attention_norm": TensorRule("post_attention_layernorm"),
    },
    keys=(
        *expert_keys("n_routed_experts"),
        *GROUP_KEYS,
        shared_count_key(),
        dense_layers_key("first_k_dense_replace"),
        SCALE_KEY,
        NORM_KEY,
    ),
    gating=(SIGMOID,),
    read_config=_read_config,
    write_keys=lambda config: {"expert_gating_func": SIGMOID},
)
