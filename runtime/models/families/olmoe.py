"""OLMoE 1B-7B: Llama with norms over all query heads and all key heads, and experts, 8 of 64 per token."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class OlmoeLayers:
    """Builds the layers: Llama with q and k norms over all heads, and experts."""

    mixture: MoeLayers
    clip: float | None

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        llama, prefix = llama_layer(config, index), f"model.layers.{index}.self_attn"
        attention = replace(
            llama.attention,
            q_norm=config.norm_spec(f"{prefix}.q_norm", config.heads * config.head_dim),
            k_norm=config.norm_spec(f"{prefix}.k_norm", config.kv_heads * config.head_dim),
            clip=self.clip,  # clip_qkv, after the norms
        )
        return self.mixture.replace_mlp(replace(llama, mixer=attention), config)


def read(raw: Fields) -> ModelConfig:
    fields = hf_config.common(hf_config.with_defaults(raw, rms_norm_eps=1e-5), handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "num_experts", fields["layers"], default=(64, 8))
    mixture = MoeLayers(count, RoutingSpec(top_k, raw.boolean("norm_topk_prob", False)), fields["intermediate_size"])
    clip = raw.number("clip_qkv", low=0.0) if raw.has("clip_qkv") else None
    return ModelConfig(**fields, **hf_config.attention_biases(raw), build_layer=OlmoeLayers(mixture, clip))
