"""LoRA adapters for tests: random matrices for modules of a small model, in PEFT's layout or GGUF."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from torch import Tensor

from mycli.runtime.checkpoint.open_folder import open_model_folder

QUERIES, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
LORA: Mapping[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/base",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "use_dora": False,
    "use_rslora": False,
}


def low_rank(module: str, shape: tuple[int, ...], rank: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Return A and B of one module, fp32, as PEFT names them; their product is about as large as a weight."""
    generator = torch.Generator().manual_seed(seed)
    name = f"base_model.model.{module}"
    return {
        f"{name}.lora_A.weight": torch.randn(rank, shape[1], generator=generator) * 0.2,
        f"{name}.lora_B.weight": torch.randn(shape[0], rank, generator=generator) * 0.2,
    }


def tensors_for(model: Path, *modules: str, ranks: Mapping[str, int] | None = None) -> dict[str, Tensor]:
    shapes, found = dict(open_model_folder(model).config.tensors()), dict[str, Tensor]()
    for seed, module in enumerate(modules):
        found |= low_rank(module, shapes[f"{module}.weight"], (ranks or {}).get(module, 4), seed)
    return found


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**LORA, **changes}))
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def write_gguf_adapter(
    path: Path, tensors: Mapping[str, Any], alpha: float = 8.0, kind: str = "lora", type_: str = "adapter"
) -> Path:
    """Write arrays by their names in GGUF as convert_lora_to_gguf.py does."""
    writer = GGUFWriter(path, "llama")
    writer.add_type(type_)
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
