"""Doge (20M to 320M): Qwen 3's attention with a bias of each key that depends on its value, and scaled residuals."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import KEY_BIAS_WIDTH, KeyBiasSpec, LinearSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    width = config.kv_heads * config.head_dim
    steps = LinearSpec(f"{prefix}.self_attn.dt_proj", config.kv_heads, width, config.qkv_bias)
    attention = replace(
        llama.attention,
        head_dim=config.head_dim + KEY_BIAS_WIDTH,
        key_bias=KeyBiasSpec(steps, f"{prefix}.self_attn.A"),
        scale=config.head_dim**-0.5,
    )
    gains = f"{prefix}.input_residual", f"{prefix}.post_attention_residual"
    return replace(llama, mixer=attention, residual_gains=gains)


def read(raw: Fields) -> ModelConfig:
    # Its router chooses the experts of a token by the logits of other tokens, later ones of a prompt among them.
    hf_config.require(raw, is_moe=False)
    fields = hf_config.common(raw, handled=("num_experts",))
    selected = raw.integer("keep_window_size", 2048)
    if selected < fields["max_context"]:
        # Beyond that length, a query sees only the keys with the largest biases.
        raise raw.fail(
            "keep_window_size", f"{selected} below max_position_embeddings is not supported", UNSUPPORTED_HINT
        )
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        qk_norm=True,
        windows=hf_config.mistral_windows(raw, fields),
        build_layer=layer,
    )
