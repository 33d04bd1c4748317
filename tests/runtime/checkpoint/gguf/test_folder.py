"""Test GGUF files as models: logits equal transformers', tokenizer and template load."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures import architectures
from mycli.runtime.checkpoint.gguf.checkpoint import file_order
from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_Q
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.sentence_transformers import EmbeddingSpec, PoolingMode
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError, NotFoundError
from mycli.runtime.tokenizer.chat_template import Message
from tests.support import gguf_files
from tests.support.engines import whole
from tests.support.families import CASES, make
from tests.support.family_parts import IDS, SMALL, scaled
from tests.support.models import CPU
from tests.support.paths import PICO

LLAMA3 = scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LLAMA4 = scaled("llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=8)
# architecture in GGUF, model_type, config changes, keys
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama-gqa4:2": ("llama", "llama", {}, {}),
    "llama-mha4-tied": ("llama", "llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}, {}),
    "llama-biases-hd32": ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}, {}),
    "llama-rope-llama3": ("llama", "llama", LLAMA3, {}),
    "llama-rope-llama3-of-llama-4": ("llama", "llama", LLAMA4, {}),
    "llama-rope-linear": (
        "llama",
        "llama",
        scaled("linear", factor=2.5),
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
    ),
    "llama-rope-linear-of-2023": ("llama", "llama", scaled("linear", factor=2.5), {"llama.rope.scale_linear": 2.5}),
    "llama-rope-linear-without-type": (
        "llama",
        "llama",
        scaled("linear", factor=2.5),
        {"llama.rope.scaling.factor": 2.5},
    ),
    "llama-rope-linear-1": ("llama", "llama", {}, {"llama.rope.scaling.type": "linear"}),
    "llama-rope-yarn-of-the-whole-context": (
        "llama",
        "llama",
        scaled("yarn", factor=4.0, original_max_position_embeddings=64),
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
    ),
    "llama-rope-yarn": (
        "llama",
        "llama",
        scaled("yarn", factor=4.0, original_max_position_embeddings=16),
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 16,
        },
    ),
    "internlm2-of-parts": ("internlm2", "llama", {}, {}),
    "paddleocr-hd32": ("paddleocr", "llama", {"head_dim": 32}, {"paddleocr.rope.dimension_sections": [4, 6, 6, 0]}),
    "pangu-embedded-hd32": (
        "pangu-embedded",
        "llama",
        {"head_dim": 32, "attention_bias": True},
        {"pangu-embedded.rope.freq_base": 10000.0},
    ),
    "baichuan-mha": ("baichuan", "llama", {"num_key_value_heads": 4}, {}),
    "xverse-mha": ("xverse", "llama", {"num_key_value_heads": 4}, {}),
    "orion-gqa4:2": (
        "orion",
        "stablelm",
        {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, **IDS},  # the converter writes a key of this name
        {"orion.attention.layer_norm_epsilon": 1e-5},
    ),
    "hunyuan_vl-alpha": (
        "hunyuan_vl",
        "hunyuan_v1_dense",
        {"head_dim": 16, **IDS, **scaled("dynamic", factor=1.0, alpha=1000.0)},
        {"hunyuan_vl.rope.scaling.type": "none", "hunyuan_vl.rope.scaling.alpha": 1000.0},
    ),
    "mistral": ("llama", "mistral", {"sliding_window": None}, {}),
    "mistral-window7": ("llama", "mistral", {"sliding_window": 7}, {"llama.attention.sliding_window": 7}),
    "qwen2-biases": ("qwen2", "qwen2", {}, {}),
    "qwen3-hd32": ("qwen3", "qwen3", {"head_dim": 32}, {}),
    "phi3-window16": ("phi3", "phi3", {"sliding_window": 16, **IDS}, {"phi3.attention.sliding_window": 16}),
    "gemma2-window7": (
        "gemma2",
        "gemma2",
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16, **IDS},
        {
            "gemma2.attention.sliding_window": 7,
            "gemma2.attn_logit_softcapping": 50.0,
            "gemma2.final_logit_softcapping": 30.0,
        },
    ),
    "gemma3-window7-six-layers": (
        "gemma3",
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, **IDS},
        {"gemma3.attention.sliding_window": 7},
    ),
    "gemma3-yarn-without-window": (  # Rnj-1
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention"] * 3,
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "attn_factor": 1.0,
                    "beta_fast": 64.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            **IDS,
        },
        {
            "gemma3.final_logit_softcapping": 30.0,
            "gemma3.rope.scaling.type": "yarn",
            "gemma3.rope.scaling.factor": 4.0,
            "gemma3.rope.scaling.original_context_length": 16,
            "gemma3.rope.scaling.yarn_attn_factor": 1.0,
            "gemma3.rope.scaling.yarn_beta_fast": 64.0,
        },
    ),
    "smollm3-five-layers": ("smollm3", "smollm3", {"num_hidden_layers": 5, **IDS}, {}),
    "olmo2-mha": ("olmo2", "olmo2", {"num_key_value_heads": 4, **IDS}, {}),
}


def llama3_factors(config: dict[str, Any]) -> list[float]:
    """Return the RoPE factors as LlamaModel.generate_extra_tensors of llama.cpp's converter writes them."""
    rope = config["rope_parameters"]
    factor, high = rope["factor"], rope["high_freq_factor"]
    dim, old = (
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        rope["original_max_position_embeddings"],
    )
    factors = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / dim)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / 1.0:
            factors.append(factor)
        else:
            smooth = (old / wavelength - 1.0) / (high - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


FUSED = ("llama-gqa4:2", "llama-biases-hd32", "qwen2-biases", "qwen3-hd32", "gemma3-window7-six-layers", "olmo2-mha")


@pytest.mark.parametrize(
    ("name", "fused_qkv"), [*((name, False) for name in MODELS), *((name, True) for name in FUSED)]
)
def test_logits_are_those_of_transformers(name: str, fused_qkv: bool, tmp_path: Path) -> None:
    arch, model_type, changes, keys = MODELS[name]
    reference = make(tmp_path / "hf", model_type, changes)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    extra = {"rope_freqs.weight": llama3_factors(config)} if name.startswith("llama-rope-llama3") else {}
    path = tmp_path / "model.gguf"
    keys = {**gguf_files.byte_tokenizer(config["vocab_size"]), **keys}
    gguf_files.write_model(tmp_path / "hf", path, arch, "F32", config, keys, extra, fused_qkv=fused_qkv)
    folder = open_model_folder(path)
    original = open_model_folder(tmp_path / "hf").config
    for field in (
        "hidden_size",
        "heads",
        "kv_heads",
        "head_dim",
        "windows",
        "rope_scaling",
        "tie_embeddings",
        "qkv_bias",
    ):
        assert getattr(folder.config, field) == getattr(original, field), field
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = reference(tokens).logits
    actual = whole(load_model(folder, CPU).model, tokens)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_layers_without_attention_or_mlp_are_those_of_transformers(tmp_path: Path) -> None:
    """As conversion/deci.py writes Nemotron Super: numbers of heads and widths by layer, zero for a missing part."""
    reference = make(tmp_path / "hf", *CASES["nemotron-nas-every-kind"])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    sizes = {
        "deci.attention.head_count": [4, 0, 4, 4],
        "deci.attention.head_count_kv": [2, 0, 4, 1],
        "deci.feed_forward_length": [512, 256, 0, 256],
    }
    keys = {**gguf_files.byte_tokenizer(config["vocab_size"]), **sizes}
    gguf_files.write_model(tmp_path / "hf", tmp_path / "model.gguf", "deci", "F32", config, keys)
    folder = open_model_folder(tmp_path / "model.gguf")
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = reference(tokens).logits
    actual = whole(load_model(folder, CPU).model, tokens)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("slides", [None, [True, False, True, True, False]], ids=["by-number", "by-pattern"])
def test_gains_of_head_norms_hold_the_scale_of_queries(slides: list[bool] | None, tmp_path: Path) -> None:
    """As conversion/muse_glimmer.py writes Muse Glimmer; llama.cpp rotates the layers with a window."""
    types = None if slides is None else ["sliding_attention" if slide else "full_attention" for slide in slides]
    bases = None if slides is None else [float(slide) for slide in slides]
    changes = {"layer_types": types, "layer_rope_theta": bases, "attention_bias": slides is None}
    model_type, small = CASES["muse_glimmer-window7"]
    layers = 5 if slides else 4  # without a pattern, llama.cpp counts the layers from the first one
    reference = make(tmp_path / "hf", model_type, {**small, **changes, "num_hidden_layers": layers})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    prefix = "muse-glimmer."
    keys = {
        **gguf_files.byte_tokenizer(config["vocab_size"]),
        **{f"{prefix}attention.sliding_window": 7, f"{prefix}final_logit_softcapping": 3.0},
        f"{prefix}logit_scale": config["output_multiplier"],
        **({} if slides is None else {f"{prefix}attention.sliding_window_pattern": slides}),
    }
    gains = {"q": [config["qk_scale_factor"]] * 16, "k": [1.0] * 16}
    extra = {f"blk.{index}.attn_{part}_norm.weight": gains[part] for index in range(layers) for part in "qk"}
    gguf_files.write_model(tmp_path / "hf", tmp_path / "model.gguf", "muse-glimmer", "F32", config, keys, extra)
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = reference(tokens).logits
    actual = whole(load_model(open_model_folder(tmp_path / "model.gguf"), CPU).model, tokens)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_linear_layer_in_place_of_attention_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "hf", *CASES["nemotron-nas-every-kind"])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    sizes = {"deci.attention.head_count_kv": [2, 0, 4, 1], "deci.feed_forward_length": [512, 256, 0, 256]}
    keys = {**gguf_files.byte_tokenizer(config["vocab_size"]), **sizes}
    gguf_files.write_model(tmp_path / "hf", tmp_path / "model.gguf", "deci", "F32", config, keys)
    with pytest.raises(ModelError, match="replace_with_linear"):
        open_model_folder(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "architecture",
    [known for known in architectures() if known.name in {model[0] for model in MODELS.values()}],
    ids=lambda architecture: architecture.name,
)
def test_tensor_names_are_the_librarys(architecture: Architecture) -> None:
    if architecture.model_type not in CONFIG_MAPPING:
        pytest.skip("transformers has no such model")
    config = AutoConfig.for_model(architecture.model_type, **{**SMALL, "num_hidden_layers": 2, "head_dim": 16, **IDS})
    with torch.device("meta"):
        names = [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture.name)
    library = gguf.get_tensor_name_map(number, 2)
    for name in names:
        expected = library.get_name(name, try_suffixes=(".weight", ".bias"))
        place = architecture.place(name)
        assert place is not None and place.name == expected and architecture.hf_name(place.name) == name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_are_what_the_library_reads(kind: str, tmp_path: Path) -> None:
    changes = {"hidden_size": 128, "intermediate_size": 192}
    make(tmp_path / "hf", "llama", changes)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    path = tmp_path / "model.gguf"
    gguf_files.write_model(tmp_path / "hf", path, "llama", kind, config, gguf_files.byte_tokenizer(97))
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    folder = open_model_folder(path)
    model = load_model(folder, CPU).model
    assert bool(folder.packings) == kind.startswith("Q")
    assert folder.config.dtype == ("float16" if kind == "F16" else "bfloat16")

    def library(name: str) -> Tensor:
        tensor = stored[name]
        return torch.from_numpy(quants.dequantize(tensor.data, GGMLQuantizationType[tensor.tensor_type.name]).copy())

    heads = {"q": 4, "k": 2}
    for index, block in enumerate(model.layers()):
        parts = block.products["qkv"].weight().split([spec.out_features for spec in block.products["qkv"].specs])
        for part, actual in zip(("q", "k", "v"), parts, strict=True):
            expected = library(f"blk.{index}.attn_{part}.weight")
            if part in heads:  # undo llama.cpp's permutation: row 2 i + j of a head is its row j * half + i
                expected = expected.view(heads[part], -1, 2, 128).transpose(1, 2).reshape(expected.shape)
            # Dequantizing rounds a packed weight once, to the dtype of its scales.
            torch.testing.assert_close(actual.float(), expected, rtol=2**-11 if folder.packings else 0, atol=2**-24)
    table = library("token_embd.weight")
    assert torch.equal(model.embedding, table)
    halves = load_model(folder, replace(CPU, dtype=torch.bfloat16)).model
    assert torch.equal(halves.embedding, table.bfloat16())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_parts_of_one_quantized_tensor_are_those_of_three(kind: str, tmp_path: Path) -> None:
    config = json.loads((PICO / "config.json").read_text())
    keys, names = gguf_files.published_tokenizer(PICO, "smollm"), ("q_proj", "k_proj", "v_proj")
    read = []
    for fused_qkv in (False, True):
        path = tmp_path / f"{fused_qkv}.gguf"
        gguf_files.write_model(PICO, path, "llama", kind, config, keys, fused_qkv=fused_qkv)
        assert ("attn_qkv" in str([tensor.name for tensor in GGUFReader(path).tensors])) == fused_qkv
        checkpoint = open_model_folder(path).checkpoint()
        read.append([checkpoint.read(f"model.layers.5.self_attn.{name}.weight") for name in names])
    assert all(torch.equal(*parts) for parts in zip(*read, strict=True))


