"""Test mixtures of experts as MLX and bitsandbytes store them: routers are packed too, MLX stacks the experts."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.export._weights import Weights
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.layers.transformer import Transformer
from tests.support.engines import whole

CPU = Placement(torch.device("cpu"), torch.float32)
EXPERTS = 4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
FAMILIES = {
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    "qwen3_moe": {"num_experts": EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 128},
}
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# The tensors of a folder, the weights that they are, and the section of config.json, from names and dense tensors.
Store = Callable[[Mapping[str, str], dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor], Any]]


def affine(weight: Tensor, bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize the last dimension in groups of 32 as `mx.quantize`: w = scale * code + bias, low codes first."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    bias, scale = groups.amin(-1), (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    codes = ((groups - bias[..., None]) / scale[..., None]).round()
    shifted = codes.long().view(*weight.shape[:-1], -1, 32 // bits) << torch.arange(0, 32, bits)
    words = shifted.sum(-1)
    words = (words - (words >> 31 << 32)).to(torch.int32).view(torch.uint32)
    read = (codes * scale[..., None] + bias[..., None]).view(weight.shape)
    return {"weight": words, "scales": scale, "biases": bias}, read


def mlx(names: Mapping[str, str], dense: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Store as `mlx_lm.convert`; routers and down projections have 8 bits, all else 4."""
    packed: dict[str, Tensor] = {}
    read: dict[str, Tensor] = {}
    settings: dict[str, Any] = {"group_size": 32, "bits": 4}
    stacks: dict[str, list[str]] = {}
    for name, tensor in dense.items():
        base = name.removesuffix(".weight")
        if ".experts." in name:
            block, _, rest = base.partition(".experts.")
            linear = rest.partition(".")[2]
            linear = next((key for key, value in names.items() if value == linear), linear)
            stacks.setdefault(f"{block}.switch_mlp.{linear}", []).append(name)
        elif tensor.ndim == 2:
            gate = base.endswith(".gate")
            parts, read[name] = affine(tensor, 8 if gate else 4)
            packed |= {f"{base}.{part}": values for part, values in parts.items()}
            settings |= {base: {"group_size": 32, "bits": 8}} if gate else {}
        else:
            packed[name] = read[name] = tensor
    for base, members in stacks.items():
        if base.endswith(".bias"):
            packed[base] = torch.stack([dense[name] for name in members])
            read |= {name: dense[name] for name in members}
            continue
        bits = 8 if base.endswith("down_proj") else 4
        settings |= {base: {"group_size": 32, "bits": 8}} if bits == 8 else {}
        parts, values = affine(torch.stack([dense[name] for name in members]), bits)
        packed |= {f"{base}.{part}": tensor for part, tensor in parts.items()}
        read |= dict(zip(members, values, strict=True))
    return packed, read, {"quantization": settings, "quantization_config": settings}


