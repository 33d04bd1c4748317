"""Llama Nemotron of Nvidia's architecture search, DeciLM: Llama with layers without attention or MLP."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, linear_biases
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS, RowOrder, TensorRule

_HEADS, _KV_HEADS, _SIZE = "attention.head_count", "attention.head_count_kv", "feed_forward_length"


def _attention(heads: int, kv_heads: int) -> dict[str, Any]:
    if not kv_heads:  # with heads, their linear layer remains
        return {"replace_with_linear": True} if heads else {"no_op": True}
    return {"n_heads_in_group": heads // kv_heads}


def _mlp(size: int, hidden: int) -> dict[str, Any]:
    # Two thirds of the multiple, rounded up to a multiple of 256: a little less than the size keeps it from the next.
    return {"ffn_mult": 1.5 * (size - 0.5) / hidden} if size else {"no_op": True}


def _by_layer(model: GgufModel, key: str, layers: int) -> list[int]:
    values = model.layer_values(key)
    return values * layers if len(values) == 1 else model.layer_values(key, layers)  # DeciLM 7B has one number of heads


def _read_config(model: GgufModel, config: Config) -> Config:
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    counts = [_by_layer(model, key, layers) for key in (_HEADS, _KV_HEADS, _SIZE)]
    blocks = [
        {"attention": _attention(heads, kv_heads), "ffn": _mlp(size, hidden)}
        for heads, kv_heads, size in zip(*counts, strict=True)
    ]
    return {"block_configs": blocks, **linear_biases(model, config)}


ARCHITECTURE = Architecture(
    name="deci",
    model_type="nemotron-nas",
    layer_tensors={
        **PAIRED_TENSORS,  # but the number of heads differs by layer
        "attn_k": TensorRule("self_attn.k_proj", RowOrder(lambda config: (-1, 2, config.head_dim // 2), (0, 2, 1))),
    },
    by_layer=(_HEADS, _KV_HEADS, _SIZE),
    read_config=_read_config,
)