@pytest.mark.parametrize(("rows", "heads"), [(8, 1), (8, 2), (24, 3), (64, 4)], ids=str)
def test_rows_of_heads_are_paired_as_in_llama_cpp(rows: int, heads: int) -> None:
    config = replace(open_model_folder(PICO).config, heads=heads, kv_heads=heads)
    order = file_order(PAIRED_Q, config, rows)
    assert torch.equal(order[order.argsort()], torch.arange(rows))
    rows_in_pairs = torch.arange(rows).view(heads, 2, -1).swapaxes(1, 2).reshape(-1)  # llama.cpp's permute
    assert torch.equal(order, rows_in_pairs)


@pytest.fixture(scope="module")
def pico_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "pico.gguf"
    config = json.loads((PICO / "config.json").read_text())
    gguf_files.write_model(PICO, path, "llama", "BF16", config, gguf_files.published_tokenizer(PICO, "smollm"))
    return path


def test_tokenizer_template_and_ends_come_from_the_file(pico_file: Path) -> None:
    theirs, ours = open_model_folder(PICO), open_model_folder(pico_file)
    conversation = [Message("system", "Be brief."), Message("user", "Grüße <|im_end|> 123 🙂\n\n")]
    assert ours.tokenizer().apply_chat_template(conversation) == theirs.tokenizer().apply_chat_template(conversation)
    assert ours.tokenizer().eos == theirs.tokenizer().eos and ours.tokenizer().bos == theirs.tokenizer().bos
    assert set(theirs.config.eos) <= set(ours.config.eos)
    actual = ours.chat_template()
    assert actual is not None and actual.source() == theirs.tokenizer_settings().values["chat_template"]


