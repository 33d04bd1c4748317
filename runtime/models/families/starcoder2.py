"""StarCoder2: Llama with LayerNorms, biases everywhere, and a GELU MLP without a gate."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, mlp = llama_layer(config, index), f"model.layers.{index}.mlp"
    (up,), down = llama.dense_mlp.gate_up, llama.dense_mlp.down
    up, down = replace(up, name=f"{mlp}.c_fc"), replace(down, name=f"{mlp}.c_proj")
    return replace(llama, mlp=replace(llama.dense_mlp, gate_up=(up,), down=down))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_epsilon(raw, "norm_epsilon")
    raw = hf_config.with_defaults(raw, num_key_value_heads=2, tie_word_embeddings=True)
    bias = raw.boolean("use_bias", True)
    fields = hf_config.common(raw, activations=hf_config.UNGATED_GELU)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        mlp_gate=False,
        layer_norm=True,
        norm_bias=True,
        windows=hf_config.mistral_windows(raw, fields),
        build_layer=layer,
    )
