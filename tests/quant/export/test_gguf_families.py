"""Check that every family that is exported to GGUF is read back as the same model."""

import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.export._weights import Weights, exact_values
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.gguf.architectures import architectures, written_architecture
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import MTP
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.models import families
from mycli.runtime.open import draft_folder
from mycli.runtime.quantization.scale_codes import scale_codes
from tests.support.engines import whole
from tests.support.families import CASES, EMBEDDING
from tests.support.gguf_exports import (
    MULTIMODAL_NAMES,
    NAMES,
    READ_ALONE,
    export_request,
    exported_config,
)
from tests.support.gguf_files import rewrite
from tests.support.models import CPU

pytestmark = pytest.mark.usefixtures("quick_configs")

WRITTEN = {family: known for known in architectures() for family in known.written_types}
# The quick ones cover every way in which GGUF differs.
QUICK = (
    *("llama-rope-llama3", "olmo3-window7", "gemma4-ple-shared-kv-double", "ministral3-beyond", "granite-multipliers"),
    *("cohere2-window7-tied", "gpt_oss-window7-gqa4:2", "ernie4_5_moe-8top3-tied", "qwen3_5-odd-heads-tied"),
    *("qwen3_next-8top3", "lfm2_moe-8top3-tied", "granitemoehybrid-8top3", "nemotron_h-every-kind"),
    *(
        "falcon_h1-multipliers",
        "bamba-2-groups",
        "phi3-longrope-beyond-tied",
        "minicpm3-longrope-odd-sizes-biases-untied",
    ),
    "deepseek_v2-groups-odd-sizes-biases-tied",
    *("apertus-llama3", "stablelm-parallel-head-norms", "nemotron-half-rotated", "hy_v3-8top2"),
    "cohere-head-norms",
    *("granitemoe_swa-window7-shared", "laguna-heads-by-layer-window7", "minicpm3-tied"),
    "qwen3_vl_moe",
)


# llama.cpp b11434 has no architecture for them, or, as for nemotron-nas (deci), baichuan, PanguEmbedded and
# muse_glimmer_text, files are read alone.
WITHOUT_ARCHITECTURE = {
    *("cwm", "diffllama", "doge", "flex_olmo", "flint", "helium", "hyperclovax", "kolibri1", "lfm3", "mimo"),
    *("ministral", "muse_glimmer_text", "nanochat", "nemotron-nas", "olmo_hybrid", "sarvam_mla", "sarvam_moe"),
    *("PanguEmbedded", "baichuan", "gpt_neo", "telechat3", "vaultgemma"),
}


def test_families_without_an_architecture_are_refused() -> None:
    names = {module.name for module in pkgutil.iter_modules(families.__path__)}
    assert names - set(WRITTEN) == WITHOUT_ARCHITECTURE | EMBEDDING
    with pytest.raises(ModelError, match="'helium' cannot be written as GGUF: no architecture is written"):
        written_architecture(exported_config("helium-mha", {}))


def test_every_written_family_has_a_case() -> None:
    assert {CASES[name][0] for name in NAMES} | set(READ_ALONE) == set(WRITTEN)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*NAMES, *MULTIMODAL_NAMES)],
)
def test_export_is_read_back(name: str, tmp_path: Path) -> None:
    packed = name in CASES and CASES[name][0] == "gpt_oss"
    request = export_request(name, tmp_path, "" if packed else "f32")
    module, _ = find_export_target("gguf:f32")
    written = open_model_folder(module.export(request, silent).path)
    tokens = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    expected = whole(load_model(request.folder, CPU).model, tokens)
    actual = whole(load_model(written, CPU).model, tokens)
    assert (actual - expected).abs().max() <= (2e-2 if packed else 1e-4) * expected.abs().max()
    reader = gguf.GGUFReader(written.path)
    architecture = reader.fields["general.architecture"].contents()
    number = next((key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), None)
    if number is None:  # added to llama.cpp after the release of the package
        return
    layers = written.config.layers
    known = {
        gguf.TENSOR_NAMES[tensor].format(bid=layer) for tensor in gguf.MODEL_TENSORS[number] for layer in range(layers)
    }
    for tensor in reader.tensors:
        assert tensor.name in known or tensor.name.rpartition(".")[0] in known, tensor.name


