"""Small configurations of SmallThinker, and what turns a Mixtral into its published computation."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.family_parts import IDS

_NAMES = {".gate.": ".primary_router.", ".w1.": ".gate.", ".w2.": ".down.", ".w3.": ".up."}
_KEYS = {
    "intermediate_size": "moe_ffn_hidden_size",
    "num_local_experts": "moe_num_primary_experts",
    "num_experts_per_tok": "moe_num_active_primary_experts",
}
# With the keys of mixtral.
_CONFIG = {
    **IDS,
    "head_dim": 16,
    "hidden_act": "relu",
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_primary_router_apply_softmax": False,
    "sliding_window_size": 7,
}

# id -> (model_type, differences from SMALL)
SMALLTHINKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "smallthinker-rotating-untied": (
        "smallthinker",
        {**_CONFIG, "rope_layout": [1, 1, 1], "sliding_window_layout": [0, 0, 0], "tie_word_embeddings": False},
    ),
    "smallthinker-layouts-softmax-tied": (
        "smallthinker",
        {
            **_CONFIG,
            "rope_layout": [0, 1, 1],
            "sliding_window_layout": [0, 1, 0],
            "moe_primary_router_apply_softmax": True,
            "tie_word_embeddings": True,
        },
    ),
}


class _EarlyRouter(nn.Module):
    """Routes by the input of the layer, in place of the one it is called with."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k, self.softmax = config.num_experts_per_tok, config.moe_primary_router_apply_softmax
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))
        self.layer_input = torch.empty(0)

    def forward(self, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(self.layer_input.flatten(0, 1), self.weight)
        best, chosen = logits.topk(self.top_k, dim=-1)
        weights = best.softmax(-1) if self.softmax else best.sigmoid() / best.sigmoid().sum(-1, keepdim=True)
        return logits, weights, chosen


def restructure(model: transformers.PreTrainedModel) -> None:
    """Replace the routers, and change rotation and mask of the layers that the layouts of the config name."""
    config: Any = model.config
    for layer, rotates, slides in zip(
        model.model.layers, config.rope_layout, config.sliding_window_layout, strict=True
    ):
        router = layer.mlp.gate = _EarlyRouter(config)

        def note(_: nn.Module, inputs: tuple[Tensor, ...], router: _EarlyRouter = router) -> None:
            router.layer_input = inputs[0]

        def change(
            _: nn.Module, inputs: Any, named: dict[str, Any], rotates: int = rotates, slides: int = slides
        ) -> tuple[Any, dict[str, Any]]:
            mask, (cos, sin) = named["attention_mask"], named["position_embeddings"]
            if slides:
                new, seen = mask.shape[-2:]
                distances = torch.arange(seen - new, seen)[:, None] - torch.arange(seen)
                mask = mask.masked_fill(distances >= config.sliding_window_size, torch.finfo(mask.dtype).min)
            rotation = (cos, sin) if rotates else (torch.ones_like(cos), torch.zeros_like(sin))
            return inputs, {**named, "attention_mask": mask, "position_embeddings": rotation}

        layer.register_forward_pre_hook(note)
        layer.self_attn.register_forward_pre_hook(change, with_kwargs=True)


def publish_smallthinker(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors of a file, and return the config with the keys of published ones."""
    tensors = {}
    for name, tensor in load_file(path).items():
        block, dot, end = name.partition(".block_sparse_moe.")
        end = f".{end}"
        for old, new in _NAMES.items():
            if dot and old in end:
                end = end.replace(old, new)
                break
        tensors[f"{block}{dot}{end[1:]}"] = tensor
    save_file(tensors, path)
    unknown = ("hidden_act", "rope_parameters", "sliding_window")
    theta = config["rope_parameters"]["rope_theta"]
    return {_KEYS.get(key, key): value for key, value in config.items() if key not in unknown} | {"rope_theta": theta}
