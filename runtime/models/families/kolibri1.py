"""Kolibri 1: EXAONE 4's attention, norms around each part, experts chosen by corrected logits, a shared expert."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec
from mycli.runtime.models.families import exaone4
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class KolibriLayers:
    mixture: MoeLayers

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        llama, prefix = llama_layer(config, index), f"model.layers.{index}"
        attention = replace(llama.attention, output_norm=config.norm_spec(f"{prefix}.post_attn_norm"))
        mlp = replace(llama.dense_mlp, output_norm=config.norm_spec(f"{prefix}.post_ffn_norm"))
        layer = self.mixture.replace_mlp(replace(llama, mixer=attention, mlp=mlp), config)
        assert isinstance(layer.mlp, ExpertsSpec)
        # The only tensor of the experts that checkpoints do not keep under `mlp`.
        bias = f"{prefix}.moe.router.expert_bias", (self.mixture.count,)
        return replace(layer, mlp=replace(layer.mlp, correction_bias=bias))


def read(raw: Fields) -> ModelConfig:
    # No layer has an MLP, so configs have no intermediate_size.
    raw = hf_config.with_defaults(
        raw, head_dim=128, num_key_value_heads=4, sliding_window=513, sliding_window_pattern=5, intermediate_size=1
    )
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    key = "num_local_experts" if raw.has("num_local_experts") else "num_experts"
    count, top_k = read_expert_counts(raw, key, fields["layers"], default=(384, 6))
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, raw.boolean("norm_topk_prob", False), scoring="sigmoid_of_corrected"),
        raw.integer("moe_intermediate_size", 512),
        ExpertNames(shared="shared_experts", shared_gate=None),
        shared=raw.integer("shared_expert_intermediate_size", 512),
    )
    return ModelConfig(
        **fields, **exaone4.windows_and_ropes(raw, fields), qk_norm=True, build_layer=KolibriLayers(mixture)
    )
