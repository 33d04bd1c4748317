"""FlexOlmo (7x7B): OLMo 2 with experts, routed by a softmax over all experts."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families import olmo2
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rope_theta=500000.0)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "num_experts", fields["layers"], default=(7, 5))
    routing = RoutingSpec(top_k, raw.boolean("norm_topk_prob", False))
    mixture = MoeLayers(count, routing, fields["intermediate_size"], base=olmo2.layer)
    return ModelConfig(**fields, **hf_config.attention_biases(raw), build_layer=mixture)
