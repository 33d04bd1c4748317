"""Test that what GGUF or llama.cpp has no place for is refused, with the cause."""

from pathlib import Path
from typing import Any

import pytest

from mycli.quant.export import find_export_target
from mycli.quant.ggml.file import gguf_place, require_loadable
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.gguf.rope import position_sections
from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import Fields
from tests.support.gguf_exports import export_request, exported_config
from tests.support.more_expert_families import BY_LAYER_TYPE

pytestmark = pytest.mark.usefixtures("quick_configs")

LOSSES = {
    "llama-rope-dynamic-beyond": "dynamic",
    "qwen2-tied-window-upper": "window",
    "smollm3-untied-window": "no such bias",
    "ernie4_5_moe-every-other-none-shared-untied": "size",
    "qwen3_next-odd-heads-every-other-unnormalized-tied": "mlp|size|routing",
    "olmoe-clip-normalized-gqa-tied": "clip",
    "dots1-window7-tied-biases": "key-value heads",
    "cohere-gqa-untied-biases": "no tensor",
    "deepseek_v3-odd-sizes-half-split-biases-tied": "q_lora_rank",
    "nemotron_h-groups-latent-experts-odd-sizes-biases-unnormalized": "no tensor for it",
    "mellum-dense-tied-biases": "no tensor for it",
    "phi-head-norms-mha-relu2": "no tensor for it",
    "granitemoe_swa-thetas-tied-biases": "rope",
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_gguf_has_no_key_for_is_refused(name: str, tmp_path: Path) -> None:
    request = export_request(name, tmp_path, "f32")
    module, _ = find_export_target("gguf:f32")
    with pytest.raises(ModelError, match=LOSSES[name]):
        module.export(request, silent)
    assert not request.target.exists()


# A change to a case that llama.cpp would not load, or would compute otherwise, and the cause given.
UNLOADABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3-output-bias": ("qwen3-qk-norm-hd32", {"attention_bias": True}, "blk.0.attn_output.bias"),
    "olmo2-output-bias": ("olmo2-gqa4:2", {"attention_bias": True}, "blk.0.attn_output.bias"),
    "hunyuan-output-bias": ("hunyuan-tied-biases", {"attention_bias": True}, "blk.0.attn_output.bias"),
    "seed_oss-output-bias": ("seed_oss-biases", {"attention_out_bias": True}, "blk.0.attn_output.bias"),
    "ernie4_5-biases": ("ernie4_5-tied", {"use_bias": True}, "blk.0.attn_output.bias"),
    "falcon_h1-output-bias": (
        "falcon_h1-normed-after-gate-multipliers-biases",
        {"attention_bias": True},
        "blk.0.attn_output.bias",
    ),
    "lfm2-convolution-biases": ("lfm2-tied", {"conv_bias": True}, "shortconv"),
    "mamba2-no-convolution-bias": ("mamba2-2-groups", {"use_conv_bias": False}, "bias of the convolution"),
    "mamba-no-convolution-bias": ("mamba-tied", {"use_conv_bias": False}, "bias of the convolution"),
    "mamba-bias": ("mamba-tied", {"use_bias": True}, "ssm_in.bias"),
    "jamba-wide": ("jamba-8top3", {"mamba_expand": 3}, "twice as wide"),
    "granitehybrid-wide": ("granitemoehybrid-8top3", {"mamba_expand": 3, "mamba_d_head": 48}, "mamba_expand"),
    "glm-narrow-heads": ("glm-half-turned", {"head_dim": 24}, "add up to hidden_size"),
    "exaone4-short-window": ("exaone4-window7", {"num_hidden_layers": 4}, "64 layers"),
    "exaone4-long-without-window": (
        "exaone4-no-window-tied",
        {"num_hidden_layers": 64, "layer_types": ["full_attention"] * 64},
        "64 layers",
    ),
    "phi3-window": ("phi3-gqa4:2", {"sliding_window": 16}, "sliding window"),
    "dots1-grouped-queries": ("dots1-8top2", {"num_key_value_heads": 2}, "key-value heads"),
    "qwen3_5-wide-values": ("qwen3_5-odd-heads-tied", {"linear_value_head_dim": 40}, "one size"),
    "gemma4-large-table": ("gemma4-ple-shared-kv-double", {"vocab_size_per_layer_input": 4097}, "at most vocab_size"),
    "gemma4-shared-kv-otherwise": (
        "gemma4-ple-shared-kv-double",
        {"num_kv_shared_layers": 3},
        "full attention in the last",
    ),
    "deepseek_v2-groups": (
        "deepseek_v2-groups-odd-sizes-biases-tied",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        "two best experts",
    ),
    "mimo-scaled": ("mimo_v2_flash-window7", {"routed_scaling_factor": 2.5}, "a scale of 1"),
    "mimo-unnormalized": ("mimo_v2_flash-window7", {"norm_topk_prob": False}, "normalized weights"),
    "deepseek_v3-all-groups": ("deepseek_v3-groups-yarn", {"topk_group": 4}, "fewer groups"),
    "phimoe": ("phimoe-4top2-head-bias", {}, "RMSNorms"),
    "bitnet-relu2": ("bitnet-tied-biases", {"hidden_act": "relu2"}, "hidden_act"),
    "bitnet-biases": ("bitnet-tied-biases", {"attention_bias": True}, "blk.0.attn_q.bias"),
    "jais2-no-biases": ("jais2-gqa4:2", {"mlp_bias": False}, "mlp_bias"),
    "starcoder2-no-biases": ("starcoder2-window7-tied", {"use_bias": False}, "use_bias"),
    "nemotron-narrow-heads": ("nemotron-half-rotated", {"head_dim": 24}, "add up to hidden_size"),
    "mellum-two-thetas": ("mellum-window7", BY_LAYER_TYPE, "rope_theta"),
    "laguna-window-first": (
        "laguna-heads-by-layer-window7",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "full attention in the first layer",
    ),
    "bamba-wide": ("bamba-2-groups", {"mamba_expand": 3, "mamba_d_head": 48}, "mamba_expand"),
    "deepseek_v2-lite-of-3-layers": ("deepseek_v2-groups-odd-sizes-biases-tied", {"q_lora_rank": None}, "q_lora_rank"),
}


@pytest.mark.parametrize("name", UNLOADABLE)
def test_what_llama_cpp_does_not_load_is_refused(name: str) -> None:
    case, changes, cause = UNLOADABLE[name]
    for config in (*([exported_config(case, {})] if changes else []), exported_config(case, changes)):
        architecture = written_architecture(config)
        places = [gguf_place(architecture, tensor) for tensor, _ in config.tensors()]
        if changes and config == exported_config(case, {}):
            require_loadable(config, architecture, places)
        else:
            with pytest.raises(ModelError, match=cause):
                require_loadable(config, architecture, places)


def test_low_rank_queries_are_required_of_minicpm3() -> None:
    config = exported_config("minicpm3-tied", {"q_lora_rank": None})
    with pytest.raises(ModelError, match="no tensor for it"):
        [gguf_place(written_architecture(config), tensor) for tensor, _ in config.tensors()]


@pytest.mark.parametrize("sections", [[2, 3], [2, 3, 4], [-1, 5, 4], "2", [2, 3, "3"]])
def test_sections_of_positions_that_do_not_fit(sections: object) -> None:
    config = exported_config("qwen3-qk-norm-hd32", {"head_dim": 16})
    with pytest.raises(ModelError, match="mrope_section"):
        position_sections(config, Fields({"mrope_section": sections}, "config.json"))
