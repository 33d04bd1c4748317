"""BitNet b1.58 (2B-4T), its bf16 weights: Llama with gated squared ReLU, and norms before `o` and before `down`."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    attention = replace(llama.attention, inner_norm=config.norm_spec(f"{prefix}.self_attn.attn_sub_norm"))
    # Only the bf16 weights run; the packed ternary ones have a quant_method, which is refused.
    norm = config.norm_spec(f"{prefix}.mlp.ffn_sub_norm", config.intermediate_size)
    return replace(llama, mixer=attention, mlp=replace(llama.dense_mlp, inner_norm=norm))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, rope_theta=500000.0, num_key_value_heads=5)
    return ModelConfig(
        **hf_config.common(raw, activations={"relu2": "relu2", **hf_config.ACTIVATIONS}),
        **hf_config.attention_biases(raw),
        build_layer=layer,
    )
