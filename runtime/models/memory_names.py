"""Tensor names of transformers 5 in memory, of mlx-lm and of InternLM 2, where a family's files have others.

`save_pretrained(save_original_format=False)` writes the former, and so do tools that store a state dict. They are those
of transformers' conversion_mapping.py; experts stacked in one tensor are in the declaration of each family.
"""

import re
from collections.abc import Mapping

Renames = tuple[tuple[str, str], ...]

_GRANITE: Renames = (
    (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
    (".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
)
_BIAS = ".mlp.gate.e_score_correction_bias"
# By model_type: parts of such names, none of which occurs in the family's files, and those of the files.
RENAMES: Mapping[str, Renames] = {
    "mixtral": ((".mlp.", ".block_sparse_moe."),),
    "minimax_m2": ((".mlp.", ".block_sparse_moe."),),
    "phimoe": ((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")),
    "llama": (  # InternLM 2's
        ("model.tok_embeddings.", "model.embed_tokens."),
        (".attention_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
        (".attention.wo.", ".self_attn.o_proj."),
        (".attention.wqkv.", ".self_attn.wqkv."),
        (".feed_forward.w1.", ".mlp.gate_proj."),
        (".feed_forward.w2.", ".mlp.down_proj."),
        (".feed_forward.w3.", ".mlp.up_proj."),
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE),
    "ernie4_5_moe": ((".mlp.text_moe.", ".mlp."), (".mlp.gate.moe_statics.", ".mlp.moe_statics.")),
    "exaone_moe": ((_BIAS, ".mlp.e_score_correction_bias"),),
    "hy_v3": (
        (".mlp.gate.", ".mlp.router.gate."),
        (".mlp.shared_experts.", ".mlp.shared_mlp."),
        (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
    ),
    "laguna": ((_BIAS, ".mlp.experts.e_score_correction_bias"), (".mlp.shared_experts.", ".mlp.shared_expert.")),
    "flint": ((".self_attn.sinks", ".self_attn.softmax_offset"),),
    "mimo_v2_flash": ((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
    "kolibri1": (
        (_BIAS, ".moe.router.expert_bias"),
        (".post_mlp_layernorm.", ".post_ffn_norm."),
        (".post_self_attn_layernorm.", ".post_attn_norm."),
    ),
    "lfm3": ((".self_attn.g_proj.", ".self_attn.gate_proj."),),
    # mlx-lm's names of the MLP of a layer without experts.
    "lfm2_moe": (
        (".feed_forward.gate_proj.", ".feed_forward.w1."),
        (".feed_forward.down_proj.", ".feed_forward.w2."),
        (".feed_forward.up_proj.", ".feed_forward.w3."),
    ),
    "kimi_linear": (
        (".self_attn.forget_gate.", ".self_attn."),
        (".mlp.experts.", ".block_sparse_moe.experts."),
        (".mlp.switch_mlp.", ".block_sparse_moe.switch_mlp."),
        (".mlp.shared_experts.", ".block_sparse_moe.shared_experts."),
        (".mlp.gate.", ".block_sparse_moe.gate."),
        (".mlp.e_score_correction_bias", ".block_sparse_moe.gate.e_score_correction_bias"),
        *((f".{part}_conv.conv.", f".{part}_conv1d.") for part in "qkv"),
    ),
    "bailing_moe": ((".mlp.gate.gate_proj.", ".mlp.gate."),),  # mlx-lm's
    "gpt_neox": (  # mlx-lm's
        ("model.h.", "gpt_neox.layers."),
        ("model.embed_in.", "gpt_neox.embed_in."),
        ("model.final_layer_norm.", "gpt_neox.final_layer_norm."),
        ("model.embed_out.", "embed_out."),
    ),
    "bailing_hybrid": (
        (".self_attn.forget_gate.", ".attention."),
        (".self_attn.o_proj.", ".attention.dense."),
        (".self_attn.", ".attention."),
        (_BIAS, ".mlp.gate.expert_bias"),
    ),
    "olmo_hybrid": (
        (".input_layernorm.", ".attention_layer_norm."),
        (".post_attention_layernorm.", ".feedforward_layer_norm."),
    ),
    "nemotron_h": (("model.embeddings.", "model.embed_tokens."),),
}


# Unsloth's gpt-oss, whose experts are linears apart so that bitsandbytes quantizes them.
_UNSLOTH = re.compile(r"\.experts\.(gate_up|down)_projs\.(\d+)\.")


def file_name(model_type: str, name: str) -> str:
    """Return the name in the family's files of a tensor that may be named as in memory."""
    if model_type == "gpt_oss":
        return _UNSLOTH.sub(r".experts.\2.\1_proj.", name.replace(".mlp.router.linear.", ".mlp.router."))
    for part, stored in RENAMES.get(model_type, ()):
        name = name.replace(part, stored)
    return name
