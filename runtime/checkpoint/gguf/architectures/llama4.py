"""Llama 4 (Scout, Maverick), text model: attention in chunks, layers without rotation, experts with weighted inputs."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.experts import expert_keys, experts_spec
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec

# llama.cpp has no keys for these.
_CHUNK, _PERIOD, _FLOOR, _SCALE = 8192, 4, 8192, 0.1
_UNNORMED_EXPERTS = 128  # Maverick, whose queries and keys have no norm


def _read_config(model: GgufModel, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    rotates = [(index + 1) % _PERIOD != 0 for index in range(layers)]
    if model.has("attention.sliding_window") and not model.integer("attention.sliding_window"):  # MobileLLM-R1
        return {
            "intermediate_size_mlp": config["intermediate_size"],
            "attention_bias": "blk.0.attn_q.bias" in model.tensors,
            "attention_chunk_size": None,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1] * layers,
            "layer_types": ["full_attention"] * layers,
        }
    return {
        "intermediate_size_mlp": config["intermediate_size"],
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": _FLOOR,
        "attn_scale": _SCALE,
        "no_rope_layers": [int(value) for value in rotates],
        "layer_types": ["chunked_attention" if value else "full_attention" for value in rotates],
        "use_qk_norm": model.integer("expert_count") != _UNNORMED_EXPERTS,
    }


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    mlps = [layer.mlp for layer in config.layer_specs]
    dense = [layer.dense_mlp.size for layer in config.layer_specs if not isinstance(layer.mlp, ExpertsSpec)]
    return {
        "feed_forward_length": dense[0] if dense else config.intermediate_size,
        "interleave_moe_layer_step": 1 + next(i for i, mlp in enumerate(mlps) if isinstance(mlp, ExpertsSpec)),
    }


ARCHITECTURE = Architecture(
    name="llama4",
    model_type="llama4_text",
    written_types=("llama4_text",),
    biases=(),
    requires=(
        Requirement("the whole of each head rotated", lambda config: (config.rotary_dim or 0) in (0, config.head_dim)),
        Requirement("experts", lambda config: any(isinstance(layer.mlp, ExpertsSpec) for layer in config.layer_specs)),
    ),
    layer_tensors={
        **{name: rule for name, rule in LLAMA_TENSORS.items() if not name.startswith("ffn_")},
        "ffn_norm": TensorRule("post_attention_layernorm"),
        **{f"ffn_{part}": TensorRule(f"feed_forward.{part}_proj") for part in ("gate", "up", "down")},
        **{
            f"ffn_{part}_shexp": TensorRule(f"feed_forward.shared_expert.{part}_proj")
            for part in ("gate", "up", "down")
        },
        "ffn_gate_inp": TensorRule("feed_forward.router"),
        "ffn_gate_exps": TensorRule(
            "feed_forward.experts.{expert}.gate_up_proj",
            followed_by="ffn_up_exps",
            first_rows=lambda config: experts_spec(config).size,
        ),
        "ffn_down_exps": TensorRule("feed_forward.experts.{expert}.down_proj"),
    },
    keys=(
        *expert_keys("num_local_experts", size="intermediate_size"),
        GgufKey("interleave_moe_layer_step", "interleave_moe_layer_step", required=True),
    ),
    read_config=_read_config,
    write_keys=_write_keys,
)
