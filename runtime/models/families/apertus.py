"""Apertus (8B, 70B): per-head norms of q and k, and an MLP without a gate whose activation xIELU has parameters."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.utils.json_fields import Fields

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    # Checkpoints hold the constants beta and eps as tensors; they are read, not assumed.
    shapes: dict[str, Shape] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    parameters = tuple((f"{prefix}.mlp.act_fn.{name}", shape) for name, shape in shapes.items())
    return replace(
        llama,
        mixer=replace(llama.attention, norm=config.norm_spec(f"{prefix}.attention_layernorm")),
        mlp=replace(llama.dense_mlp, norm=config.norm_spec(f"{prefix}.feedforward_layernorm"), parameters=parameters),
    )


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, rope_theta=12000000.0)
    raw = hf_config.with_default_rope(raw, _ROPE)
    return ModelConfig(
        **hf_config.common(raw, activations={"xielu": "xielu"}),
        **hf_config.attention_biases(raw),
        qk_norm=True,
        mlp_gate=False,
        build_layer=layer,
    )
