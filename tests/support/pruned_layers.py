"""Makes a Llama as Nvidia's architecture search does: layers without attention or MLP, or with smaller ones."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMlp(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def prune(model: transformers.PreTrainedModel) -> None:
    """Replace the parts of the layers by those that `block_configs` of the config describes."""
    config: Any = model.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    for layer, block in zip(model.model.layers, config.block_configs, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        if block["attention"]["no_op"]:
            layer.self_attn, layer.input_layernorm = _NoAttention(), nn.Identity()
        else:
            attention.num_key_value_groups = block["attention"]["n_heads_in_group"]
            rows = heads // attention.num_key_value_groups * config.head_dim
            attention.k_proj, attention.v_proj = (nn.Linear(hidden, rows, bias=False) for _ in range(2))
        if block["ffn"]["no_op"]:
            layer.mlp, layer.post_attention_layernorm = _NoMlp(), nn.Identity()
        else:
            size = int(2 * block["ffn"]["ffn_mult"] * hidden / 3)
            mlp.gate_proj, mlp.up_proj = (nn.Linear(hidden, size, bias=False) for _ in range(2))
            mlp.down_proj = nn.Linear(size, hidden, bias=False)
