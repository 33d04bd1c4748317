"""Random models of every family that is exported to GGUF, in shapes that llama.cpp takes."""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import transformers

from mycli.quant.export import ExportRequest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.families import CASES, make
from tests.support.family_parts import SMALL
from tests.support.multimodal_families import make_folder
from tests.support.paths import PICO

_ROPE = {"rope_type": "default", "rope_theta": 50000.0}
# What llama.cpp assumes for a family, or published models have.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma4-ple-shared-kv-double": {"vocab_size_per_layer_input": 4090, "num_kv_shared_layers": 2},
    "gemma3n-sparse-shared-kv": {
        **{"num_hidden_layers": 25, "num_kv_shared_layers": 5, "vocab_size_per_layer_input": 4090},
        **{"laurel_rank": 64, "hidden_size_per_layer_input": 256, "tie_word_embeddings": True},
        "layer_types": 5 * (4 * ["sliding_attention"] + ["full_attention"]),
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15,
    },
    "llama4-chunk16-4top1": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "exaone4-window7": {"num_hidden_layers": 64},
    "smallthinker-layouts-softmax-tied": {
        **{"num_hidden_layers": 5, "rope_layout": [0, 1, 1, 1, 0], "sliding_window_layout": [0, 1, 1, 1, 0]},
        "sliding_window_size": 4096,
    },
    "cohere-head-norms": {"num_hidden_layers": 64},
    "gemma2-window7-tied": {"query_pre_attn_scalar": 16},
    "gemma3-window7-tied": {"query_pre_attn_scalar": 16},
    "hunyuan-tied-biases": {"attention_bias": False},
    # llama.cpp rounds the bounds of yarn; with heads of 16 they are the same.
    "gpt_oss-8top1-tied": {"head_dim": 16},
    "qwen3_moe-8top2": {"norm_topk_prob": True},
    "dots1-8top2": {"num_key_value_heads": 4},
    "afmoe-biases-tied": {"layer_types": ["sliding_attention"] * 3, "mup_enabled": True, "attention_bias": False},
    "hy_v3-two-shared-tied-biases": {"attention_bias": False},
    # As published: scaled in full attention alone.
    "mellum-window7": {
        "rope_parameters": {
            "full_attention": {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            "sliding_attention": _ROPE,
        }
    },
    "laguna-heads-by-layer-window7": {"layer_types": ["full_attention"] + ["sliding_attention"] * 2},
    "laguna-value-gates-capped-tied-biases": {
        "moe_router_logit_softcapping": 0.0,
        "attention_bias": False,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "cohere2_moe-sigmoid-dense-rms-untied-biases": {
        "shared_expert_combination_strategy": "average",
        "attention_bias": False,
    },
    "minicpm3-tied": {"scale_emb": 12, "dim_model_base": 256},
    "minicpm3-longrope-odd-sizes-biases-untied": {
        **{"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "q_lora_rank": 24},
        **{"attention_bias": False, "mlp_bias": False},
    },
    # llama.cpp chooses the factors by the context that it is given, 256 tokens.
    "phi3-longrope-within-partial": {"original_max_position_embeddings": 1024, "max_position_embeddings": 2048},
    "bamba-odd-sizes-biases-tied": {
        **{"mamba_proj_bias": False, "mamba_conv_bias": True, "mamba_expand": 2, "time_step_limit": None},
    },
    "nemotron-half-rotated": {"head_dim": 16},
    "starcoder2-window7-tied": {"sliding_window": None},
    "bitnet-tied-biases": {"attention_bias": False},
    "granite_swa-window7-thetas": {"layer_rope_theta": [0, 10000.0, 10000.0, 10000.0]},
    "qwen3_5-odd-heads-tied": {"linear_value_head_dim": 24, "attention_bias": False},
    "qwen3_5_moe-8top3": {"linear_value_head_dim": 16},
    "qwen3_5_moe-odd-heads-top1-tied": {"linear_value_head_dim": 24},
    "qwen3_next-8top3": {"linear_value_head_dim": 16},
    "granitemoehybrid-dense-odd-sizes-rope-biases-tied": {
        **{"time_step_limit": None, "mamba_proj_bias": False, "mamba_expand": 2, "mamba_conv_bias": True},
    },
    "nemotron_h-every-kind": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "falcon_h1-normed-after-gate-multipliers-biases": {
        **{f"{part}_{side}_multiplier": 1.0 for part in ("attention", "ssm") for side in ("in", "out")},
        **{f"{part}_multiplier": 1.0 for part in ("embedding", "lm_head", "key")},
        **{"mlp_multipliers": None, "ssm_multipliers": None, "mamba_proj_bias": False, "attention_bias": False},
    },
    "falcon_mamba-tied": {"intermediate_size": 128, "mixer_rms_eps": 1e-6},
    "mamba-odd-sizes-biases-untied": {"intermediate_size": 128, "use_conv_bias": True, "use_bias": False},
    "jamba-odd-sizes-biases-every-third": {"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False},
    "deepseek_v2-groups-odd-sizes-biases-tied": {
        "q_lora_rank": 24,
        "attention_bias": False,
        "mlp_bias": False,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
}
# A case of each family without loss.
NAMES = (
    "llama-rope-llama3",
    "llama-biases",
    "mistral-no-window-hd24",
    "qwen2-biases",
    "qwen3-qk-norm-hd32",
    "olmo2-gqa4:2",
    "olmo3-window7",
    "olmo3-yarn-tied",
    "phi3-gqa4:2",
    "phi3-longrope-within-partial",
    "phi3-longrope-beyond-tied",
    "gemma-gqa4:2",
    "gemma2-window7-tied",
    "gemma3-window7-tied",
    "gemma3n-sparse-shared-kv",
    "gemma4-ple-shared-kv-double",
    "gemma4-keys-are-values-untied",
    "gemma4-8top2",
    "smollm3-tied",
    "ministral3-beyond",
    "granite-multipliers",
    "granite-tied-biases",
    "minicpm-tied",
    "minicpm-longrope-beyond-biases",
    "glm4-half-turned",
    "glm-half-turned",
    "seed_oss-biases",
    "exaone4-no-window-tied",
    "exaone4-window7",
    "cohere2-window7-tied",
    "cohere-mha-tied",
    "cohere-head-norms",
    "hunyuan-tied-biases",
    "maincoder-hd24",
    "ernie4_5-tied",
    "arcee-yarn",
    "qwen3_moe-8top2",
    "mixtral-4top2",
    "olmoe-16top4",
    "gpt_oss-window7-gqa4:2",
    "gpt_oss-8top1-tied",
    "qwen2_moe-shared",
    "granitemoe-8top2",
    "glm4_moe-8top3-scaled",
    "glm4_moe-groups-norms-two-shared-tied",
    "solar_open-8top2",
    "ernie4_5_moe-8top3-tied",
    "hunyuan_v1_moe-8top2",
    "minimax_m2-8top2-half-turned",
    "dots1-8top2",
    "qwen3_5-odd-heads-tied",
    "qwen3_5_moe-8top3",
    "qwen3_5_moe-odd-heads-top1-tied",
    "qwen3_next-8top3",
    "lfm2-tied",
    "lfm2_moe-8top3-tied",
    "granitemoehybrid-8top3",
    "granitemoehybrid-dense-odd-sizes-rope-biases-tied",
    "bamba-2-groups",
    "bamba-odd-sizes-biases-tied",
    "nemotron_h-no-experts",
    "nemotron_h-every-kind",
    "falcon_h1-multipliers",
    "falcon_h1-normed-after-gate-multipliers-biases",
    "mamba2-2-groups",
    "jamba-8top3",
    "jamba-no-experts-tied",
    "jamba-odd-sizes-biases-every-third",
    "mamba-tied",
    "mamba-odd-sizes-biases-untied",
    "falcon_mamba-tied",
    "deepseek_v2-groups-odd-sizes-biases-tied",
    "deepseek_v3-groups-yarn",
    "glm4_moe_lite-8top3",
    "kimi_k2-ungrouped",
    "youtu-tied",
    "llama4-chunk16-4top1",
    "mimo_v2_flash-window7",
    "kimi_linear-8top3",
    "bailing_hybrid-8top3",
    "internlm3-tied-mqa",
    "iquestcoder-hd24",
    "jais2-gqa4:2",
    "falcon-7b",
    "gpt_neox-parallel",
    "gpt2-tied",
    "gpt_bigcode-tied",
    "nemotron-half-rotated",
    "nemotron-tied-biases",
    "olmo-clip",
    "starcoder2-window7-tied",
    "stablelm-parallel-head-norms",
    "stablelm-biases-tied",
    "phi-gqa4:2",
    "bitnet-tied-biases",
    "granitemoeshared-8top2",
    "granite_swa-window7-thetas",
    "granitemoe_swa-window7-shared",
    "hy_v3-8top2",
    "hy_v3-two-shared-tied-biases",
    "exaone_moe-window7",
    "mellum-window7",
    "afmoe-window7",
    "afmoe-biases-tied",
    "exaone-llama3",
    "bailing_moe-groups-norms-two-shared-tied",
    "deepseek-8top2-first-dense",
    "laguna-heads-by-layer-window7",
    "laguna-value-gates-capped-tied-biases",
    "cohere2_moe-window7-tied-shared",
    "cohere2_moe-sigmoid-dense-rms-untied-biases",
    "minicpm3-tied",
    "minicpm3-longrope-odd-sizes-biases-untied",
    "mistral4-beyond",
    "gemma4_unified-tied",
    "apertus-llama3",
    "apertus-tied-biases",
    "smallthinker-rotating-untied",
    "smallthinker-layouts-softmax-tied",
)
# Families that are read alone: llama.cpp computes other logits for every one of their models.
READ_ALONE = ("phimoe",)
MULTIMODAL_NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # of which the text part is exported


def exported_families() -> list[str]:
    """Return one case of each family."""
    # The first one, without a window where there is such a case.
    names = sorted(reversed(NAMES), key=lambda name: "window7" not in name)
    return list({CASES[name][0]: name for name in names}.values())


def make_exported(folder: Path, name: str, **more: Any) -> None:
    """Write the random model of a case to `folder`, with the vocabulary of pico; `more`: changes to its config."""
    if name in MULTIMODAL_NAMES:
        make_folder(folder, name, vocab_size=4096)
    else:
        model_type, changes = CASES[name]
        make(folder, model_type, {**changes, "vocab_size": 4096, **CHANGES.get(name, {}), **more})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, folder / file)


def export_request(name: str, folder: Path, variant: str) -> ExportRequest:
    make_exported(folder / "hf", name)
    original = open_model_folder(folder / "hf")
    return ExportRequest(Source("hf", folder / "hf"), original, folder / "a.gguf", variant, requantize=True)


def exported_config(name: str, changes: dict[str, Any]) -> ModelConfig:
    model_type, case = CASES[name]
    fields = {**SMALL, **case, "vocab_size": 4096, **CHANGES.get(name, {}), **changes}
    return parse_config(
        Fields(transformers.AutoConfig.for_model(model_type, **deepcopy(fields)).to_dict(), "config.json")
    )
