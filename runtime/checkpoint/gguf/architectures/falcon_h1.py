"""Falcon-H1: attention and Mamba-2 side by side; weights are stored multiplied by the multipliers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mycli.runtime.checkpoint.gguf.architecture import QKV_BIASES, Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.mamba import (
    CONVOLUTION_BIAS,
    has_bias,
    mamba,
    mamba_tensors,
    read_hybrid_fields,
    write_mamba_keys,
)
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, MODEL_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import LayerSpec


@dataclass(frozen=True)
class _Plain:
    """Builds the layers of `layers` without multipliers."""

    layers: Callable[[ModelConfig, int], LayerSpec]

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        spec = self.layers(config, index)
        attention, mixer, mlp = spec.attention, spec.state_space, spec.dense_mlp
        assert attention.norm is not None and mixer is not None and mixer.norm is not None
        return replace(
            spec,
            mixer=replace(attention, norm=replace(attention.norm, factor=1.0), residual_scale=1.0),
            state_space=replace(mixer, norm=replace(mixer.norm, factor=1.0), residual_scale=1.0, multipliers=()),
            mlp=replace(mlp, gate_scale=1.0, residual_scale=1.0),
        )


def _factors(config: ModelConfig, tensor: str) -> tuple[float, ...]:
    """Return what llama.cpp's converter multiplies the rows of a matrix by."""
    part, kind = tensor.split(".")[-2:] if "." in tensor else (tensor, "")
    if kind != "weight":
        return ()
    spec = config.layer_specs[0]
    attention, mixer, mlp = spec.attention, mamba(config), spec.dense_mlp
    assert attention.norm is not None and mixer.norm is not None
    entry = attention.norm.factor
    by_part = {
        "q_proj": entry,
        "k_proj": entry * (config.attention_scale or 1.0) * config.head_dim**0.5,
        "v_proj": entry,
        "o_proj": attention.residual_scale,
        "gate_proj": mlp.gate_scale,
        "down_proj": mlp.residual_scale,
        "out_proj": mixer.residual_scale,
        "embed_tokens": config.embedding_scale,
        "lm_head": config.logit_scale,
    }
    if part == "in_proj":
        states = mixer.groups * mixer.state_dim
        sizes = (mixer.inner, mixer.inner, states, states, mixer.heads)
        values = zip(mixer.multipliers or (1.0,) * len(sizes), sizes, strict=True)
        rows = tuple(mixer.norm.factor * value for value, size in values for _ in range(size))
        return () if set(rows) == {1.0} else rows
    factor = by_part.get(part, 1.0)
    return () if abs(factor - 1.0) < 1e-12 else (factor,)


def _without_multipliers(config: ModelConfig) -> ModelConfig:
    # Biases are not multiplied by the factors of inputs, nor a tied head by that of the embedding: such a model stays
    # as it is, and is refused for its multipliers.
    tensors = {tensor for tensor, _ in config.tensors()}
    biased = (tensor.removesuffix("bias") + "weight" for tensor in tensors if tensor.endswith(".bias"))
    tied = config.tie_embeddings and {config.embedding_scale, config.logit_scale} != {1.0}
    if tied or any(_factors(config, tensor) for tensor in biased):
        return config
    scale = config.head_dim**-0.5
    return replace(
        config, attention_scale=scale, embedding_scale=1.0, logit_scale=1.0, build_layer=_Plain(config.build_layer)
    )


def _read_config(model: GgufModel, config: Config) -> Config:
    return {
        **read_hybrid_fields(model),
        "mamba_d_ssm": model.integer("ssm.inner_size", low=1),
        "projectors_bias": has_bias(model, "ssm_out"),
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in model.tensors),
        "mamba_norm_before_gate": False,  # llama.cpp's order
        "mlp_bias": has_bias(model, "ffn_up"),
    }


ARCHITECTURE = Architecture(
    name="falcon-h1",
    model_type="falcon_h1",
    written_types=("falcon_h1",),
    requires=(CONVOLUTION_BIAS,),
    folded=_without_multipliers,
    factors=_factors,
    # llama.cpp reads a bias of attn_output and does not add it.
    biases=(*QKV_BIASES, "ffn_gate", "ffn_up", "ffn_down", "ssm_conv1d"),
    layer_tensors={
        **LLAMA_TENSORS,
        **mamba_tensors("mamba"),
        "ffn_norm": TensorRule("pre_ff_layernorm", suffixes={"": ".weight"}),
        "ffn_gate": TensorRule("feed_forward.gate_proj"),
        "ffn_up": TensorRule("feed_forward.up_proj"),
        "ffn_down": TensorRule("feed_forward.down_proj"),
    },
    model_tensors={**MODEL_TENSORS, "output_norm": TensorRule("model.final_layernorm")},
    read_config=_read_config,
    write_keys=write_mamba_keys,
)
