"""Published names of Ling and DeepSeek-MoE, in place of those of the models that transformers computes them as."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# Within the model, in the order of application.
_BAILING = (
    (r"^model\.embed_tokens\.", "model.word_embeddings."),
    (r"\.self_attn\.o_proj\.", ".attention.dense."),
    (r"\.self_attn\.q_norm\.", ".attention.query_layernorm."),
    (r"\.self_attn\.k_norm\.", ".attention.key_layernorm."),
    (r"\.e_score_correction_bias$", ".expert_bias"),
)
_BAILING_KEYS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "attention_bias": "use_qkv_bias",
}
_DEEPSEEK_KEYS = {"num_experts": "n_routed_experts", "qkv_bias": "attention_bias"}


def join_heads(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a model to those of Ling, with q, k and v as one."""
    for name in [name for name in tensors if ".self_attn.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        tensors[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
    for pattern, name in _BAILING:
        tensors = {re.sub(pattern, name, stored): tensor for stored, tensor in tensors.items()}
    return tensors


def publish_bailing(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors of a GLM 4.5 to Ling 2.0's, and return the config with the keys of published ones."""
    save_file(join_heads(load_file(path)), path)
    published = {_BAILING_KEYS.get(key, key): value for key, value in config.items()}
    scores = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return {**published, **scores, "num_nextn_predict_layers": 0}


class _Open(nn.Module):
    """A gate that lets everything pass."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.new_full((*hidden.shape[:-1], 1), 100.0)  # its sigmoid is 1


def without_shared_gates(model: nn.Module) -> None:
    """Take the gates of its shared experts from a Qwen 2 with experts: DeepSeek-MoE remains."""
    for module in list(model.modules()):
        if "shared_expert_gate" in module._modules:
            module.shared_expert_gate = _Open()


def publish_deepseek(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors of a Qwen 2 without gates to DeepSeek-MoE's, and return the config with published keys."""
    tensors = load_file(path)
    save_file({name.replace(".shared_expert.", ".shared_experts."): value for name, value in tensors.items()}, path)
    shared, dense = config.pop("shared_expert_intermediate_size"), len(config.pop("mlp_only_layers"))
    published = {_DEEPSEEK_KEYS.get(key, key): value for key, value in config.items()}
    return {
        **published,
        "n_shared_experts": shared // config["moe_intermediate_size"],
        "first_k_dense_replace": dense,
        "scoring_func": "softmax",
    }


def publish_sarvam(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a DeepSeek-V3 with the keys of Sarvam's; its tensors have the same names."""
    published = {_BAILING_KEYS.get(key, key): value for key, value in config.items() if key != "attention_bias"}
    rope = {**config["rope_parameters"], "type": "deepseek_yarn"}
    del published["rope_parameters"]
    return {**published, "rope_scaling": {key: value for key, value in rope.items() if key != "rope_type"}}


def publish_ling_1(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors of a DeepSeek-MoE to those of Ling's first version, and return the config with its keys."""
    save_file(join_heads(load_file(path)), path)
    published = {_BAILING_KEYS.get(key, key): value for key, value in config.items() if key != "scoring_func"}
    return {**published, "model_type": "bailing_moe"}
