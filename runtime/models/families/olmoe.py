"""OLMoE 1B-7B: Llama with norms over all heads of queries and of keys, and experts, eight of 64 for a token.

What is projected may be clipped (`clip_qkv`), queries and keys after their norms.
"""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class OlmoeLayers:
    """What layers are made of; as `ModelConfig.build_layer`."""

    mixture: MoeLayers
    clip: float | None

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        """Llama's attention with two norms, and the experts."""
        llama, prefix = llama_layer(config, index), f"model.layers.{index}.self_attn"
        attention = replace(
            llama.attention,
            q_norm=config.norm_spec(f"{prefix}.q_norm", config.heads * config.head_dim),
            k_norm=config.norm_spec(f"{prefix}.k_norm", config.kv_heads * config.head_dim),
            clip=self.clip,
        )
        return self.mixture.replace_mlp(replace(llama, mixer=attention), config)


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of an OLMoE config.json."""
    fields = hf_config.common(hf_config.with_defaults(raw, rms_norm_eps=1e-5), handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "num_experts", fields["layers"], usual=(64, 8))
    mixture = MoeLayers(count, RoutingSpec(top_k, raw.boolean("norm_topk_prob", False)), fields["intermediate_size"])
    clip = raw.number("clip_qkv", low=0.0) if raw.has("clip_qkv") else None
    bias = raw.boolean("attention_bias", False)
    return ModelConfig(**fields, qkv_bias=bias, output_bias=bias, build_layer=OlmoeLayers(mixture, clip))
