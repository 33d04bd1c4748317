"""Names and keys of published files of families that differ from one of transformers by little more."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize


def publish_pangu(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a Llama with the keys of openPangu."""
    published = {"bias" if key == "attention_bias" else key: value for key, value in config.items()}
    theta = published.pop("rope_parameters")["rope_theta"]
    return {**published, "rope_theta": theta}


def publish_baichuan(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Join q, k and v of a Llama as Baichuan does, and return the config with the keys of published ones."""
    tensors = load_file(path)
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        tensors[name.replace("q_proj", "W_pack")] = torch.cat(parts)
    save_file(tensors, path)
    unknown = ("rope_parameters", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias")
    return {key: value for key, value in config.items() if key not in unknown}


def publish_maincoder(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Give a dense Hunyuan the names and the interleaved rotation of Maincoder, and return its config."""
    names = {"query_layernorm": "q_norm", "key_layernorm": "k_norm", ".mlp.": ".feed_forward."}
    tensors = {}
    for name, tensor in load_file(path).items():
        stored = name
        for old, new in names.items():
            stored = stored.replace(old, new)
        if name.split(".")[-2] in ("q_proj", "k_proj", "query_layernorm", "key_layernorm"):
            # Pairs (i, i + dim / 2) become neighbours; the gains of norms after the rotation follow them.
            heads = tensor.view(-1, 2, config["head_dim"] // 2, *tensor.shape[1:])
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        tensors[stored] = tensor.contiguous()
    save_file(tensors, path)
    size = {"intermediate_size_mlp": config["intermediate_size"], "use_qk_norm": True}
    return {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")} | size


def normalize_head(model: transformers.PreTrainedModel) -> None:
    """Divide the rows of the head by their norms, as Baichuan 2 does before the first token."""
    head = model.get_output_embeddings().weight
    head.data = normalize(head.data)
