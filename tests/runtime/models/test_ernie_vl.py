"""Test ERNIE 4.5 VL as published and as transformers has it in memory: its text experts and their router are read."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.hub.resolve import Source
from mycli.runtime.models.experts_spec import ExpertsSpec
from tests.support.engines import whole
from tests.support.models import CPU
from tests.support.multimodal_families import make_folder
from tests.support.paths import PICO

TOKENS = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))


def publish(folder: Path) -> None:
    """Write the config of the published folder: one level, and two values of what text and images have apart."""
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    del text["mlp_layer_types"]
    rope = text.pop("rope_parameters")
    flat = {
        **{**text, **raw, "model_type": "ernie4_5_moe_vl", "rope_theta": rope["rope_theta"]},
        **{"moe_num_experts": [4, 4], "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28]},
        **{"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}, "use_correction_bias": True},
    }
    (folder / "config.json").write_text(json.dumps(flat))


@pytest.mark.parametrize("files", ["published", "memory"])
def test_the_experts_for_text_are_read(files: str, tmp_path: Path) -> None:
    reference = make_folder(tmp_path, "ernie4_5_vl_moe", mlp_layer_types=["dense", "sparse", "sparse"])
    with torch.no_grad():
        expected = reference(TOKENS).logits
    if files == "published":
        publish(tmp_path)
        assert load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.weight_1"].shape == (64, 4)
    else:
        reference.save_pretrained(tmp_path, save_original_format=False)
        assert any(".text_moe.experts.down_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    folder = open_model_folder(tmp_path)
    assert folder.raw.values["architectures"] == ["Ernie4_5_MoeForCausalLM"]
    experts = folder.config.layer(1).mlp
    assert isinstance(experts, ExpertsSpec) and (len(experts.experts), experts.experts[0].size) == (4, 24)
    entries = folder.checked_manifest().tensors.values()
    assert all(entry.nbytes == 4 * math.prod(entry.shape) for entry in entries)
    actual = whole(load_model(folder, CPU).model, TOKENS)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_its_gguf_file_is_that_of_the_text_model(tmp_path: Path) -> None:
    types = ["dense", "sparse", "sparse"]
    reference = make_folder(tmp_path / "hf", "ernie4_5_vl_moe", mlp_layer_types=types, vocab_size=4096)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, tmp_path / "hf" / file)
    source = open_model_folder(tmp_path / "hf")
    request = ExportRequest(Source("hf", tmp_path / "hf"), source, tmp_path / "a.gguf", "f32")
    written = open_model_folder(find_export_target("gguf:f32")[0].export(request, silent).path)
    with torch.no_grad():
        expected = reference(TOKENS).logits
    assert written.config.model_type == "ernie4_5_moe"
    assert (whole(load_model(written, CPU).model, TOKENS) - expected).abs().max() <= 1e-5 * expected.abs().max()