def test_a_file_of_a_family_with_mtp_heads_has_none(tmp_path: Path) -> None:
    """Its other tensors are not taken for those of a head."""
    request = export_request("qwen3_5-odd-heads-tied", tmp_path, "f32")
    file = open_model_folder(find_export_target("gguf:f32")[0].export(request, silent).path)
    assert request.folder.config.mtp is not None and file.mtp_head is None
    with pytest.raises(ModelError, match=r"no multi-token prediction head: its files have no mtp\.\*"):
        draft_folder(file, MTP, lambda name: file)
    dense = replace(request, folder=file, target=tmp_path / "dense", variant="fp32")
    find_export_target("safetensors")[0].export(dense, silent)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("cohere-head-norms", "attn_q_norm"), ("lfm2-tied", "shortconv.conv")],  # of Command R+: a matrix
)
def test_small_tensors_stay_in_fp32(name: str, tensor: str, tmp_path: Path) -> None:
    """llama.cpp multiplies by fp32 only."""
    request = export_request(name, tmp_path, "q8_0")
    module, _ = find_export_target("gguf:q8_0")
    reader = gguf.GGUFReader(module.export(request, silent).path)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert (kinds[f"blk.0.{tensor}.weight"], kinds["token_embd.weight"]) == ("F32", "Q8_0")


