"""Nemotron-H: layers of one part each, Mamba-2, attention or an MLP; arrays of key heads and MLP sizes say which."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.mamba import (
    CONVOLUTION_BIAS,
    has_bias,
    mamba_tensors,
    read_mamba_keys,
    write_mamba_keys,
)
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.part_spec import AttentionSpec

NEMOTRON_FIELDS = {
    "conv_kernel": "conv_kernel",
    "state_size": "ssm_state_size",
    "group_count": "n_groups",
    "time_step_rank": "mamba_num_heads",
}
NEMOTRON_MODEL_TENSORS = {**MODEL_TENSORS, "output_norm": TensorRule("model.norm_f")}
NEMOTRON_TENSORS = {
    "attn_norm": TensorRule("norm"),
    "attn_q": TensorRule("mixer.q_proj"),
    "attn_k": TensorRule("mixer.k_proj"),
    "attn_v": TensorRule("mixer.v_proj"),
    "attn_output": TensorRule("mixer.o_proj"),
    "ffn_up": TensorRule("mixer.up_proj"),
    "ffn_down": TensorRule("mixer.down_proj"),
    **mamba_tensors("mixer"),
}
BY_LAYER = ("attention.head_count_kv", "feed_forward_length")


def has_experts(config: ModelConfig) -> bool:
    return any(isinstance(spec.mlp, ExpertsSpec) for spec in config.layer_specs)


def read_layers(model: GgufModel, config: Config, mlp: str) -> Config:
    """Return the config fields of the layers; `mlp` is the kind of those that are neither Mamba-2 nor attention."""
    layers = config["num_hidden_layers"]
    heads, sizes = (model.layer_values(key, layers) for key in BY_LAYER)
    kinds = zip(heads, sizes, strict=True)
    return {
        **read_mamba_keys(model, NEMOTRON_FIELDS, "mamba_head_dim"),
        "layers_block_type": ["attention" if count else mlp if size else "mamba" for count, size in kinds],
        "use_conv_bias": has_bias(model, "ssm_conv1d"),
        "use_bias": has_bias(model, "ssm_in"),
        "mlp_bias": has_bias(model, "ffn_up") or has_bias(model, "ffn_up_shexp"),
        # Nothing rotates; llama.cpp's converter writes a dimension_count nevertheless.
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]},
        "partial_rotary_factor": 1.0,
    }


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of the layers."""
    specs = config.layer_specs
    return {
        **write_mamba_keys(config),
        "attention.layer_norm_epsilon": float(config.rms_norm_eps),  # llama.cpp requires both
        "attention.head_count_kv": [
            spec.mixer.kv_heads if isinstance(spec.mixer, AttentionSpec) else 0 for spec in specs
        ],
        "feed_forward_length": [0 if spec.mlp is None else spec.mlp.size for spec in specs],
    }


ARCHITECTURE = Architecture(
    name="nemotron_h",
    model_type="nemotron_h",
    written_types=("nemotron_h",),
    requires=(CONVOLUTION_BIAS,),
    biases=(*ALL_BIASES, "ssm_conv1d"),
    writes=lambda config: not has_experts(config),
    layer_tensors=NEMOTRON_TENSORS,
    model_tensors=NEMOTRON_MODEL_TENSORS,
    by_layer=BY_LAYER,
    epsilon_field="layer_norm_epsilon",
    read_config=lambda model, config: read_layers(model, config, "mlp"),
    write_keys=write_layers,
)
