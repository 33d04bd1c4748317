"""Phi-1, 1.5 and 2: attention and a GELU MLP in parallel after one LayerNorm, partial rotation, biases everywhere."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    attention, mlp, name = llama.attention, llama.dense_mlp, f"{prefix}.self_attn"
    mixer = replace(attention, o=replace(attention.o, name=f"{name}.dense"))
    if config.qk_norm:
        q_norm, k_norm = (config.norm_spec(f"{name}.{part}_layernorm", config.head_dim) for part in "qk")
        mixer = replace(mixer, q_norm=q_norm, k_norm=k_norm)
    up, down = replace(mlp.gate_up[0], name=f"{prefix}.mlp.fc1"), replace(mlp.down, name=f"{prefix}.mlp.fc2")
    return replace(llama, mixer=mixer, mlp=replace(mlp, norm=None, gate_up=(up,), down=down), parallel=True)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_epsilon(raw, "layer_norm_eps")
    fields = hf_config.common(raw, handled=("partial_rotary_factor",), activations=hf_config.UNGATED_GELU)
    hf_config.require_untied_head(fields)
    return ModelConfig(
        **fields,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        mlp_gate=False,
        qk_norm=raw.boolean("qk_layernorm", False),
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.5),
        layer_norm=True,
        norm_bias=True,
        head_bias=True,
        final_norm="model.final_layernorm",
        build_layer=layer,
    )
