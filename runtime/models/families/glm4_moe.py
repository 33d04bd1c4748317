"""GLM 4.5 to 4.7 with experts (GLM-4.5-Air, GLM-4.6): Llama that turns half of each head, with biases on q, k and v,
and maybe norms of query and key heads; in all but the first layers experts, chosen by corrected sigmoids, and one that
all tokens go through.

Files hold one layer more, which predicts a token further and is not read.
"""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts, read_routing
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None, correction_bias="gate.e_score_correction_bias")


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Llama's, beside the layer that nothing reads."""
    return replace(llama_layer(config, index), ignored_prefixes=(f"model.layers.{config.layers}.",))


def read_mixture(raw: Fields, layers: int) -> MoeLayers:
    """The experts, in all but the first layers, by the keys that DeepSeek-V3's kin write."""
    count, top_k = read_expert_counts(raw, "n_routed_experts", layers, usual=(128, 8))
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
    """The ModelConfig of a GLM-4 config.json with experts."""
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5)
    fields = hf_config.common(raw, handled=("partial_rotary_factor", *EXPERT_KEYS))
    return ModelConfig(
        **fields,
        qkv_bias=raw.boolean("attention_bias", False),
        qk_norm=raw.boolean("use_qk_norm", False),
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.5),
        build_layer=read_mixture(raw, fields["layers"]),
    )
