"""Falcon (40B, 180B): groups of keys and values, a norm for attention and one for the MLP; read only."""

from dataclasses import replace

from mycli.runtime.checkpoint.gguf.architecture import Config
from mycli.runtime.checkpoint.gguf.architectures import falcon
from mycli.runtime.checkpoint.gguf.header import GgufHeader, GgufModel
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule


def has_two_norms(header: GgufHeader) -> bool:
    return "blk.0.attn_norm_2.weight" in header.tensors


def read_grouped_config(model: GgufModel, config: Config) -> Config:
    """Return the fields of all Falcons with groups of keys and values."""
    return {
        **falcon.read_falcon_config(model, config),
        "num_kv_heads": config["num_key_value_heads"],
        "new_decoder_architecture": True,
    }


_JOINED = falcon.ARCHITECTURE.layer_tensors
ARCHITECTURE = replace(
    falcon.ARCHITECTURE,
    written_types=(),
    layer_tensors={
        **{name: rule for name, rule in _JOINED.items() if name != "attn_qkv"},
        **{f"attn_{part}": TensorRule(f"self_attention.{part}_proj") for part in "qkv"},
        "attn_norm": TensorRule("ln_mlp"),
        "attn_norm_2": TensorRule("ln_attn"),
    },
    reads=lambda header, experts: not falcon.is_small(header) and has_two_norms(header),
    read_config=read_grouped_config,
)