def test_linear_attention_in_one_tensor_is_read(tmp_path: Path) -> None:
    """Files of Qwen 3 Next of before 2026 have the rows in Hugging Face's order, as llama.cpp still reads them."""
    request = export_request("qwen3_next-8top3", tmp_path, "f32")
    module, _ = find_export_target("gguf:f32")
    path = module.export(request, silent).path
    weights = load_file(tmp_path / "hf" / "model.safetensors")

    def older(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        linear = [name.split(".")[1] for name in tensors if name.endswith("ssm_ba.weight")]
        joined = {
            f"blk.{layer}.ssm_in.weight": weights[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"].float()
            for layer in linear
        }
        halves = {f"blk.{layer}.{part}.weight" for layer in linear for part in ("attn_qkv", "attn_gate")}
        return {name: value for name, value in tensors.items() if name not in halves} | joined

    newer, older_file = (open_model_folder(file).checkpoint() for file in (path, rewrite(path, older)))
    for name in weights:
        assert older_file.read(name).equal(newer.read(name)), name


def test_rows_that_rotate_as_halves_are_read(tmp_path: Path) -> None:
    """The converter writes those of GLM-4.1V so, next to the sections of image positions."""
    request = export_request("glm4-half-turned", tmp_path, "f32")
    module, _ = find_export_target("gguf:f32")
    path = module.export(request, silent).path
    config = request.folder.config
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}

    def halves(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = dict(tensors)
        for name, values in tensors.items():
            part = name.split(".")[-2]
            if part in heads:
                rows = values.view(heads[part], config.head_dim, -1)
                rotated, rest = rows.split([config.rotary_dim or 0, config.head_dim - (config.rotary_dim or 0)], dim=1)
                result[name] = torch.cat((rotated[:, ::2], rotated[:, 1::2], rest), dim=1).reshape(values.shape)
        assert all(f"blk.0.attn_q.{kind}" in result for kind in ("weight", "bias"))
        return result

    vision = rewrite(path, halves, **{"glm4.rope.dimension_sections": [2, 1, 1, 0]})
    expected, actual = (open_model_folder(file).checkpoint() for file in (path, vision))
    for name in expected.manifest.tensors:
        assert actual.read(name).equal(expected.read(name)), name


def _nvfp4(shape: tuple[int, ...]) -> tuple[Any, gguf.GGMLQuantizationType]:
    # Random codes, with scales of about 1 at the start of a block.
    blocks = torch.randint(256, (*shape[:-1], shape[-1] // 64, 36), dtype=torch.uint8)
    blocks[..., :4] = torch.randint(0x30, 0x40, (*blocks.shape[:-1], 4), dtype=torch.uint8)
    return blocks.flatten(-2).numpy(), gguf.GGMLQuantizationType.NVFP4


def test_scales_next_to_nvfp4_weights_are_multiplied(tmp_path: Path) -> None:
    """The converter writes one for a matrix, one per expert for a stack; scales of inputs make no difference here."""
    request = export_request("qwen3_moe-8top2", tmp_path, "f32")
    module, _ = find_export_target("gguf:f32")
    names = ("blk.0.attn_q", "blk.1.ffn_gate_exps")
    matrices: dict[str, torch.Tensor] = {}

    def quantized(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name in names:
            shape = tuple(tensors[f"{name}.weight"].shape)
            changed[f"{name}.weight"] = _nvfp4(shape)
            scales = torch.linspace(0.3, 0.7, shape[0] if len(shape) > 2 else 1)
            changed |= {f"{name}.scale": scales, f"{name}.input_scale": 2 * scales}
            values = torch.from_numpy(gguf.quants.dequantize(*changed[f"{name}.weight"])).view(shape)
            matrices[name] = values * scales.view(-1, *[1] * (len(shape) - 1))
        return {**tensors, **changed}

    folder = open_model_folder(rewrite(module.export(request, silent).path, quantized))
    checkpoint, weights = folder.checkpoint(dtype=torch.float32), Weights(folder)
    expected = {"model.layers.0.self_attn.q_proj.weight": matrices[names[0]]}
    for index, expert in enumerate(matrices[names[1]]):
        expected[f"model.layers.1.mlp.experts.{index}.gate_proj.weight"] = expert
    for name, values in expected.items():
        torch.testing.assert_close(checkpoint.read(name), values)
        torch.testing.assert_close(exact_values(weights.packed(name)), values)
        assert scale_codes(weights.packed(name)) is not None, "a byte each, as estimates count"
    assert not expected.keys() & weights.blocks(written_architecture(folder.config)).keys()  # not copied without them


def test_a_tied_head_is_written_where_llama_cpp_requires_one(tmp_path: Path) -> None:
    module, _ = find_export_target("gguf:f32")
    path = module.export(export_request("olmo3-yarn-tied", tmp_path, "f32"), silent).path
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert (tensors["output.weight"].data == tensors["token_embd.weight"].data).all()


def _table_repeats_its_first_row(path: Path, original: ModelFolder) -> bool:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    table = tensors["per_layer_token_embd.weight"].data  # llama.cpp reads a row for every token
    assert original.config.per_layer_vocab == 4090 and len(table) == 4096
    return bool((table[4090:] == table[0]).all() and not (table[:4090] == table[0]).all(1)[1:].any())


def test_tokens_without_per_layer_inputs_get_those_of_the_first(tmp_path: Path) -> None:
    module, _ = find_export_target("gguf:q8_0")
    request = replace(export_request("gemma4-ple-shared-kv-double", tmp_path, "q8_0"), requantize=True)
    assert _table_repeats_its_first_row(module.export(request, silent).path, request.folder)


def test_tensors_that_llama_cpp_requires_and_does_not_read_are_zeros(tmp_path: Path) -> None:
    """Files of Gemma 3n have them in layers that read the keys and values of another; the model is read without."""
    module, _ = find_export_target("gguf:f32")
    request = export_request("gemma3n-sparse-shared-kv", tmp_path, "f32")
    path = module.export(request, silent).path
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for part in ("attn_k", "attn_v", "attn_k_norm"):
        own, unread = tensors[f"blk.19.{part}.weight"].data, tensors[f"blk.20.{part}.weight"].data
        assert own.any() and unread.shape == own.shape and not unread.any()
    assert _table_repeats_its_first_row(path, request.folder)
    read = open_model_folder(path).checked_manifest()
    assert set(read.tensors) == {name for name, _ in request.folder.config.tensors()}


def test_keys_that_llama_cpp_requires(tmp_path: Path) -> None:
    """Regressions: it skipped ERNIE's shared experts without their size, and stopped at sections wider than a head."""
    config = exported_config("ernie4_5_moe-8top3-tied", {})
    assert written_architecture(config).metadata(config)["ernie4_5-moe.expert_shared_feed_forward_length"] == 64
    for name, sections in {"qwen3_5-odd-heads-tied": [1, 1, 1, 0], "qwen3_5-delta": [2, 1, 1, 0]}.items():
        config = exported_config(name, {})
        assert written_architecture(config).metadata(config)["qwen35.rope.dimension_sections"] == sections
    config = exported_config("qwen3_5-delta", {"head_dim": 256})
    assert written_architecture(config).metadata(config)["qwen35.rope.dimension_sections"] == [11, 11, 10, 0]


@pytest.mark.parametrize(("label", "named"), [("my-Phi3-tune", False), ("tune", True)])
def test_a_name_by_which_llama_cpp_expects_tokens(label: str, named: bool, tmp_path: Path) -> None:
    """llama.cpp loads no file named Phi-3 whose vocabulary lacks that model's tokens."""
    request = export_request("phi3-gqa4:2", tmp_path, "f32")
    folder = (tmp_path / "hf").rename(tmp_path / label)
    request = replace(request, source=Source(label, folder), folder=open_model_folder(folder))
    module, _ = find_export_target("gguf:f32")
    assert ("general.name" in gguf.GGUFReader(module.export(request, silent).path).fields) == named


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_a_text_part_is_written_for_an_image_model(name: str, tmp_path: Path) -> None:
    """llama.cpp reads sections and deepstack layers next to a file of the image model; both survive a copy."""
    module, _ = find_export_target("gguf:f32")
    path = module.export(export_request(name, tmp_path, "f32"), silent).path
    again = ExportRequest(Source("a", path), open_model_folder(path), tmp_path / "b.gguf", "f32", requantize=True)
    architecture = name.replace("_", "")
    for file in (path, module.export(again, silent).path):
        fields = gguf.GGUFReader(file).fields
        assert fields["general.architecture"].contents() == architecture
        assert fields[f"{architecture}.rope.dimension_sections"].contents() == [3, 3, 2, 0]
        deepstack = fields.get(f"{architecture}.n_deepstack_layers")
        assert (deepstack and deepstack.contents()) == (1 if name == "qwen3_vl" else None)
