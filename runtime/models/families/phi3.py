"""Phi-3, 3.5, 4 and 4-mini: Llama whose files hold q, k, v as one tensor, and gate and up as one.

Phi-3.5 and 4-mini stretch their contexts by longrope, and 4-mini turns a part of each head only.
"""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Llama's layer with two of its products stored whole."""
    llama, prefix, hidden = llama_layer(config, index), f"model.layers.{index}", config.hidden_size
    qkv = LinearSpec(f"{prefix}.self_attn.qkv_proj", (config.heads + 2 * config.kv_heads) * config.head_dim, hidden)
    gate_up = LinearSpec(f"{prefix}.mlp.gate_up_proj", 2 * config.intermediate_size, hidden)
    return LayerSpec(index, replace(llama.attention, qkv=(qkv,)), replace(llama.dense_mlp, gate_up=(gate_up,)))


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Phi-3 config.json."""
    fields = hf_config.common(raw, handled=("partial_rotary_factor", "longrope"))
    turned = rotary_dim(raw, fields["head_dim"])
    return ModelConfig(**fields, windows=hf_config.sliding_windows(raw, fields), rotary_dim=turned, build_layer=layer)
