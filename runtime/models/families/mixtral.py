"""Mixtral 8x7B and 8x22B: Mistral with experts, a softmax over the two selected of eight."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1000000.0)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "num_local_experts", fields["layers"], default=(8, 2))
    mixture = MoeLayers(count, RoutingSpec(top_k, normalize=True), fields["intermediate_size"], names=_NAMES)
    return ModelConfig(**fields, windows=hf_config.mistral_windows(raw, fields), build_layer=mixture)
