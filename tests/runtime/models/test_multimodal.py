"""Multimodal folders: the text part is found, named and run as transformers runs it; skipped parts are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from torch import Tensor

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loader import load_model
from mycli.runtime.models.multimodal import TextPart
from mycli.runtime.utils.json_fields import Fields
from tests.support.engines import whole
from tests.support.families import enliven, packed_weights
from tests.support.family_parts import GEMMA4, IDS, SMALL, ministral_rope
from tests.support.models import CPU
from tests.support.recurrent_families import DELTA_EXPERTS

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = {**VISION, "image_size": 16, "patch_size": 8}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
    "num_position_embeddings": 4,
}
# id -> (outer type, text type, what differs from SMALL in the text, vision, what else the outer config says)
FOLDERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {**IDS, "head_dim": 16, "sliding_window": 7},
        {"model_type": "siglip_vision_model", **SIGLIP},
        {"mm_tokens_per_image": 4},
    ),
    "mistral3": (
        "mistral3",
        "mistral",
        {**IDS, "head_dim": 16, "sliding_window": None},
        {"model_type": "pixtral", **SIGLIP, "head_dim": 8},
        {"tie_word_embeddings": False},
    ),
    "mistral3-ministral3": (
        "mistral3",
        "ministral3",
        {**IDS, "head_dim": 16, **ministral_rope(original=16)},
        {"model_type": "pixtral", **SIGLIP, "head_dim": 8},
        {"tie_word_embeddings": True},
    ),
    "gemma4": (
        "gemma4",
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 1}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {"model_type": "gemma4_vision", **VISION, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 1},
        {"audio_config": None},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        {**DELTA_EXPERTS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "qwen3_5_moe", **QWEN_VISION},
        {"tie_word_embeddings": False},
    ),
}


def make_folder(folder: Path, name: str) -> transformers.PreTrainedModel:
    outer, inner, text, vision, others = FOLDERS[name]
    torch.manual_seed(0)
    sections = {"text_config": {"model_type": inner, **SMALL, "intermediate_size": 96, **text}, "vision_config": vision}
    config = transformers.AutoConfig.for_model(outer, **sections, **others)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    enliven(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", FOLDERS, ids=str)
def test_the_text_part_is_transformers(name: str, tmp_path: Path) -> None:
    reference = make_folder(tmp_path, name)
    folder = open_model_folder(tmp_path)
    assert folder.config.model_type == FOLDERS[name][1]
    heard: list[str] = []
    model = load_model(folder, CPU, warn=heard.append).model
    tokens = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    assert (whole(model, tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(heard) == 1 and "only its text part is used" in heard[0] and "vis" in heard[0]


def test_a_folder_quantized_in_training_loads_as_it_is(tmp_path: Path) -> None:
    """compressed-tensors writes a random Gemma 4 as Google's are: 4 bits, symmetric, groups of 32, the text only."""
    model = make_folder(tmp_path / "source", "gemma4")
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    others = ("re:.*vision_tower.*", "re:.*embed_vision.*", "re:.*per_layer_model_projection.*")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", *others], format="pack-quantized")
    apply_quantization_config(model, config)
    for module in model.modules():
        if isinstance(getattr(module, "weight_scale", None), torch.nn.Parameter):
            groups = module.weight.view(module.weight.shape[0], -1, 32)
            module.weight_scale.data.copy_(groups.abs().amax(-1) / 7.5)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "copy")
    compressor.update_config(tmp_path / "copy")

    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "copy", dtype=torch.float32)
    folder = open_model_folder(tmp_path / "copy")
    ours = load_model(folder, CPU).model
    tokens = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = theirs(tokens).logits  # which unpacks theirs
    found = packed_weights(ours)
    assert found.keys() == folder.packings.keys() and len(found) == 25
    for name, weight in found.items():
        module = theirs.get_submodule(name.replace("model.", "model.language_model.", 1))
        assert torch.equal(weight, module.weight), name
    assert (whole(ours, tokens) - expected).abs().max() <= 2e-3 * expected.abs().max()  # products round activations


def test_names_of_transformers_4(tmp_path: Path) -> None:
    """transformers 4 wrote language_model.model.* and language_model.lm_head.*."""
    part = TextPart.from_config(
        Fields({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "config.json")
    )
    assert part.local_name("language_model.model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert part.local_name("language_model.lm_head.weight") == "lm_head.weight"
    assert part.local_name("model.language_model.norm.weight") == "model.norm.weight"
    for other in (
        "vision_tower.x.weight",
        "model.vision_tower.x.weight",
        "multi_modal_projector.x",
        "model.layers.0.x",
    ):
        assert part.local_name(other) is None


def test_the_outer_config_counts_before_its_section() -> None:
    raw = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "eos_token_id": 1, "hidden_size": 8, "torch_dtype": "float32"},
        "eos_token_id": [1, 106],
        "dtype": "bfloat16",
        "quantization_config": {
            "ignore": ["model.language_model.layers.0.a", "lm_head", r"re:language_model\.model\.x"]
        },
    }
    found = TextPart.from_config(Fields(json.loads(json.dumps(raw)), "config.json")).config.values
    assert found["eos_token_id"] == [1, 106] and found["dtype"] == "bfloat16" and found["hidden_size"] == 8
    assert found["architectures"] == ["Gemma3ForCausalLM"]
    assert found["quantization_config"]["ignore"] == ["model.layers.0.a", "lm_head", r"re:model\.x"]


def test_a_text_model_is_unchanged() -> None:
    raw = Fields({"model_type": "llama", "text_config": {"model_type": "gemma3_text"}}, "config.json")
    assert (
        TextPart.from_config(raw).config is raw
        and TextPart.from_config(raw).local_name("vision_tower.x") == "vision_tower.x"
    )