def bitsandbytes(
    names: Mapping[str, str], dense: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Store as LLM.int8, which quantizes all linear layers but the head."""
    packed: dict[str, Tensor] = {}
    read: dict[str, Tensor] = {}
    for name, tensor in dense.items():
        if tensor.ndim != 2 or name in ("lm_head.weight", "model.embed_tokens.weight"):
            packed[name] = read[name] = tensor
            continue
        largest = tensor.abs().amax(1)
        packed[name] = (tensor * (127 / largest)[:, None]).round().to(torch.int8)
        packed[f"{name.removesuffix('.weight')}.SCB"] = largest
        read[name] = packed[name].float() * (largest / 127)[:, None]
    return packed, read, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}


def write_folders(store: Store, family: str, folder: Path, **settings: int) -> dict[str, Tensor]:
    """Write `packed` and, with the weights that it holds, `dense`; return these weights."""
    config = {"model_type": family, **SIZES, **FAMILIES.get(family, {}), **settings}
    generator = torch.Generator().manual_seed(0)
    for name in ("dense", "packed"):
        (folder / name).mkdir()
    (folder / "dense" / "config.json").write_text(json.dumps(config))
    shapes = open_model_folder(folder / "dense").config.tensors()
    dense = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes}
    packed, read, section = store(MIXTRAL if family == "mixtral" else {}, dense)
    save_file({name: tensor.contiguous() for name, tensor in read.items()}, folder / "dense" / "model.safetensors")
    (folder / "packed" / "config.json").write_text(json.dumps({**config, **section}))
    save_file(packed, folder / "packed" / "model.safetensors")
    return read


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("store", [mlx, bitsandbytes])
def test_a_mixture_answers_as_with_the_weights_themselves(store: Store, family: str, tmp_path: Path) -> None:
    read = write_folders(store, family, tmp_path)
    folder = open_model_folder(tmp_path / "packed")
    source, exported = SourceWeights(folder), Weights(folder)
    for name, weight in read.items():
        assert torch.allclose(source.read(name), weight, rtol=0, atol=1e-6), name
        assert torch.allclose(exported.dense(name), weight, rtol=0, atol=1e-6), name
    actual, expected = (load_model(opened, CPU).model for opened in (folder, open_model_folder(tmp_path / "dense")))
    assert isinstance(actual, Transformer) and isinstance(expected, Transformer)
    tokens = torch.arange(12).view(1, 12)
    logits = whole(expected, tokens)
    assert (whole(actual, tokens) - logits).norm() < 0.01 * logits.norm()


def take_apart(dense: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Split gate and up of each expert, of which the rows alternate in gpt-oss."""
    result: dict[str, Tensor] = {}
    for name, tensor in dense.items():
        head, linear, ending = name.partition("gate_up_proj")
        halves = (tensor[::2], tensor[1::2]) if family == "gpt_oss" else tensor.chunk(2)
        names = (f"{head}gate_proj{ending}", f"{head}up_proj{ending}") if linear else (name,)
        result |= zip(names, (half.clone() for half in (halves if linear else (tensor,))), strict=True)
    return result


def compressed(names: Mapping[str, str], dense: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Store as llm-compressor's FP8-dynamic: linear layers other than the router and the head, a scale for each row."""
    packed: dict[str, Tensor] = {}
    read: dict[str, Tensor] = {}
    for name, tensor in dense.items():
        if tensor.ndim != 2 or "router" in name or name in ("lm_head.weight", "model.embed_tokens.weight"):
            packed[name] = read[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 448
        packed[name] = (tensor / scale).to(torch.float8_e4m3fn)
        packed[f"{name}_scale"] = scale
        read[name] = packed[name].float() * scale
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "format": "float-quantized", "weights": weights}
    section = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return packed, read, {"quantization_config": {**section, "ignore": ["re:.*router", "lm_head"]}}


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss"])
@pytest.mark.parametrize("store", [mlx, compressed])
def test_gate_and_up_apart_answer_as_joined(store: Store, family: str, tmp_path: Path) -> None:
    """llm-compressor and mlx-lm take apart what transformers joins."""

    def apart(names: Mapping[str, str], dense: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        packed, values, section = store(names, take_apart(dense, family))
        if store is mlx:
            packed = {name.replace("switch_mlp", "experts"): tensor for name, tensor in packed.items()}
            keys = section["quantization"]
            section = {"quantization": {key.replace("switch_mlp", "experts"): value for key, value in keys.items()}}
        read: dict[str, Tensor] = {}
        for name, tensor in dense.items():
            halves = list(take_apart({name: tensor}, family))
            if len(halves) == 1:
                read[name] = values[name]
            elif family == "gpt_oss":
                read[name] = torch.stack([values[half] for half in halves], 1).flatten(0, 1)
            else:
                read[name] = torch.cat([values[half] for half in halves])
        return packed, read, section

    write_folders(apart, family, tmp_path, num_local_experts=EXPERTS)
    folders = [open_model_folder(tmp_path / name) for name in ("packed", "dense")]
    actual, expected = (load_model(folder, CPU).model for folder in folders)
    assert isinstance(actual, Transformer) and isinstance(expected, Transformer)
    assert len(folders[0].packings) > 3 * EXPERTS and not folders[1].packings
    tokens = torch.arange(12).view(1, 12)
    logits = whole(expected, tokens)
    assert (whole(actual, tokens) - logits).norm() < 0.01 * logits.norm()


def test_experts_of_gpt_oss_as_unsloth_stores_them(tmp_path: Path) -> None:
    """Its folders for bitsandbytes have lists of linears, and a router with a linear inside."""

    def unsloth(names: Mapping[str, str], dense: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        packed, read, section = bitsandbytes(names, dense)
        listed = {re.sub(r"experts\.(\d+)\.(gate_up|down)_proj", r"experts.\2_projs.\1", name): name for name in packed}
        return {name.replace("router", "router.linear"): packed[old] for name, old in listed.items()}, read, section

    write_folders(unsloth, "gpt_oss", tmp_path, num_local_experts=EXPERTS)
    folders = [open_model_folder(tmp_path / name) for name in ("packed", "dense")]
    actual, expected = (load_model(folder, CPU).model for folder in folders)
    assert isinstance(actual, Transformer) and isinstance(expected, Transformer)
    assert len(folders[0].packings) >= 2 * EXPERTS and not folders[1].packings
    tokens = torch.arange(12).view(1, 12)
    logits = whole(expected, tokens)
    assert (whole(actual, tokens) - logits).norm() < 0.01 * logits.norm()


def export_to_mlx(source: Path, target: Path) -> None:
    request = ExportRequest(Source(str(source), source, "", ""), open_model_folder(source), target, requantize=True)
    module, _ = find_export_target("mlx")
    module.export(request, lambda *_: None)


def test_an_export_to_mlx_needs_gate_and_up_apart(tmp_path: Path) -> None:
    """Llama 4 and gpt-oss have one linear for both, which mlx-lm does not load."""
    write_folders(bitsandbytes, "llama4_text", tmp_path, num_local_experts=EXPERTS)
    with pytest.raises(ModelError, match="gate and up"):
        export_to_mlx(tmp_path / "packed", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss"])
def test_an_export_to_mlx_of_gate_and_up_apart(family: str, tmp_path: Path) -> None:
    """mlx-lm loads gpt-oss so; its Llama 4 of text alone has no experts."""

    def apart(names: Mapping[str, str], dense: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        packed, _, section = mlx(names, take_apart(dense, family))
        return packed, dense, section

    write_folders(apart, family, tmp_path, num_local_experts=EXPERTS)
    if family == "llama4_text":
        with pytest.raises(ModelError, match="without experts"):
            export_to_mlx(tmp_path / "packed", tmp_path / "exported")
        return
    export_to_mlx(tmp_path / "packed", tmp_path / "exported")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "exported"))
    before = {name.replace("switch_mlp", "experts"): tensor for name, tensor in before.items() if "switch_mlp" in name}
    assert len(before) == 12
    for name, tensor in before.items():
        assert torch.allclose(tensor.double(), after[name].double(), rtol=0, atol=1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_to_mlx_stacks_experts(family: str, tmp_path: Path) -> None:
    """Experts are stacked: mlx-lm stacks separate ones itself, but not their scales, and refuses the folder."""
    write_folders(mlx, family, tmp_path)
    source, target = tmp_path / "packed", tmp_path / "exported"
    export_to_mlx(source, target)
    before, after = (
        {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "switch_mlp" in name}
        for folder in (source, target)
    )
    assert len(before) == 9 and before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.allclose(tensor.double(), after[name].double(), rtol=0, atol=1e-6), name
    assert not any(".experts." in name for name in load_file(target / "model.safetensors"))
    settings = [json.loads((folder / "config.json").read_text())["quantization"] for folder in (source, target)]
    (key,) = (name for name in settings[0] if name.endswith("switch_mlp.down_proj"))
    assert settings[0][key] == settings[1][key] == {"group_size": 32, "bits": 8}