def test_sampling_that_the_file_recommends(tmp_path: Path) -> None:
    config = json.loads((PICO / "config.json").read_text())
    keys = gguf_files.published_tokenizer(PICO, "smollm")
    keys |= {"general.sampling.temp": 0.7, "general.sampling.top_k": 40, "general.sampling.top_p": 7.0}
    keys |= {"tokenizer.ggml.suppress_tokens": [9, 8]}
    gguf_files.write_model(PICO, tmp_path / "a.gguf", "llama", "BF16", config, keys)
    defaults, warnings = open_model_folder(tmp_path / "a.gguf").generation
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.7, 40, None), "as it was before it had 4 bytes"
    assert defaults.suppressed == (9, 8)
    assert len(warnings) == 1 and "top_p" in warnings[0]


@pytest.mark.parametrize(("value", "mode"), [(None, None), (0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, None)])
def test_pooling_of_embedding_models(value: int | None, mode: PoolingMode | None, tmp_path: Path) -> None:
    config = json.loads((PICO / "config.json").read_text())
    keys = gguf_files.byte_tokenizer(4096) | ({} if value is None else {"llama.pooling_type": value})
    gguf_files.write_model(PICO, tmp_path / "a.gguf", "llama", "BF16", config, keys)
    expected = None if mode is None else EmbeddingSpec((mode,), normalize=True)
    assert open_model_folder(tmp_path / "a.gguf").embedding == expected


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(pico_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(pico_file.read_bytes())
    folder = open_model_folder(path)
    assert isinstance(folder, GgufFolder)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    with pytest.raises(ModelError, match="changed"):
        load_model(folder, CPU)


def test_parts_missing_and_parts_given_by_a_later_one(pico_file: Path, tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    first.write_bytes(pico_file.read_bytes())
    with pytest.raises(ModelError, match="m-00002-of-00002.gguf: missing"):
        open_model_folder(first)
    second = tmp_path / "m-00002-of-00002.gguf"
    second.write_bytes(pico_file.read_bytes())
    with pytest.raises(ModelError, match="not the first part"):
        open_model_folder(second)
    with pytest.raises(ModelError, match="one of 1 parts"):
        open_model_folder(first)
    with pytest.raises(NotFoundError):
        open_model_folder(tmp_path / "absent.gguf")
