"""Test families whose published fields differ from those of transformers: EXAONE 3, Ling, DeepSeek-MoE."""

from typing import Any

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields

EXAONE = {"activation_function": "silu", "layer_norm_epsilon": 1e-5, "rope_theta": 1000000.0, "vocab_size": 102400}


@pytest.mark.parametrize(
    ("sizes", "tied", "parameters"),
    [((2560, 7168, 30, 80), True, 2.405e9), ((4096, 14336, 32, 128), False, 7.818e9)],
    ids=["2.4B", "7.8B"],
)
def test_exaone_has_as_many_parameters_as_published(sizes: tuple[int, ...], tied: bool, parameters: float) -> None:
    names = ("hidden_size", "intermediate_size", "num_layers", "head_dim")
    raw = {**EXAONE, **dict(zip(names, sizes, strict=True)), "num_attention_heads": 32, "num_key_value_heads": 8}
    fields = {**raw, "model_type": "exaone", "tie_word_embeddings": tied, "max_position_embeddings": 32768}
    assert parse_config(Fields(fields, "config.json")).parameters() == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize("key", ["layer_norm_epsilon", "rope_theta"])
def test_exaone_states_what_its_code_has_no_default_for(key: str) -> None:
    fields = {**EXAONE, "model_type": "exaone", "num_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    fields |= {"intermediate_size": 88, "max_position_embeddings": 64}
    parse_config(Fields(fields, "config.json"))
    with pytest.raises(ModelError, match="rms_norm_eps" if "norm" in key else key):
        parse_config(Fields({name: value for name, value in fields.items() if name != key}, "config.json"))


LING = {
    **{"model_type": "bailing_moe", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 157184},
    **{"max_position_embeddings": 32768, "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1},
    **{"moe_intermediate_size": 512, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4},
    **{"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5},
    **{"use_qk_norm": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "norm_head": False},
}
DEEPSEEK_MOE = {
    **{"model_type": "deepseek", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "vocab_size": 102400, "max_position_embeddings": 4096, "n_routed_experts": 64},
    **{"num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize(
    ("fields", "parameters", "active"),
    [(LING, 16.26e9, 1.43e9), (DEEPSEEK_MOE, 16.38e9, 2.83e9)],
    ids=["Ling-mini-2.0", "DeepSeek-MoE-16B"],
)
def test_mixtures_have_as_many_parameters_as_published(
    fields: dict[str, Any], parameters: float, active: float
) -> None:
    config = parse_config(Fields(fields, "config.json"))
    assert config.parameters() == pytest.approx(parameters, rel=2e-3)
    assert config.active_parameters() == pytest.approx(active, rel=2e-2)


def _ling_1(**changes: Any) -> ModelConfig:
    fields = {key: value for key, value in LING.items() if key not in ("score_function", "partial_rotary_factor")}
    return parse_config(Fields({**fields, "moe_router_enable_expert_bias": False, **changes}, "config.json"))


def test_the_first_version_of_ling_routes_by_softmax_and_rotates_whole_heads() -> None:
    config = _ling_1(n_group=1, topk_group=1, routed_scaling_factor=1.0)
    mixture = config.layer(1).mlp
    assert isinstance(mixture, ExpertsSpec) and mixture.correction_bias is None
    assert mixture.routing.scoring == "softmax" and mixture.routing.normalize
    assert config.distinct_ropes[0].dim == 128


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_head", True),
        ("norm_softmax", True),
        ("use_bias", True),
        ("score_function", "sigmoid"),  # whose files have a correction bias
        ("score_function", "relu"),
    ],
)
def test_what_ling_files_ask_for_and_no_layer_computes_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ModelError, match="moe_router_enable_expert_bias" if value == "sigmoid" else field):
        _ling_1(**{field: value})


def test_a_deepseek_moe_that_names_no_dense_layer_has_none() -> None:
    """The default of its published code; transformers has no such class."""
    fields = {key: value for key, value in DEEPSEEK_MOE.items() if key != "first_k_dense_replace"}
    config = parse_config(Fields(fields, "config.json"))
    assert all(isinstance(layer.mlp, ExpertsSpec) for layer in config.layer_specs)
