"""Qwen 3 Next: Gated DeltaNet and gated attention with experts; q, k, v and z by kind instead of by key head."""

from collections.abc import Iterable

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.qwen2moe import SHARED_TENSORS
from mycli.runtime.checkpoint.gguf.experts import expert_keys, shared_size_key
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import (
    GAIN_PLUS_ONE,
    LLAMA_TENSORS,
    MODEL_TENSORS,
    RowRanges,
    TensorRule,
    ValueChange,
)
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.recurrent_spec import DeltaNetSpec

DELTA_MODEL_TENSORS = {**MODEL_TENSORS, "output_norm": TensorRule("model.norm", change=GAIN_PLUS_ONE)}
DELTA_TENSORS = {
    **{name: rule for name, rule in LLAMA_TENSORS.items() if name != "ffn_norm"},
    "attn_norm": TensorRule("input_layernorm", change=GAIN_PLUS_ONE),
    "post_attention_norm": TensorRule("post_attention_layernorm", change=GAIN_PLUS_ONE),
    "attn_q_norm": TensorRule("self_attn.q_norm", change=GAIN_PLUS_ONE),
    "attn_k_norm": TensorRule("self_attn.k_norm", change=GAIN_PLUS_ONE),
    "ssm_norm": TensorRule("linear_attn.norm"),
    "ssm_conv1d": TensorRule("linear_attn.conv1d"),
    "ssm_dt": TensorRule("linear_attn.dt_bias", suffixes={".bias": ""}),
    "ssm_out": TensorRule("linear_attn.out_proj"),
    "ssm_a": TensorRule(
        "linear_attn.A_log",
        change=ValueChange(store=lambda decay: -decay.exp(), load=lambda stored: (-stored).log()),
        suffixes={"": ""},
    ),
}


def delta_net(config: ModelConfig) -> DeltaNetSpec:
    """Return the first recurrent layer; all others have the same shape."""
    return next(spec.recurrent for spec in config.layer_specs if isinstance(spec.recurrent, DeltaNetSpec))


EQUAL_SIZES = Requirement(
    "heads of values and keys of one size in linear attention",
    lambda config: delta_net(config).value_dim == delta_net(config).key_dim,
)


def read_delta_keys(model: GgufModel, config: Config) -> Config:
    """Return the config fields of Gated DeltaNet."""
    layers, heads = config["num_hidden_layers"], model.integer("ssm.time_step_rank", low=1)
    period = model.integer("full_attention_interval", 4, low=1)
    recurrent = [(index + 1) % period != 0 for index in range(layers)]
    if model.has("attention.recurrent_layers"):
        recurrent = [bool(value) for value in model.layer_values("attention.recurrent_layers", layers)]
    return {
        "layer_types": ["linear_attention" if value else "full_attention" for value in recurrent],
        "linear_conv_kernel_dim": model.integer("ssm.conv_kernel", low=1),
        "linear_key_head_dim": model.integer("ssm.state_size", low=1),
        "linear_value_head_dim": max(1, model.integer("ssm.inner_size", low=1) // heads),
        "linear_num_key_heads": model.integer("ssm.group_count", low=1),
        "linear_num_value_heads": heads,
        "attention_bias": any(name.endswith("attn_q.bias") for name in model.tensors),
    }


def write_delta_keys(config: ModelConfig) -> dict[str, int | list[bool]]:
    """Return the keys of Gated DeltaNet."""
    spec = delta_net(config)
    return {
        "ssm.conv_kernel": spec.convolution.taps,
        "ssm.state_size": spec.key_dim,
        "ssm.group_count": spec.key_heads,
        "ssm.time_step_rank": spec.heads,
        "ssm.inner_size": spec.heads * spec.value_dim,
        "attention.recurrent_layers": [layer.recurrent is not None for layer in config.layer_specs],
    }


def _by_kind(config: ModelConfig) -> Iterable[range]:
    # Hugging Face has, for each key head, its q, its k, and v and z of its value heads.
    spec = delta_net(config)
    values = spec.heads // spec.key_heads * spec.value_dim
    starts = (0, spec.key_dim, 2 * spec.key_dim, 2 * spec.key_dim + values)
    sizes = (spec.key_dim, spec.key_dim, values, values)
    for start, size in zip(starts, sizes, strict=True):
        for head in range(spec.key_heads):
            first = head * sum(sizes) + start
            yield range(first, first + size)


def _read_config(model: GgufModel, config: Config) -> Config:
    return {**read_delta_keys(model, config), "norm_topk_prob": True}


ARCHITECTURE = Architecture(
    name="qwen3next",
    model_type="qwen3_next",
    written_types=("qwen3_next",),
    requires=(EQUAL_SIZES,),
    gated_queries=True,
    has_mtp_blocks=True,
    layer_tensors={
        **DELTA_TENSORS,
        **SHARED_TENSORS,
        "ssm_in": TensorRule("linear_attn.in_proj_qkvz"),  # in files of before 2026
        "attn_qkv": TensorRule(
            "linear_attn.in_proj_qkvz",
            RowRanges(_by_kind),
            followed_by="attn_gate",
            first_rows=lambda config: delta_net(config).convolution.channels,
        ),
        "ssm_ba": TensorRule("linear_attn.in_proj_ba"),
    },
    model_tensors=DELTA_MODEL_TENSORS,
    keys=(*expert_keys(), shared_size_key()),
    read_config=_read_config,
    write_keys=write_delta_keys,
)
