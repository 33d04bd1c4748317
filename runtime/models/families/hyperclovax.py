"""HyperCLOVA X SEED: Granite with norms after attention and MLP as well, and logits multiplied, not divided."""

from dataclasses import replace

from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.families import granite
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    attention = replace(llama.attention, output_norm=config.norm_spec(f"{prefix}.post_norm1"))
    return replace(
        llama, mixer=attention, mlp=replace(llama.dense_mlp, output_norm=config.norm_spec(f"{prefix}.post_norm2"))
    )


def read(raw: Fields) -> ModelConfig:
    config = granite.read(raw)
    return replace(
        config,
        # 1 / sqrt(head_dim) where the config gives none; Granite's default is 1.
        attention_scale=config.attention_scale if raw.has("attention_multiplier") else None,
        # Granite divides logits by logits_scaling, this family multiplies.
        logit_scale=1 / config.logit_scale,
        build_layer=layer if raw.boolean("use_post_norm", True) else llama_layer,
    )
