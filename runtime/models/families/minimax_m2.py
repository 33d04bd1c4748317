"""MiniMax-M2 (230B-A10B): OLMoE's norms over all query heads and all key heads; sigmoid-routed experts."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families.olmoe import OlmoeLayers
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2", correction_bias="e_score_correction_bias")


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rope_theta=5000000.0, head_dim=128, num_key_value_heads=8)
    fields = hf_config.common(raw, handled=("partial_rotary_factor", *EXPERT_KEYS))
    head_dim = fields["head_dim"]
    rotary = raw.integer("rotary_dim", head_dim, low=2, high=head_dim)
    count, top_k = read_expert_counts(raw, "num_local_experts", fields["layers"], default=(256, 8))
    choice = RoutingSpec(top_k, normalize=True, scoring="sigmoid")
    mixture = MoeLayers(count, choice, fields["intermediate_size"], _NAMES)
    rotary = rotary_dim(raw, head_dim, rotary / head_dim)
    return ModelConfig(**fields, rotary_dim=rotary, build_layer=OlmoeLayers(mixture, clip=None))
