"""Test folders whose weights mlx-lm changed as it converted them, against transformers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from tests.runtime.checkpoint.test_stored_mixtures import affine
from tests.support.engines import whole
from tests.support.families import CASES, make

CPU = Placement(torch.device("cpu"), torch.float32)
LATENT = "deepseek_v3-groups-yarn"
FAMILIES = (
    LATENT,
    "kimi_linear-8top3",
    "qwen3_next-8top3",
    "qwen3_5-delta",
    "nemotron_h-every-kind",
    "lfm2_moe-8top3-tied",
    "mamba2-odd-sizes-biases-tied",
    "granitemoehybrid-8top3",
    "granitemoehybrid-dense-odd-sizes-rope-biases-tied",
    "mixtral-4top2",
    "bailing_moe-8top2-biases",
    "gpt_neox-parallel",
)
ROLES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
GAINS = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
Tensors = dict[str, Tensor]


def split_heads(weight: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    heads = weight.view(config["num_attention_heads"], -1, config["kv_lora_rank"])
    nope = config["qk_nope_head_dim"]
    return {"embed_q": heads[:, :nope].transpose(1, 2), "unembed_out": heads[:, nope:]}


def mlx_name(family: str, name: str) -> str:
    if family == "kimi_linear":
        name = name.replace(".block_sparse_moe.", ".mlp.").replace("mlp.gate.e_score", "mlp.e_score")
        name = re.sub(r"\.([qkv])_conv1d\.", r".\1_conv.conv.", name)
    if family == "bailing_moe" and not name.endswith(".expert_bias"):
        name = name.replace(".mlp.gate.", ".mlp.gate.gate_proj.")
    if family == "gpt_neox":
        name = f"model.{name.removeprefix('gpt_neox.')}".replace("model.layers.", "model.h.")
    if family == "lfm2_moe":
        name = re.sub(r"\.feed_forward\.(w[123])\.", lambda found: f".feed_forward.{ROLES[found[1]]}.", name)
    return name


def as_mlx(family: str, stored: Tensors, config: dict[str, Any]) -> Tensors:
    """Return the tensors as the `sanitize` of mlx-lm's models changes them."""
    result: Tensors = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in stored.items():
        place = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name)
        if place is not None:
            role = {"up_proj": "fc1", "down_proj": "fc2"} if family == "nemotron_h" else ROLES
            stack = f"{place[1]}.switch_mlp.{role.get(place[3], place[3])}.weight"
            experts.setdefault(mlx_name(family, stack), {})[int(place[2])] = tensor
        elif name.endswith(".block_sparse_moe.input_linear.weight"):  # Granite stacks them itself
            base = name.removesuffix("input_linear.weight")
            result |= zip(
                (f"{base}switch_mlp.{role}.weight" for role in ("gate_proj", "up_proj")),
                tensor.chunk(2, 1),
                strict=True,
            )
        elif name.endswith(".block_sparse_moe.output_linear.weight"):
            result[name.replace("output_linear", "switch_mlp.down_proj")] = tensor
        elif ".shared_mlp." in name and not config.get("num_local_experts"):
            base = name.partition("shared_mlp.")[0] + "mlp."
            parts = {"gate_proj": tensor[: len(tensor) // 2], "up_proj": tensor[len(tensor) // 2 :]}
            parts = {"down_proj": tensor} if "output_linear" in name else parts
            result |= {f"{base}{part}.weight": half for part, half in parts.items()}
        elif name.endswith(".kv_b_proj.weight"):
            halves = split_heads(tensor, config)
            result |= {name.replace("kv_b_proj", half): weight for half, weight in halves.items()}
        elif tensor.ndim == 3 and "conv" in name:
            result[mlx_name(family, name)] = tensor.moveaxis(2, 1)
        elif family in ("qwen3_next", "qwen3_5_text") and name.removesuffix(".weight").endswith(GAINS):
            result[name] = tensor + 1.0
        else:
            result[mlx_name(family, name)] = tensor
    result |= {name: torch.stack([parts[index] for index in sorted(parts)]) for name, parts in experts.items()}
    return {name: tensor.contiguous() for name, tensor in result.items()}


def convert(folder: Path, case: str, change: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> Any:
    family, settings = CASES[case]
    reference = make(folder, family, settings)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file(change(as_mlx(family, tensors, config)), folder / "model.safetensors")
    return reference


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    reference, folder = convert(tmp_path, case), open_model_folder(tmp_path)
    model = load_model(folder, CPU).model
    tokens = torch.arange(3, 23).view(1, 20)
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()
    checkpoint = folder.checkpoint()
    for name, entry in checkpoint.manifest.tensors.items():
        assert entry.nbytes == sum(memoryview(chunk).nbytes for chunk in checkpoint.chunks(name)), name


def test_gains_are_copied_without_what_the_family_adds(tmp_path: Path) -> None:
    reference = convert(tmp_path, "qwen3_5-delta")
    checkpoint = open_model_folder(tmp_path).checkpoint()
    for name, weight in reference.state_dict().items():
        if name.removesuffix(".weight").endswith(GAINS):
            stored = torch.frombuffer(bytearray(b"".join(checkpoint.chunks(name))), dtype=torch.float32)
            assert torch.allclose(stored, weight, rtol=0, atol=1e-6), name


def test_packed_halves_of_latent_attention_are_read(tmp_path: Path) -> None:
    """Keys are quantized along other inputs than kv_b has, so it is dense; each half has settings of its own."""
    expected: Tensors = {}

    def quantize(tensors: Tensors) -> Tensors:
        result = dict(tensors)
        for name in [name for name in tensors if name.endswith(("embed_q.weight", "unembed_out.weight"))]:
            base = name.removesuffix(".weight")
            parts, expected[base] = affine(result.pop(name), 8 if base.endswith("embed_q") else 4)
            result |= {f"{base}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        return result

    convert(tmp_path, LATENT, quantize)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = [base for base in expected if base.endswith("embed_q")]
    own = {base: {"group_size": 32, "bits": 8} for base in layers}
    section = {"group_size": 32, "bits": 4, **own, "model.embed_tokens": False}
    # One linear is quantized besides: a section without any would belong to another model.
    tensors = load_file(tmp_path / "model.safetensors")
    packed, _ = affine(tensors.pop("model.layers.0.self_attn.o_proj.weight"), 4)
    tensors |= {f"model.layers.0.self_attn.o_proj.{part}": tensor for part, tensor in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": section}))
    folder = open_model_folder(tmp_path)
    checkpoint = folder.checkpoint()
    assert list(folder.packings) == ["model.layers.0.self_attn.o_proj"]
    for base in layers:
        name = base.replace("embed_q", "kv_b_proj.weight")
        keys, values = expected[base], expected[base.replace("embed_q", "unembed_out")]
        weight = torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
        assert torch.allclose(checkpoint.read(name), weight, rtol=0, atol=1e-6)
    load_model(folder, CPU)


def test_a_head_is_not_divided_again_after_it_was_quantized(tmp_path: Path) -> None:
    """Rows of Baichuan's heads are divided by their norms, by mlx-lm before it quantizes."""
    make(tmp_path, *CASES["baichuan-mha"])
    tensors = load_file(tmp_path / "model.safetensors")
    packed, expected = affine(torch.nn.functional.normalize(tensors.pop("lm_head.weight")), 8)
    tensors |= {f"lm_head.{part}": tensor.contiguous() for part, tensor in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 32, "bits": 8}}))
    folder = open_model_folder(tmp_path)
    assert list(folder.packings) == ["lm_head"]
    assert torch.allclose(load_model(folder, CPU).model.head.weight(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lost", ["unembed_out", "a head"])
def test_halves_that_do_not_fit_are_refused_by_name(lost: str, tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> Tensors:
        if lost == "a head":
            return {name: tensor[1:] if "embed_q" in name else tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in tensors.items() if lost not in name}

    convert(tmp_path, LATENT, damage)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.(embed_q|unembed_out)\.weight"):
        load_model(open_model_folder(tmp_path), CPU)


def test_falcon_h1_is_refused(tmp_path: Path) -> None:
    """mlx-lm multiplies its weights by factors that stay in its config."""
    convert(tmp_path, "falcon_h1-multipliers")
    with pytest.raises(ModelError, match=r"conv1d\.weight has shape"):
        load_model(open_model_folder(tmp_path), CPU)
