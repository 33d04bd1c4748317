"""Test families: refused fields, defaults of absent fields, and the declared layers."""

import itertools
import math
from typing import Any

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import read_expert_groups
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.part_spec import MlpSpec, NormSpec, OutputRows, RopeSpec
from mycli.runtime.models.registry import REFUSED, families, parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.published import published

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 3,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def parse(model_type: str, **changes: Any) -> ModelConfig:
    values = {"model_type": model_type, **SHAPE, **changes}
    return parse_config(Fields({key: value for key, value in values.items() if value != "absent"}, "config.json"))


LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope-too-few": ("phi3", {"rope_scaling": {**LONG, "long_factor": [2.0] * 7}}, "long_factor has 7 numbers"),
    "longrope-none": ("phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor has 0 numbers"),
    "longrope-zero": ("phi3", {"rope_scaling": {**LONG, "short_factor": [0] * 8}}, "short_factor must be between"),
    "longrope-text": ("phi3", {"rope_scaling": {**LONG, "short_factor": ["1"] * 8}}, "short_factor must be a number"),
    "longrope-elsewhere": ("llama", {"rope_scaling": LONG}, "'longrope' is not supported"),
    "partial-negative": ("phi3", {"partial_rotary_factor": -0.5}, "partial_rotary_factor"),
    "partial-odd": ("glm4", {"partial_rotary_factor": 0.2, "head_dim": 16}, "pairs"),
    "partial-elsewhere": ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "query-scale-elsewhere": ("llama", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
    "no-rope-letters": ("smollm3", {"no_rope_layers": ["1"] * 4}, "no_rope_layers"),
    "no-rope-two": ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers"),
    "no-rope-few": ("smollm3", {"no_rope_layers": [1]}, "for each of 4 layers"),
    "no-rope-elsewhere": ("llama", {"no_rope_layers": [1, 0, 1, 1]}, "no_rope_layers"),
    "gated-relu2": ("llama", {"hidden_act": "relu2"}, "'relu2' is not supported"),
    "starcoder2-silu": ("starcoder2", {"hidden_act": "silu"}, "'silu' is not supported"),
    "phi-tied": ("phi", {"tie_word_embeddings": True}, "the head has a bias"),
    "phimoe-tied-bias": ("phimoe", {"tie_word_embeddings": True, "lm_head_bias": True}, "the head has a bias"),
    "phimoe-mscales": (
        "phimoe",
        {"rope_scaling": {**LONG, "short_mscale": 1.0, "long_mscale": 1.5}},
        "short_mscale = 1 and long_mscale = 1.5 are not equal",
    ),
    "phimoe-three": ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
    "laguna-input-weights": ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
    "laguna-gating": ("laguna", {"gating": "per-row"}, "gating"),
    "laguna-heads": ("laguna", {"num_attention_heads_per_layer": [4]}, "for each of 4 layers"),
    "laguna-heads-uneven": ("laguna", {"num_attention_heads_per_layer": [4, 3, 4, 4]}, "does not divide"),
    "mlp-types": ("exaone_moe", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    "hy_v3-biases": ("hy_v3", {"mlp_bias": True}, "mlp_bias"),
    "cohere2_moe-selection": ("cohere2_moe", {"expert_selection_fn": "sparsemax"}, "expert_selection_fn"),
    "cohere2_moe-combination": (
        "cohere2_moe",
        {"shared_expert_combination_strategy": "product"},
        "shared_expert_combination_strategy",
    ),
    "granite_swa-thetas": ("granite_swa", {"layer_rope_theta": [1e4]}, "for 4 layers"),
    "granite_swa-theta-text": ("granite_swa", {"layer_rope_theta": ["1", 0, 0, 0]}, "layer_rope_theta"),
    "lfm3-types": ("lfm3", {"layer_types": ["mamba"] * 4}, "layer_types"),
    "olmo_hybrid-heads": ("olmo_hybrid", {"linear_num_value_heads": 6, "linear_num_key_heads": 4}, "not a multiple"),
    "mimo-wide-values": ("mimo_v2_flash", {"v_head_dim": 256}, "v_head_dim"),
    "mimo-absent-values": ("mimo_v2_flash", {"v_head_dim": None, "head_dim": 64}, "128 is more than head_dim 64"),
    "chunks-null": ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size is missing"),
    "chunks-elsewhere": ("llama", {"attention_chunk_size": 16}, "attention_chunk_size"),
    "arcee-silu": ("arcee", {"hidden_act": "silu"}, "'silu' is not supported"),
    "gemma-silu": ("gemma2", {"hidden_activation": "silu"}, "'silu' is not supported"),
    "softcap-zero": ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    "scalar-zero": ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    "both-directions": ("qwen3", {"is_causal": False}, "is_causal = False is not supported"),
    "gemma4-both-directions": ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    "gemma4-more-chosen-than-there": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
        "top_k_experts",
    ),
    "delta-heads": ("qwen3_next", {"linear_num_value_heads": 6, "linear_num_key_heads": 4}, "not a multiple"),
    "delta-experts-countless": ("qwen3_5_moe_text", {"num_experts": 1 << 15}, "more than 32768 experts"),
    "gemma4-all-read": ("gemma4_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
    "gemma4-nothing-to-read": (
        "gemma4_text",
        {"num_kv_shared_layers": 1, "layer_types": [SLIDING] * 3 + [FULL]},
        "no layer of a kind",
    ),
    "gemma4-layers-of-their-own": (
        "gemma4_text",
        {"layer_types": [FULL] * 4, "per_layer_config": {"0": {"head_dim": 32}, "3": {"head_dim": 64}}},
        "differs between layers",
    ),
    "gemma4-other-overrides": (
        "gemma4_text",
        {"layer_types": [FULL] * 4, "per_layer_config": {"0": {"intermediate_size": 32}}},
        "of layer 0",
    ),
    "jamba-no-inner-norms": ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms"),
    "jamba-gelu": ("jamba", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "jamba-offset": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 2}, "attn_layer_offset"),
    "jamba-rank": ("jamba", {"mamba_dt_rank": "half"}, "mamba_dt_rank"),
    "mamba-gelu": ("mamba", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "mamba2-gelu": ("mamba2", {"num_heads": 2, "n_groups": 1, "hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "kimi-rotated": ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
    "kimi-layers": ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [5]}}, "outside of 1 to 4"),
    "ling-bound": ("bailing_hybrid", {"kda_lower_bound": 5.0, "n_group": 1, "topk_group": 1}, "kda_lower_bound"),
    "gemma3n-widths": (
        "gemma3n_text",
        {"num_kv_shared_layers": 0, "intermediate_size": [64]},
        "has 1 numbers for 4 layers",
    ),
    "gemma3n-all-zero": (
        "gemma3n_text",
        {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 0, 0, 1]},
        "not below 1",
    ),
    "gemma3n-active-beyond": ("gemma3n_text", {"num_kv_shared_layers": 0, "altup_active_idx": 4}, "altup_active_idx"),
    "gemma4-odd-head": ("gemma4_text", {"global_head_dim": 33}, "33 is odd"),
    "groups-uneven": ("glm4_moe", {"n_routed_experts": 8, "n_group": 3}, "n_group = 3 does not divide 8"),
    "groups-of-one": ("dots1", {"n_routed_experts": 8, "n_group": 8, "topk_group": 8}, "groups of two or more"),
    "groups-too-few": (
        "solar_open",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4},
        "topk_group = 1 of 4 groups hold fewer than 3",
    ),
    "factor-zero": ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
    "dense-beyond": ("glm4_moe", {"first_k_dense_replace": 5}, "first_k_dense_replace"),
    "experts-turned-in-part": ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "ernie-head-bias": ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    "ernie-margin": ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min"),
    "hunyuan-by-layer": ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": [1, 2, 1, 1]}, "moe_topk differs between"),
    "hunyuan-widths": (
        "hunyuan_v1_moe",
        {"num_experts": 8, "moe_intermediate_size": [32] * 4},
        "moe_intermediate_size = 32 is not supported",
    ),
    "hunyuan-shared-kv": ("hunyuan_v1_moe", {"num_experts": 8, "use_cla": True}, "use_cla"),
    "minimax-turned-beyond": ("minimax_m2", {"rotary_dim": 256}, "rotary_dim"),
    "granite-zero": ("granite", {"logits_scaling": 0}, "logits_scaling"),
    "multiplier-elsewhere": ("llama", {"residual_multiplier": 0.5}, "residual_multiplier"),
    "cohere-scale-zero": ("cohere2", {"logit_scale": 0.0}, "logit_scale"),
    "window-zero": ("cohere2", {"sliding_window": 0}, "sliding_window"),
    "window-missing": ("cwm", {"sliding_window": None}, "sliding_window is missing"),
    "kinds-unknown": ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    "pattern-zero": ("exaone4", {"sliding_window": 8, "sliding_window_pattern": 0}, "sliding_window_pattern"),
    "latent-method": ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
    "latent-normalized": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    "latent-groups": ("deepseek_v3", {"n_routed_experts": 12}, "n_group = 8 does not divide 12"),
    "latent-scoring": ("kimi_k2", {"scoring_func": "softmax"}, "scoring_func"),
    "latent-odd": ("youtu", {"qk_rope_head_dim": 33}, "is odd"),
    "latent-rank": ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank must be between"),
    "latent-layers": ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 3}, "dense or sparse for each of 4 layers"),
    "mamba-heads": ("granitemoehybrid", {"mamba_n_heads": 48}, "mamba_n_heads = 48 must divide 128"),
    "mamba-head-size": ("bamba", {"mamba_d_head": 7}, "mamba_d_head must be 1, or auto"),
    "mamba-limits": ("bamba", {"time_step_limit": ["a", 1]}, "low must be a number"),
    "mamba-layers": ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "for each of 4 layers"),
    "mamba-positions": ("granitemoehybrid", {"position_embedding_type": "alibi"}, "'alibi' is not supported"),
    "bailing-two-names": ("bailing_hybrid", {"n_group": 2, "num_expert_group": 1}, "n_group|num_expert_group"),
    "two-top-ks": ("deepseek_v3", {"num_experts_per_tok": 8, "moe_k": 4}, "moe_k = 4 differs"),
    "two-counts": ("mixtral", {"num_local_experts": 8, "num_experts": 4}, "num_experts = 4 differs"),
    "null-true": ("deepseek_v3", {"rope_interleave": None}, "rope_interleave must be true or false"),
    "convolved-gelu": ("bamba", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "hybrid-gelu": ("granitemoehybrid", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "olmo-key-size": ("olmo_hybrid", {"linear_key_head_dim": 1025}, "linear_key_head_dim must be between 1 and 1024"),
    "delta-gelu": ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "kimi-gelu": ("kimi_linear", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "kimi-tied": ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "ling-tied": ("bailing_hybrid", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "gemma3-capped": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "gemma3-flat-rope": ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "has no sections"),
    "gemma3n-old-type": (
        "gemma3n_text",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "num_kv_shared_layers": 0},
        "type is not read",
    ),
    "cohere2_moe-scaling": (
        "cohere2_moe",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling",
    ),
    "lfm3-half-rotated": (
        "lfm3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        "partial_rotary_factor",
    ),
    "alpha-text": (
        "hunyuan_v1_dense",
        {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": "1000"}},
        "alpha must be a number",
    ),
}


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_refused_by_name(case: str) -> None:
    model_type, changes, message = WRONG[case]
    with pytest.raises(ModelError, match=message) as caught:
        parse(model_type, **changes)
    assert "config.json" in caught.value.message


def test_groups_of_experts_are_of_one_size_and_hold_those_of_a_token() -> None:
    assert read_expert_groups(Fields({}, "config.json"), 1, 1) == (1, 1), "a single expert is one group"
    for count, groups in itertools.product(range(1, 9), repeat=2):
        for top_groups, top_k in itertools.product(range(1, groups + 1), range(1, count + 1)):
            raw = Fields({"n_group": groups, "topk_group": top_groups}, "config.json")
            members = [expert % groups for expert in range(count)]
            size = members.count(0)
            alike = all(members.count(group) == size for group in range(groups)) and (groups == 1 or size > 1)
            if alike and top_k <= sum(group < top_groups for group in members):
                assert read_expert_groups(raw, count, top_k) == (groups, top_groups)
            else:
                with pytest.raises(ModelError, match="topk_group" if alike else "n_group"):
                    read_expert_groups(raw, count, top_k)


@pytest.mark.parametrize("model_type", REFUSED)
def test_known_families_are_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(model_type)
    assert REFUSED[model_type] in caught.value.message


def test_no_family_is_both_supported_and_refused() -> None:
    assert not set(REFUSED) & set(families())


def test_absent_fields_take_the_family_defaults() -> None:
    gemma = parse("gemma3_text", sliding_window=16)
    assert gemma.head_dim == 256 and gemma.tie_embeddings and gemma.attention_scale == 256**-0.5
    assert {spec.theta for spec in gemma.distinct_ropes} == {10000.0}, "four of six layers slide"
    assert parse("gemma2").attention_softcap == 50 and parse("gemma2").windows == (4096, None, 4096, None)
    assert parse("gemma2", attn_logit_softcapping=None).attention_softcap is None, "a null that is written stands"
    assert parse("smollm3").layer_rope(3) is None and parse("smollm3").rope_theta == 2e6
    assert parse("olmo3").windows == (4096, 4096, 4096, None)
    assert parse("cwm").windows[0] is None and parse("cwm").rope_scaling.kind == "llama3"
    assert parse("cohere2").logit_scale == 0.0625 and parse("cohere2").layer_rope(3) is None
    assert parse("ministral3").rope_scaling.query_beta == 0.1
    assert parse("phi3", rope_scaling={**LONG, "type": "su"}).rope_scaling.kind == "longrope", "its name of before"
    assert parse("arcee").activation == "relu2" and not parse("arcee").layer(0).mlp.gated
    air = parse("glm4_moe")
    assert air.layer_rope(0) == RopeSpec(10000.0, 8, air.rope_scaling) and isinstance(air.layer(0).mlp, MlpSpec)
    assert "model.layers.4.eh_proj.weight".startswith(air.ignored_prefixes), "of the layer behind the last"
    ernie = parse("ernie4_5_moe").layer(1).mlp
    assert isinstance(ernie, ExpertsSpec) and (len(ernie.experts), ernie.top_k) == (64, 6)
    assert ernie.shared is not None and ernie.shared.gate is None and ernie.shared.mlp.size == 2 * 1536
    for normalizes in (True, False):
        command = parse("cohere2_moe", expert_selection_fn="sigmoid", norm_topk_prob=normalizes).layer(0).mlp
        absent = parse("cohere2_moe", expert_selection_fn="sigmoid").layer(0).mlp
        assert (absent == command) is normalizes
    assert parse("lfm2_moe").has_recurrent is False and isinstance(parse("lfm2_moe").layer(2).mlp, ExpertsSpec)
    assert parse("minimax_m2").rope_theta == 5e6 and parse("minimax_m2", rotary_dim=64).rotary_dim == 64
    assert parse("dots1", max_window_layers=3).windows == (None, None, None, 4096)
    assert parse("dots1", max_window_layers=3, sliding_window=None).windows == ()
    four = parse("gemma4_text", num_hidden_layers=6)
    assert [spec.attention.head_dim for spec in four.layer_specs] == [256] * 5 + [512]
    assert four.layer_rope(5) == four.distinct_ropes[1] and four.rope_scaling.partial_factor == 0.25
    assert four.per_layer_width == 256 and parse("gemma4_unified_text").per_layer_width == 0


@pytest.mark.parametrize(
    "mscales", [{"mscale": 1.0, "mscale_all_dim": 0.0}, {"mscale": 0, "mscale_all_dim": 0.7}], ids=str
)
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_an_mscale_of_0_counts_as_absent(model_type: str, mscales: dict[str, float]) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    changes = {"n_routed_experts": 16, "rope_scaling": {**yarn, **mscales}}
    assert parse(model_type, **changes).rope_scaling.attention_factor == pytest.approx(1 + 0.1 * math.log(4))


@pytest.mark.parametrize("model_type", ["ernie4_5", "seed_oss"])
def test_a_null_head_dim_is_the_share_of_a_head(model_type: str) -> None:
    assert parse(model_type).head_dim == 128 and parse(model_type, head_dim=None).head_dim == 16


def test_fields_under_the_names_of_other_families() -> None:
    """transformers reads numbers of experts under several names."""
    ernie = parse("ernie4_5_moe", num_experts_per_tok=2, num_experts=8).layer(1).mlp
    assert isinstance(ernie, ExpertsSpec) and (len(ernie.experts), ernie.top_k) == (8, 2)
    hunyuan = parse("hunyuan_v1_moe", num_experts=4, num_experts_per_tok=[2] * 4).layer(0).mlp
    assert isinstance(hunyuan, ExpertsSpec) and hunyuan.top_k == 2
    mixtral = parse("mixtral", num_local_experts=8, num_experts=0, num_experts_per_tok=2).layer(0).mlp
    assert isinstance(mixtral, ExpertsSpec) and len(mixtral.experts) == 8, "configs of GGUF files have a 0"
    assert parse("olmo_hybrid", rope_parameters={"rope_theta": None}).layer_ropes == (None,) * 4
    assert parse("gpt_oss", rope_theta=777.0).rope_theta == 777.0, "the default scaling has no theta of its own"


def test_the_alpha_of_hunyuan_stretches_the_theta_once() -> None:
    alpha = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 10000.0}
    config = parse("hunyuan_v1_dense", head_dim=16, rope_parameters=alpha)
    assert config.rope_theta == pytest.approx(10000.0 * 1000.0 ** (16 / 14))
    assert config.rope_scaling.kind == parse("llama").rope_scaling.kind


def test_input_source_of_a_product() -> None:
    """The input factor can be undone only if each input is computed separately and used by this product alone."""
    assert isinstance(parse("gemma2").layer(0).input_source("qkv"), NormSpec)
    fused = parse("phi3").layer(0)
    assert fused.input_source("o") == OutputRows("qkv", 6 * 16, 2, 2, 16)
    assert fused.input_source("down") == OutputRows("gate_up", 96, 1, 1, 96)
    assert parse("arcee").layer(0).input_source("down") is None, "a square stands between"
    beside = parse("cohere2").layer(0)
    assert beside.input_source("qkv") is None and beside.input_source("gate_up") is None, "one norm makes both"
    assert beside.input_source("o") is not None
    after = parse("exaone4").layer(0)
    assert after.input_source("qkv") is None and after.input_source("gate_up") is None, "the stream itself"
    told = parse("gemma4_text").layer(0)
    assert told.input_source("o") is None, "values are normed"
    convolved = parse("lfm2", layer_types=["conv"] * 4, block_auto_adjust_ff_dim=False).layer(0)
    assert isinstance(convolved.input_source("recurrent_in"), NormSpec)
    assert convolved.input_source("recurrent_out") == OutputRows("recurrent_in", 64, 1, 1, 64), "rows of C"
    assert told.input_source("per_layer_gate") is None and told.input_source("per_layer_projection") is None


@pytest.mark.parametrize("model_type", ["mimo_v2_flash", "diffllama"])
def test_values_of_another_width_than_keys_have_a_projection(model_type: str) -> None:
    attention = parse(model_type).layer(0).attention
    assert attention.has_v_proj and attention.projected_heads != attention.query_heads + 2 * attention.kv_heads


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_gemma_rounds_the_factor_of_its_embeddings_to_their_dtype(model_type: str) -> None:
    """The factor sqrt(72) is inexact in bf16; transformers computes it in the dtype of the embeddings."""
    config = parse(model_type, hidden_size=72, head_dim=16, query_pre_attn_scalar=16)
    assert config.embedding_scale == 72**0.5 and config.round_embedding_scale


def test_full_layers_of_gemma4_have_keys_as_values() -> None:
    config = published("gemma-4-31B")
    names = {name for name, _ in config.tensors()}
    with_values = {index for index in range(config.layers) if f"model.layers.{index}.self_attn.v_proj.weight" in names}
    full = {index for index, spec in enumerate(config.layer_specs) if spec.attention.window is None}
    assert full and with_values == set(range(config.layers)) - full


@pytest.mark.parametrize(
    ("model_type", "changes"), [("mistral4", {}), ("lfm3", {"head_dim": 16}), ("olmo3", {"sliding_window": 8})]
)
def test_an_empty_rope_section_counts_as_absent(model_type: str, changes: dict[str, Any]) -> None:
    absent, empty = parse(model_type, **changes), parse(model_type, **changes, rope_scaling={})
    assert empty.distinct_ropes == absent.distinct_ropes
    assert empty.rope_scaling == absent.rope_scaling


def test_older_names_and_sizes_of_mamba() -> None:
    assert parse("mamba").local_name("backbone.embedding.weight") == "model.embed_tokens.weight"
    widths = [
        parse("mamba", intermediate_size=size, expand=3).layer(0).products()["recurrent_out"][0].in_features
        for size in (96, "absent")
    ]
    assert widths == [96, 3 * 64]


def test_the_mtp_head_of_mimo_is_not_read() -> None:
    config = parse("mimo", attention_bias=True)
    assert config.qkv_bias and not config.output_bias
    assert "model.mtp_layers.0.input_proj.weight".startswith(config.ignored_prefixes)


def _block(attention: dict[str, Any], mlp: dict[str, Any]) -> dict[str, Any]:
    return {"attention": attention, "ffn": mlp}


NO_PART, ATTENTION, MLP = {"no_op": True}, {"n_heads_in_group": 2}, {"ffn_mult": 2.0}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([_block(ATTENTION, MLP)] * 3, "must describe each layer"),
        ([_block(NO_PART, MLP)] * 4, "must describe each layer"),
        ([_block(ATTENTION, MLP)] * 3 + [_block(NO_PART, NO_PART)], "without attention and MLP"),
        ([_block({"n_heads_in_group": 3}, MLP)] * 4, "does not divide"),
        ([_block({"replace_with_linear": True}, MLP)] * 4, "replace_with_linear"),
        ([_block(ATTENTION, {"ffn_mult": None})] * 4, "ffn_mult"),
        ([7] * 4, "attention: n_heads_in_group"),
    ],
)
def test_searched_layers_that_cannot_run_are_refused(blocks: list[Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse("nemotron-nas", block_configs=blocks)
