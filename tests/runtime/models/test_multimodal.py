"""Test multimodal folders: the text part runs as in transformers, and skipped parts are named."""

import json
import re
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from mycli.runtime.models.multimodal import TextPart
from mycli.runtime.models.multimodal_types import FAMILIES
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.engines import whole
from tests.support.families import CASES, make, packed_weights
from tests.support.models import CPU
from tests.support.multimodal_families import FOLDERS, LOGIT_SCALES, make_folder


def rename(folder: Path, model: str, head: str) -> None:
    """Give the tensors of the text model, and its head, these prefixes."""
    part = open_model_folder(folder).part
    stored = load_file(folder / "model.safetensors")
    local = {name: part.local_name(name) if isinstance(part, TextPart) else name for name in stored}
    names = {
        name: name if text is None else re.sub("^lm_head[.]", head, re.sub("^model[.]", model, text))
        for name, text in local.items()
    }
    save_file({names[name]: tensor for name, tensor in stored.items()}, folder / "model.safetensors")


def check_logits(reference: transformers.PreTrainedModel, folder: Path) -> None:
    tokens = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    assert (whole(load_model(open_model_folder(folder), CPU).model, tokens) - expected).abs().max() <= (
        1e-4 * expected.abs().max()
    )


@pytest.mark.parametrize("name", FOLDERS, ids=str)
def test_the_text_part_is_transformers(name: str, tmp_path: Path) -> None:
    reference = make_folder(tmp_path, name)
    folder = open_model_folder(tmp_path)
    assert folder.config.model_type == FAMILIES.get(FOLDERS[name][1], FOLDERS[name][1])
    heard: list[str] = []
    model = load_model(folder, CPU, warn=heard.append).model
    tokens = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    expected *= LOGIT_SCALES.get(name, 1)
    assert (whole(model, tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (
        len(heard) == 1
        and "only its text part is used, not " in heard[0]
        and re.search("vi[st]|image|audio|encoder", heard[0])
    )


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"])
def test_windows_that_transformers_does_not_read(name: str, tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    reference = make_folder(tmp_path, name, **window)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"] |= window | {"layer_types": ["sliding_attention"] * raw["text_config"]["num_hidden_layers"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check_logits(reference, tmp_path)


@pytest.mark.parametrize(("window", "expected"), [({}, 4096), ({"sliding_window": None}, None)], ids=["absent", "none"])
def test_the_window_of_idefics2_as_published(window: dict[str, Any], expected: int | None) -> None:
    """Its text config has only what differs from the defaults of transformers' class."""
    text = {"model_type": "mistral", "max_position_embeddings": 32768, "vocab_size": 32003, **window}
    raw = {"model_type": "idefics2", "text_config": text, "tie_word_embeddings": False}
    reference = transformers.AutoConfig.for_model(**raw).text_config
    config = parse_config(TextPart.from_config(Fields(raw, "config.json")).config)
    assert reference.sliding_window == expected
    assert {spec.attention.window for spec in config.layer_specs} == {expected}
    sizes = (reference.hidden_size, reference.num_hidden_layers, reference.num_key_value_heads)
    assert sizes == (config.hidden_size, config.layers, config.kv_heads)


def test_a_null_for_tying_the_head_is_refused() -> None:
    raw = {"model_type": "idefics2", "text_config": {"model_type": "mistral"}, "tie_word_embeddings": None}
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        parse_config(TextPart.from_config(Fields(raw, "config.json")).config)


def test_a_folder_quantized_in_training_loads_as_it_is(tmp_path: Path) -> None:
    """Load a random Gemma 4 in the format of Google's: compressed-tensors, int4, groups of 32, text part only."""
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
        expected: Tensor = theirs(tokens).logits  # which unpacks its weights
    found = packed_weights(ours)
    assert found.keys() == folder.packings.keys() and len(found) == 25
    for name, weight in found.items():
        module = theirs.get_submodule(name.replace("model.", "model.language_model.", 1))
        assert torch.equal(weight, module.weight), name
    assert (whole(ours, tokens) - expected).abs().max() <= 2e-3 * expected.abs().max()  # products round activations


def test_names_of_transformers_4(tmp_path: Path) -> None:
    """Accept language_model.model.* and language_model.lm_head.*, as written by transformers 4."""
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
        "visual.blocks.0.x",
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


@pytest.mark.parametrize(
    ("stored", "local"),
    [
        ("language_model.lm_head", "lm_head"),
        (r"re:language_model\.lm_head$", r"re:lm_head$"),
        (r"re:.*language_model.*\.(q_proj|up_proj)$", r"re:.*model.*\.(q_proj|up_proj)$"),
        (r"re:.*language_model[.]layers[.][0-9]$", r"re:.*model[.]layers[.][0-9]$"),
        (r"re:^model\.language_model.*", "re:^model.*"),
        ("re:^(?!.*language_model).*", "re:^(?!.*model).*"),
        ("re:.*vision_model.*", "re:.*vision_model.*"),
    ],
)
def test_targets_name_the_text_model(stored: str, local: str) -> None:
    raw = {"model_type": "mistral3", "text_config": {}, "quantization_config": {"ignore": [stored]}}
    part = TextPart.from_config(Fields(raw, "config.json"))
    assert part.config.values["quantization_config"]["ignore"] == [local]


def test_a_text_model_is_unchanged() -> None:
    raw = Fields({"model_type": "llama", "text_config": {"model_type": "gemma3_text"}}, "config.json")
    assert (
        TextPart.from_config(raw).config is raw
        and TextPart.from_config(raw).local_name("vision_tower.x") == "vision_tower.x"
    )


def test_qwen_2_vl_as_published(tmp_path: Path) -> None:
    """The config has the text model's keys at top level, M-RoPE under its own name, and tensors without a prefix."""
    reference = make_folder(tmp_path, "qwen2_vl")
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {
        **text,
        **raw,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    tensors = load_file(tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    save_file({name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}, path)
    folder = open_model_folder(tmp_path)
    assert folder.raw.values["architectures"] == ["Qwen2ForCausalLM"]
    assert folder.raw.values["rope_scaling"] == {"type": "default"} and "vision_config" not in folder.raw.values
    tokens = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    assert (whole(load_model(folder, CPU).model, tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("text_prefix", ["model.", "model.language_model."], ids=["published", "transformers-5"])
def test_qwen_omni_with_the_part_that_speaks(text_prefix: str, tmp_path: Path) -> None:
    reference = make_folder(tmp_path, "qwen2_5_omni_thinker")
    thinker = json.loads((tmp_path / "config.json").read_text())
    raw = {"model_type": "qwen2_5_omni", "torch_dtype": "float32", "thinker_config": thinker, "talker_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {
        f"thinker.{name.replace('model.language_model.', text_prefix)}": tensor for name, tensor in tensors.items()
    }
    tensors["talker.model.layers.0.mlp.up_proj.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    folder = open_model_folder(tmp_path)
    assert folder.config.model_type == "qwen2" and folder.raw.values["architectures"] == ["Qwen2ForCausalLM"]
    tokens = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    assert (whole(load_model(folder, CPU).model, tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_qwen3_asr_as_published(tmp_path: Path) -> None:
    reference = make_folder(tmp_path, "qwen3_asr")
    thinker = json.loads((tmp_path / "config.json").read_text())
    thinker = {**thinker, "model_type": "qwen3_asr_thinker"}
    thinker["text_config"] = {**thinker["text_config"], "model_type": "qwen3_asr_text"}
    raw = {"model_type": "qwen3_asr", "thinker_config": thinker, "support_languages": ["English"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    rename(tmp_path, "thinker.model.", "thinker.lm_head.")
    check_logits(reference, tmp_path)


@pytest.mark.parametrize("name", ["hunyuan_vl", "paddleocr_vl"])
def test_ocr_models_as_published_have_no_section(name: str, tmp_path: Path) -> None:
    reference = make_folder(tmp_path, name)
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    section = {"type": "default", "mrope_section": [2, 3, 3]}
    if name == "hunyuan_vl":
        section = {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]}
    flat = {**text, **raw, "rope_theta": rope["rope_theta"], "rope_scaling": section}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    rename(tmp_path, "model.", "lm_head.")
    check_logits(reference, tmp_path)


def test_hyperclova_x_think_as_published(tmp_path: Path) -> None:
    reference = make_folder(tmp_path, "hyperclovax_vision_v2")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "vlm"}))
    rename(tmp_path, "model.language_model.model.", "model.language_model.lm_head.")
    check_logits(reference, tmp_path)


def test_glm_ocr_with_its_mtp_head(tmp_path: Path) -> None:
    reference = make_folder(tmp_path, "glm_ocr")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.language_model.layers.3.eh_proj.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    check_logits(reference, tmp_path)


@pytest.mark.parametrize(
    ("outer", "version", "case"),
    [
        ("minicpmv", {}, "llama-gqa4:2-hd16"),
        ("minicpmv", {"version": 2.6}, "qwen2-biases"),
        ("minicpmv", {"version": "4.0"}, "llama-mha4-tied"),
        ("minicpmv", {"version": 4.5}, "qwen3-qk-norm-hd32"),
        ("minicpmo", {"version": "4.5"}, "qwen3-qk-norm-hd32"),
        ("ovis", None, "qwen2-biases"),
        ("ovis2_5", None, "qwen3-qk-norm-hd32"),
    ],
)
def test_minicpm_v_and_ovis_as_published(outer: str, version: dict[str, Any] | None, case: str, tmp_path: Path) -> None:
    """The version says which text model MiniCPM-V has; its keys are those of the outer config."""
    reference = make(tmp_path, *CASES[case])
    text = json.loads((tmp_path / "config.json").read_text())
    flat = {**text, **(version or {}), "slice_config": {}, "auto_map": {"AutoModel": "modeling_minicpmv.MiniCPMV"}}
    raw = {"llm_config": text} if version is None else flat
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": outer, "vision_config": {}}))
    rename(tmp_path, "llm.model.", "llm.lm_head.")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "vpm.embeddings.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert "auto_map" not in open_model_folder(tmp_path).raw.values
    check_logits(reference, tmp_path)


def test_an_unknown_version_of_minicpm_v_is_refused() -> None:
    raw = Fields({"model_type": "minicpmv", "version": 9, "hidden_size": 8}, "config.json")
    with pytest.raises(ModelError, match="'minicpmv' is not supported"):
        parse_config(TextPart.from_config(raw).config)


def test_perception_lm_with_its_encoder(tmp_path: Path) -> None:
    """Read the text model beside an encoder that transformers builds only with another package."""
    reference = make(tmp_path, *CASES["llama-mha4-tied"])
    text = json.loads((tmp_path / "config.json").read_text())
    raw = {"model_type": "perception_lm", "text_config": text, "vision_config": {"architecture": "vit"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    rename(tmp_path, "model.language_model.", "lm_head.")
    check_logits(reference, tmp_path)


def test_gemma_3n_with_its_encoders(tmp_path: Path) -> None:
    """Read the text model beside encoders that transformers builds only with another package."""
    reference = make(tmp_path, *CASES["gemma3n-sparse-shared-kv"])
    text = json.loads((tmp_path / "config.json").read_text())
    raw = {"model_type": "gemma3n", "text_config": text, "vision_config": {}, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    tensors["model.audio_tower.conformer.0.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    folder = open_model_folder(tmp_path)
    assert folder.raw.values["architectures"] == ["Gemma3nForCausalLM"]
    tokens = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    assert (whole(load_model(folder, CPU).model, tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("outer", ["NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2"])
def test_nemotron_as_published(outer: str, tmp_path: Path) -> None:
    reference = make_folder(tmp_path, "nemotron_h_omni")
    raw = json.loads((tmp_path / "config.json").read_text())
    published = {"model_type": outer, "llm_config": raw["text_config"], "sound_config": {}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(published))
    tokens = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    actual = whole(load_model(open_model_folder(tmp_path), CPU).model, tokens)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_muse_glimmer_of_mlx_has_no_section(tmp_path: Path) -> None:
    """As mlx-lm reads Muse Glimmer: the text model's keys in the outer config, its tensors without a prefix."""
    reference = make_folder(tmp_path, "muse_glimmer")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw["text_config"], "model_type": "muse_glimmer"}))
    tensors = load_file(tmp_path / "model.safetensors")
    names = {name: name.replace("model.language_model.", "model.") for name in tensors if "vision" not in name}
    save_file({new: tensors[name] for name, new in names.items()}, tmp_path / "model.safetensors")
    tokens = torch.randint(4, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    actual = whole(load_model(open_model_folder(tmp_path), CPU).model, tokens)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_internvl_by_its_first_code() -> None:
    raw = {"model_type": "internvl_chat", "llm_config": {"model_type": "qwen3", "hidden_size": 8}, "vision_config": {}}
    part = TextPart.from_config(Fields(raw, "config.json"))
    assert part.config.values["model_type"] == "qwen3" and part.config.values["hidden_size"] == 8
    assert part.local_name("language_model.model.layers.0.x") == "model.layers.0.x"
    assert part.local_name("mlp1.0.weight") is None


@pytest.mark.parametrize(
    ("outer", "inner", "family"), [("exaone4_5", "exaone4_5_text", "exaone4"), ("kimi_k25", "kimi_k2", "kimi_k2")]
)
def test_the_text_type_of_the_first_files(outer: str, inner: str, family: str) -> None:
    part = TextPart.from_config(Fields({"model_type": outer, "text_config": {"model_type": inner}}, "config.json"))
    assert part.config.values["model_type"] == family


def test_a_section_of_a_llava_names_only_what_differs() -> None:
    text = {"model_type": "mistral", "vocab_size": 32064, "rms_norm_eps": 1e-5}
    part = TextPart.from_config(Fields({"model_type": "llava_next", "text_config": text}, "config.json"))
    config = parse_config(part.config)
    assert (config.layers, config.kv_heads, config.intermediate_size, config.vocab_size) == (32, 8, 14336, 32064)


def test_kimi_vl_is_read_as_deepseek(tmp_path: Path) -> None:
    """The tensors have the names of Kimi K2.5's; the section decides on the tie, as it is a whole causal model's."""
    reference = make_folder(tmp_path, "kimi_k25")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "kimi_vl", "tie_word_embeddings": True}))
    tokens = torch.randint(4, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    actual = whole(load_model(open_model_folder(tmp_path), CPU).model, tokens)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
