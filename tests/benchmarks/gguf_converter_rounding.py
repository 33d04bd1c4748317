"""Rounds a model in memory as llama.cpp's converter rounds the tensors that it writes."""

import re
from typing import Any

import torch
from gguf import GGMLQuantizationType, quants

_EXACT = re.compile(
    r"\.(gate|router|proj_gate|shared_expert_gate|wg|router\.layer|router\.proj|[qkv]?_?conv1d|conv"
    r"|correction_coefs|prediction_coefs)\.weight$|\.A_log$"
)


def make_ternary(model: torch.nn.Module) -> None:
    """Round the weights as the converter does for BitNet."""
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            scale = parameter.detach().abs().mean().clamp(min=1e-5)
            parameter.data.copy_((parameter.detach() / scale).round().clamp(-1, 1) * scale)


def round_weights(model: torch.nn.Module, kind: str) -> None:
    """Round the tensors that the converter rounds: all matrices except routers, and convolutions."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or _EXACT.search(name) or model.config.model_type == "gpt_oss" and ".experts." in name:
            continue
        # The key half is stored transposed.
        if name.endswith("kv_b_proj.weight") and model.config.model_type != "minicpm3":
            settings = model.config
            size = settings.qk_nope_head_dim, settings.v_head_dim
            keys, values = parameter.detach().view(settings.num_attention_heads, sum(size), -1).split(size, dim=1)
            keys = _rounded(keys.transpose(1, 2).contiguous(), kind).transpose(1, 2)
            rounded = torch.cat((keys, _rounded(values.contiguous(), kind)), dim=1).view_as(parameter)
        elif model.config.model_type == "falcon_h1":
            factors = _multipliers(model.config, name)
            rounded = _rounded((parameter.detach() * factors).contiguous(), kind) / factors
        elif model.config.model_type == "llama4_text" and ".experts." in name:  # which holds transposes
            rounded = _rounded(parameter.detach().mT.contiguous(), kind).mT
        else:
            rounded = _rounded(parameter.detach(), kind)
        parameter.data.copy_(rounded)


def _multipliers(config: Any, name: str) -> torch.Tensor:
    """Return the factors by which the converter multiplies a matrix of Falcon-H1 before it rounds, [1] or [rows, 1]."""
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
    factors = {
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    part = name.split(".")[-2]
    if part == "in_proj":
        rows = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)[:, None]
        return rows * config.ssm_in_multiplier
    return torch.tensor([float(factors.get(part, 1.0))])


def _rounded(values: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "q8_0" and values.shape[-1] % 32 == 0:
        stored = quants.quantize(values.numpy(), GGMLQuantizationType.Q8_0)
        return torch.from_numpy(quants.dequantize(stored, GGMLQuantizationType.Q8_0))
    return values.to(torch.float16 if kind == "q8_0" else torch.bfloat16).float()
