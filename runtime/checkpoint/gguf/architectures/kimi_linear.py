"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without rotation in the others."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.experts import (
    EXPERT_GROUPS,
    SCALE_KEY,
    SIGMOID,
    expert_keys,
    expert_tensors,
    experts_spec,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.kimi_delta import (
    EQUAL_HEADS,
    delta_tensors,
    latent_attention,
    latent_tensors,
    read_latent_keys,
    read_recurrent_layers,
    write_kimi_keys,
)
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule, ValueChange

_EXPERTS = "block_sparse_moe"


def _read_config(model: GgufModel, config: Config) -> Config:
    recurrent = read_recurrent_layers(model, config["num_hidden_layers"])
    return {
        **read_latent_keys(model, config["head_dim"]),
        "num_key_value_heads": config["num_attention_heads"],
        "linear_attn_config": {
            "full_attn_layers": [index + 1 for index, value in enumerate(recurrent) if not value],
            "num_heads": config["num_attention_heads"],
            "head_dim": model.integer("kda.head_dim", low=1),
            "short_conv_kernel_size": model.integer("ssm.conv_kernel", low=1),
        },
        "num_shared_experts": model.integer("expert_shared_count", 0),
        "first_k_dense_replace": model.integer("leading_dense_block_count", 0),
        "num_expert_group": model.integer("expert_group_count", 1) or 1,
        "topk_group": model.integer("expert_group_used_count", 1) or 1,
    }


ARCHITECTURE = Architecture(
    name="kimi-linear",
    model_type="kimi_linear",
    written_types=("kimi_linear",),
    biases=(),
    requires=(
        *EXPERT_GROUPS,
        Requirement("normalized weights of experts", lambda config: experts_spec(config).routing.normalize),
        EQUAL_HEADS,
        Requirement("queries in one matrix, without q_lora_rank", lambda c: latent_attention(c).q_norm is None),
    ),
    latent=True,
    own_head=True,
    layer_tensors={
        **LLAMA_TENSORS,
        **expert_tensors(
            _EXPERTS, gate="w1", up="w3", down="w2", shared="shared_experts", bias="gate.e_score_correction_bias"
        ),
        **latent_tensors("self_attn"),
        **delta_tensors(
            "self_attn",
            "o_proj",
            ValueChange(store=lambda decay: -decay.exp(), load=lambda stored: (-stored).log()),
        ),
        **{f"ssm_{part}_{side}": TensorRule(f"self_attn.{part}_{side}_proj") for part in "fg" for side in "ab"},
    },
    keys=(*expert_keys(used="num_experts_per_token"), SCALE_KEY),
    by_layer=("attention.head_count_kv",),
    gating=(SIGMOID,),
    read_config=_read_config,
    write_keys=write_kimi_keys,
)
