"""A layer of the Llama kind, from the fields of a config. A family whose layers are others replaces what differs."""

from typing import TYPE_CHECKING

from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import AttentionSpec, LinearSpec, MlpSpec

if TYPE_CHECKING:
    from mycli.runtime.models.config import ModelConfig


def decoder_layer(config: "ModelConfig", index: int) -> LayerSpec:
    """A layer of the Llama kind: a norm before each part, q, k, v, gate and up each a tensor of its own."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    up = LinearSpec(f"{mlp}.up_proj", inner, hidden, config.mlp_bias)
    gate = LinearSpec(f"{mlp}.gate_proj", inner, hidden, config.mlp_bias)
    return LayerSpec(
        index,
        AttentionSpec(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            window=config.window(index),
            norm=config.norm_of(f"{prefix}.input_layernorm"),
            qkv=(
                LinearSpec(f"{attention}.q_proj", query, hidden, config.qkv_bias),
                LinearSpec(f"{attention}.k_proj", key, hidden, config.qkv_bias),
                LinearSpec(f"{attention}.v_proj", key, hidden, config.qkv_bias),
            ),
            q_norm=config.norm_of(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=config.norm_of(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
            o=LinearSpec(f"{attention}.o_proj", hidden, query, config.output_bias),
            rope=config.rotation(index),
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            residual=config.residual_scale,
        ),
        MlpSpec(
            size=inner,
            norm=config.norm_of(f"{prefix}.post_attention_layernorm"),
            gate_up=(up,) if config.activation == "relu2" else (gate, up),
            down=LinearSpec(f"{mlp}.down_proj", hidden, inner, config.mlp_bias),
            activation=config.activation,
            residual=config.residual_scale,
        ),
    )
