"""MiniCPM3: latent attention; llama.cpp has the multipliers of the 4B model."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.deepseek2 import LATENT_TENSORS
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.kimi_delta import latent_attention
from mycli.runtime.models.config import ModelConfig


def _read_config(model: GgufModel, config: Config) -> Config:
    rope_dim = config["head_dim"]
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": model.integer("attention.q_lora_rank", low=1),
        "kv_lora_rank": model.integer("attention.kv_lora_rank", low=1),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": model.integer("attention.key_length", low=rope_dim + 1) - rope_dim,
        "v_head_dim": model.integer(
            "attention.value_length", config["hidden_size"] // config["num_attention_heads"], low=1
        ),
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    spec = latent_attention(config)
    return {
        "attention.head_count_kv": config.heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.value_dim,
        "attention.q_lora_rank": spec.inputs[0].out_features,
        "attention.kv_lora_rank": spec.rank,
        "rope.dimension_count": spec.rope_dim,
    }


ARCHITECTURE = Architecture(
    name="minicpm3",
    model_type="minicpm3",
    written_types=("minicpm3",),
    biases=(),
    latent=True,
    # llama.cpp requires low-rank queries, and the older form of kv_b.
    layer_tensors={name: rule for name, rule in LATENT_TENSORS.items() if name != "attn_q" and not rule.by_head},
    read_config=_read_config,
    write_keys=_write_keys,
)
