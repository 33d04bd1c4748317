"""Sarvam (105B): DeepSeek-V3 with the keys of Ling."""

from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import deepseek_v3
from mycli.runtime.utils.json_fields import Fields

_KEYS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
# The defaults of vLLM's and of the published code differ.
_REQUIRED = ("num_experts", "num_experts_per_tok", "num_shared_experts", "moe_intermediate_size", "kv_lora_rank")


def read(raw: Fields) -> ModelConfig:
    for key in _REQUIRED:
        raw.integer(key, low=0)
    hf_config.require(raw, score_function="sigmoid", moe_router_enable_expert_bias=True, use_bias=False)
    hf_config.require(raw, moe_shared_expert_intermediate_size=raw.integer("moe_intermediate_size"))
    raw = hf_config.renamed(raw, _KEYS)
    raw = hf_config.with_defaults(raw, q_lora_rank=None, n_group=1, topk_group=1, first_k_dense_replace=1)
    ropes = {key: _yarn(raw.values[key]) for key in ("rope_parameters", "rope_scaling") if key in raw.values}
    return deepseek_v3.read(Fields({**raw.values, **ropes}, raw.source))


def _yarn(rope: Any) -> Any:
    # The name is vLLM's, for yarn with DeepSeek's two magnitudes.
    if not isinstance(rope, dict):
        return rope
    return {key: "yarn" if value == "deepseek_yarn" else value for key, value in rope.items()}
