"""Saves gpt-oss as published: the experts of a transformers model rounded to MXFP4, the rest unchanged."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat((_VALUES, -_VALUES))


def rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round fp32 [experts, rows, inputs] to MXFP4: values, blocks uint8 [..., inputs / 32, 16] and exponents uint8."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    codes = ((groups / exponent.exp2()).unsqueeze(-1) - _VALUES).abs().argmin(-1)
    values = (_VALUES[codes] * exponent.exp2()).flatten(-2)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return values, blocks, (exponent.squeeze(-1) + 127).to(torch.uint8)


def save_mxfp4(reference: transformers.PreTrainedModel, folder: Path) -> None:
    """Save to `folder` and set the experts of `reference` to the saved values; its modules store them transposed."""
    state = {name: tensor.detach().clone() for name, tensor in reference.state_dict().items()}
    if reference.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, module in reference.named_modules():
        if not name.endswith(".experts"):
            continue
        for own in ("gate_up_proj", "down_proj"):
            values, blocks, scales = rounded(getattr(module, own).detach().mT.contiguous())
            getattr(module, own).data.copy_(values.mT)
            del state[f"{name}.{own}"]
            state |= {f"{name}.{own}_blocks": blocks, f"{name}.{own}_scales": scales}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {
        **reference.config.to_dict(),
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept},
    }
    (folder / "config.json").write_text(json.dumps(config))
