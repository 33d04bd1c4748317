"""GLM 4.5 to 4.7 (GLM-4.5-Air, GLM-4.6): sigmoid-routed experts with a correction bias, and a shared expert."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts, read_routing
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None, correction_bias="gate.e_score_correction_bias")


def layer(config: ModelConfig, index: int) -> LayerSpec:
    # Checkpoints contain the MTP head, as one more layer or under a name of its own, which is not used.
    return replace(llama_layer(config, index), ignored_prefixes=(f"model.layers.{config.layers}.", "mtp."))


def read_experts(raw: Fields, layers: int) -> MoeLayers:
    """Read experts from the keys of DeepSeek-V3 and its relatives."""
    count, top_k = read_expert_counts(raw, "n_routed_experts", layers, default=(128, 8))
    size = raw.integer("moe_intermediate_size", 1408)
    return MoeLayers(
        count,
        read_routing(raw, count, top_k),
        size,
        _NAMES,
        dense=frozenset(range(raw.integer("first_k_dense_replace", 1, low=0, high=layers))),
        shared=size * raw.integer("n_shared_experts", 1, low=0, high=count),
        base=layer,
    )


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, num_key_value_heads=8)
    fields = hf_config.common(raw, handled=("partial_rotary_factor", *EXPERT_KEYS))
    return ModelConfig(
        **fields,
        qkv_bias=raw.boolean("attention_bias", False),
        qk_norm=raw.boolean("use_qk_norm", False),
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.5),
        build_layer=read_experts(raw, fields["layers"]),
    )
