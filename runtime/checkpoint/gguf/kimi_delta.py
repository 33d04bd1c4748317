"""The tensors and keys of Kimi Delta Attention and latent attention, for all architectures that have both."""

from collections.abc import Mapping
from typing import Any

from mycli.runtime.checkpoint.gguf.experts import SIGMOID, experts_spec, leading_dense_layers, shared_size
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule, ValueChange
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.recurrent_spec import KimiDeltaSpec


def kimi_delta(config: ModelConfig) -> KimiDeltaSpec:
    """Return the first recurrent layer; all others have the same shape."""
    return next(spec.recurrent for spec in config.layer_specs if isinstance(spec.recurrent, KimiDeltaSpec))


EQUAL_HEADS = Requirement(
    "as many heads of delta attention as of latent attention", lambda config: kimi_delta(config).heads == config.heads
)


def latent_attention(config: ModelConfig) -> LatentAttentionSpec:
    """Return the first layer with latent attention; all others have the same shape."""
    return next(spec.latent for spec in config.layer_specs if spec.latent is not None)


def latent_tensors(block: str) -> Mapping[str, TensorRule]:
    """Return the rules of latent attention in `block` except those of queries and of the output."""
    return {
        "attn_q_a": TensorRule(f"{block}.q_a_proj"),
        "attn_q_a_norm": TensorRule(f"{block}.q_a_layernorm"),
        "attn_q_b": TensorRule(f"{block}.q_b_proj"),
        "attn_kv_a_mqa": TensorRule(f"{block}.kv_a_proj_with_mqa"),
        "attn_kv_a_norm": TensorRule(f"{block}.kv_a_layernorm"),
        "attn_kv_b": TensorRule(f"{block}.kv_b_proj"),
        "attn_k_b": TensorRule(f"{block}.kv_b_proj", followed_by="attn_v_b", by_head=True),
    }


def delta_tensors(block: str, out: str, decay: ValueChange) -> Mapping[str, TensorRule]:
    """Return the rules of both mixers' common linears, and of convolutions, decays and norms. decay: of A."""
    # llama.cpp wants the axes of length one.
    convolutions = {
        f"ssm_conv1d_{part}": TensorRule(
            f"{block}.{part}_conv1d",
            stored_shape=lambda config: (kimi_delta(config).width, 1, kimi_delta(config).convolution.taps),
        )
        for part in "qkv"
    }
    return {
        **{f"attn_{part}": TensorRule(f"{block}.{part}_proj") for part in "qkv"},
        "attn_output": TensorRule(f"{block}.{out}"),
        **convolutions,
        "ssm_beta": TensorRule(f"{block}.b_proj"),
        "ssm_a": TensorRule(
            f"{block}.A_log",
            change=decay,
            stored_shape=lambda config: (kimi_delta(config).heads, 1),
            suffixes={"": ""},
        ),
        "ssm_dt": TensorRule(f"{block}.dt_bias", suffixes={".bias": ""}),
        "ssm_norm": TensorRule(f"{block}.o_norm"),
    }


def read_latent_keys(model: GgufModel, rope_dim: int) -> dict[str, int | None]:
    """Return the config fields of latent attention."""
    return {
        "q_lora_rank": model.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": model.integer("attention.kv_lora_rank", low=1),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": model.integer("attention.key_length_mla", low=rope_dim + 1) - rope_dim,
        "v_head_dim": model.integer("attention.value_length_mla", low=1),
    }


def read_recurrent_layers(model: GgufModel, layers: int) -> list[bool]:
    """Return which layers are recurrent: those without key-value heads."""
    return [not heads for heads in model.layer_values("attention.head_count_kv", layers)]


def write_kimi_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of both mixers and of the experts."""
    delta, latent, mixture = kimi_delta(config), latent_attention(config), experts_spec(config)
    return {
        "attention.head_count_kv": [0 if spec.recurrent else 1 for spec in config.layer_specs],
        "attention.key_length": latent.rank + latent.rope_dim,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": latent.head_dim,
        "attention.value_length_mla": latent.value_dim,
        "attention.kv_lora_rank": latent.rank,
        "rope.dimension_count": latent.rope_dim,
        "ssm.conv_kernel": delta.convolution.taps,
        "kda.head_dim": delta.head_dim,
        "leading_dense_block_count": leading_dense_layers(config),
        "expert_shared_count": shared_size(config) // mixture.size,
        "expert_gating_func": SIGMOID,
        "expert_group_count": mixture.routing.groups,
        "expert_group_used_count": mixture.routing.top_groups,
    }
