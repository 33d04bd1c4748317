"""Phi-3, 3.5, 4 and 4-mini: Llama with q, k and v in one tensor, and gate and up in one."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix, hidden = llama_layer(config, index), f"model.layers.{index}", config.hidden_size
    qkv = LinearSpec(f"{prefix}.self_attn.qkv_proj", (config.heads + 2 * config.kv_heads) * config.head_dim, hidden)
    gate_up = LinearSpec(f"{prefix}.mlp.gate_up_proj", 2 * config.intermediate_size, hidden)
    return LayerSpec(index, replace(llama.attention, qkv=(qkv,)), replace(llama.dense_mlp, gate_up=(gate_up,)))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5)
    fields = hf_config.common(raw, handled=("partial_rotary_factor", "longrope"))
    rotary = rotary_dim(raw, fields["head_dim"])
    return ModelConfig(**fields, windows=hf_config.mistral_windows(raw, fields), rotary_dim=rotary, build_layer=layer)
