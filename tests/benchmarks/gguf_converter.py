"""Compares transformers' logits with ours on GGUF files that llama.cpp's converter writes, for every family.

    python -m tests.benchmarks.gguf_converter LLAMA_CPP [NAME ...] [--type f32|bf16|q8_0]
        [--fuse-qkv] [--record FILE]

The models are random. LLAMA_CPP is a source tree with `conversion/` and `gguf-py/`, as in the sdist of
llama-cpp-python. NAME is a case of `tests.support.families` or a prefix of one. `--record` writes keys and tensor names
as JSON, for the tests.
"""

import argparse
import importlib
import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import UserError
from mycli.runtime.models.multimodal import TextPart
from mycli.runtime.utils.json_fields import Fields
from tests.benchmarks.gguf_converter_rounding import make_ternary, round_weights
from tests.support.engines import whole
from tests.support.families import CASES, TOKENS, make
from tests.support.family_parts import longrope, ministral_rope, scaled
from tests.support.gguf_exports import MULTIMODAL_NAMES
from tests.support.gguf_files import byte_tokenizer
from tests.support.models import CPU
from tests.support.multimodal_families import make_folder

BOUND = 1e-4  # relative to the largest logit, at F32
TYPES = {"f32": "ALL_F32", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
# Cases that the converter cannot write or that GGUF has no key for, with the reason.
REASONS: dict[str, str] = {
    "llama-rope-dynamic": "no key: dynamic rope",
    "mistral-window": "no key: llama.cpp has no window in llama",
    "mixtral-window": "no key: llama.cpp has no window in llama",
    "qwen2-tied-window": "no key: windows of Qwen 2",
    "qwen2_moe-every": "no tensor: MLPs between layers with experts",
    "qwen3_moe-every": "no tensor: MLPs between layers with experts",
    "qwen3_next-odd": "no tensor: MLPs between layers with experts",
    "smollm3-untied-window": "no key: no_rope_layers other than every fourth, windows",
    "ministral3-within-window": "no key: llama.cpp has no window in mistral3",
    "bailing_moe-8top2": "no tensor: llama.cpp requires norms of queries and keys",
    "deepseek-normalized": "no key in deepseek: norm_topk_prob",
    "olmoe-clip": "no key in olmoe: clip_qkv",
    "dots1-window": "no key: windows of dots1",
    "cohere2-untied": "no tensor: llama.cpp takes the embedding as the head",
    "cohere-gqa-untied": "no tensor: llama.cpp takes the embedding as the head",
    "lfm2-untied-biases": "the converter fails: biases of convolutions",
    "lfm2_moe-uncorrected": "the converter fails: an untied head",
    "glm-tied-hd24": "no key in chatglm: head_dim",
    "minimax_m2-top1": "the converter fails: a config without rotary_dim",
    "hunyuan-alpha": "the converter fails: an alpha of other sizes than the published model's",
    "hunyuan_v1_moe-alpha": "the converter fails: an alpha of other sizes than the published model's",
    "deepseek_v3-odd": "no key: rope_interleave",
    "glm4_moe_lite-odd": "no key: rope_interleave",
    "youtu-odd": "no key: rope_interleave",
    "mistral4-groups": "no key: rope_interleave",
    "falcon_h1-normed": "the converter fails: biases",
    "gemma-mqa": "no tensor: llama.cpp takes the embedding as the head, and has no biases",
    "gemma3n-second": "the converter fails: three residual streams",
    "llama4-every": "no key: layers that rotate other than three of four, scales of queries",
    "kimi_linear-groups": "no key: layers without experts after ones with some",
    "bailing_hybrid-unbounded": "the converter fails: decays without a lower bound",
    "stablelm-parallel": "the converter fails: norms of several heads",
    "gpt2-by-layer": "no key: scale_attn_by_inverse_layer_idx",
    "gpt2-unscaled": "no key: scale_attn_weights, n_inner",
    "gpt_bigcode-unscaled": "no key: scale_attn_weights, n_inner",
    "gpt_neox-sequential": "no tensor: llama.cpp requires biases in attention",
    "phi-head-norms": "no tensor in phi2: norms of queries and keys",
}
PUBLISHED_CLASSES = {
    "BailingHybridForCausalLM": "BailingMoeV3ForCausalLM",
    "Mistral4ForCausalLM": "Mistral3ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM": "Gemma4UnifiedForConditionalGeneration",
    "PhimoeForCausalLM": "PhiMoEForCausalLM",
}  # by the class of transformers
# Config changes that make a case expressible in GGUF.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe-8top2": {"norm_topk_prob": True},
    "gemma2-window7-tied": {"query_pre_attn_scalar": 16},
    "gemma2-mqa-low-caps-untied": {"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3-window7-tied": {"query_pre_attn_scalar": 16},
    "gemma3-linear-untied": {
        "query_pre_attn_scalar": 32,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 7,
        "tie_word_embeddings": True,
    },
    "glm-half-turned": {"rms_norm_eps": 1e-5},
    "bamba": scaled("default", partial_rotary_factor=1.0),  # the converter reorders the rows of whole heads
    "bamba-odd-sizes-biases-tied": {"time_step_limit": (0.0, float("inf"))},
    "falcon_h1-multipliers": {"head_dim": 16},
    "llama4-chunk16": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "nemotron_h-every-kind": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "granitemoehybrid-dense-odd-sizes-rope-biases-tied": {
        "position_embedding_type": "nope",
        "time_step_limit": (0.0, float("inf")),
    },
    "nemotron_h-groups-latent-experts-odd-sizes-biases-unnormalized": {
        "layers_block_type": ["full_attention", "moe", "linear_attention", "moe"],
        "n_group": 1,
        "mamba_head_dim": 32,
        "time_step_min": 0.001,
        "layer_norm_epsilon": 1e-5,
    },
    "mamba2-2-groups": {"intermediate_size": 128},
    "mamba2-odd-sizes-biases-tied": {"intermediate_size": 192, "time_step_limit": (0.0, float("inf"))},
    "mamba-odd": {"intermediate_size": 128, "use_conv_bias": True, "use_bias": False},
    "falcon_mamba": {"intermediate_size": 128, "mixer_rms_eps": 1e-6},
    "falcon_mamba-odd": {"intermediate_size": 128, "use_conv_bias": True, "use_bias": False},
    "jamba-odd": {"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False},
    "cohere2-window7-tied": {"rotary_pct": 1.0},
    "olmo-mha-tied-biases": {"attention_bias": False},  # the converter reorders the rows of weights, not of biases
    "starcoder2-window7-tied": {"sliding_window": None},
    "starcoder2-untied-no-bias": {"hidden_act": "gelu_pytorch_tanh"},
    "phi-gqa4:2": {"num_key_value_heads": 4, "intermediate_size": 256},  # the converter assumes both
    "nemotron-half-rotated": {"head_dim": 16},
    "falcon-40b": {"bias": False, "ffn_hidden_size": 256},
    # The converter does not write the base.
    "falcon-11b": {"rope_parameters": {"rope_type": "default", "rope_theta": 500042.0}},
    # The converter reorders the rows of weights, not of biases, and writes no original context.
    "minicpm-longrope": {"attention_bias": False, **longrope(8, original=128)},
    "minicpm3": {
        **{"v_head_dim": 16, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4},
        **{"attention_bias": False, "mlp_bias": False},
    },
    "minicpm3-longrope": {"q_lora_rank": 24, "original_max_position_embeddings": 128},
    "mistral4": ministral_rope(16, scale=0.0),  # the converter has no key for it, llama.cpp has
    "afmoe-biases-tied": {"layer_types": ["sliding_attention"] * 3, "mup_enabled": True},
    "laguna": {"layer_types": ["full_attention"] + ["sliding_attention"] * 2},
    "phimoe": {"original_max_position_embeddings": 64, "router_jitter_noise": 0.01},
    "exaone_moe-groups": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "cohere2_moe-sigmoid": {"shared_expert_combination_strategy": "average", "attention_bias": False},
    "laguna-value-gates": {"moe_router_logit_softcapping": 0.0, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "mellum-dense": {"mlp_layer_types": ["sparse"] * 3, "norm_topk_prob": True},
    "bitnet-gqa4:2": {"tie_word_embeddings": True, "hidden_act": "silu"},
    "bitnet-tied-biases": {"attention_bias": False},
    "granite_swa-window7-thetas": {"layer_rope_theta": [0, 10000.0, 10000.0, 10000.0]},
    "granitemoe_swa-thetas-tied-biases": {"layer_rope_theta": [10000.0, 0, 10000.0]},
    "smallthinker-layouts": {
        **{"num_hidden_layers": 5, "rope_layout": [0, 1, 1, 1, 0], "sliding_window_layout": [0, 1, 1, 1, 0]},
        "sliding_window_size": 4096,
    },
    "solar_open": {"partial_rotary_factor": 1.0},  # as published; without it the converter writes .5
    "hunyuan_v1_moe-8top2": {"moe_intermediate_size": [88] * 3, "moe_topk": [2] * 3, "num_shared_expert": [1] * 3},
}


def _vocabulary(model: Any) -> None:
    for key, value in byte_tokenizer(model.hparams["vocab_size"]).items():
        write = model.gguf_writer
        if isinstance(value, list):
            write.add_array(key, value)
        elif isinstance(value, str):
            write.add_string(key, value)
        else:
            write.add_uint32(key, value)


@contextmanager
def _modules(root: Path) -> Iterator[Any]:
    paths = [str(root), str(root / "gguf-py")]
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "gguf"}
    with mock.patch.object(sys, "path", [*paths, *sys.path]):
        yield importlib.import_module("conversion")
    for name in [name for name in sys.modules if name.split(".")[0] in ("gguf", "conversion")]:
        del sys.modules[name]
    sys.modules.update(ours)


def converter(root: Path, *, fuse_qkv: bool = False) -> Callable[[Path, Path, str], None]:
    """Return a function (folder, file, type) that writes a GGUF file with llama.cpp's converter."""
    with _modules(root) as conversion:
        gguf = sys.modules["gguf"]
        base = sys.modules["conversion.base"]

    def write(folder: Path, path: Path, kind: str) -> None:
        logging.disable(logging.WARNING)
        settings = json.loads((folder / "config.json").read_text())
        plain = mock.Mock(side_effect=ValueError)  # omits the defaults of transformers, which include expert fields
        with (
            mock.patch.dict(sys.modules, {"gguf": gguf, "conversion": conversion, "conversion.base": base}),
            mock.patch.object(base.AutoConfig, "from_pretrained", plain)
            if settings["model_type"] in ("nemotron_h", "bailing_hybrid", "kimi_linear", "gpt_neox")
            else nullcontext(),
        ):
            name = settings["architectures"][0]
            cls = conversion.get_model_class(PUBLISHED_CLASSES.get(name, name))
            cls.no_mtp = True  # transformers saves no MTP head
            model = cls(folder, gguf.LlamaFileType[TYPES[kind]], path, fuse_qkv=fuse_qkv)
            target = getattr(model, "impl", model)
            target.set_vocab = lambda: _vocabulary(target)
            model.write()

    return write


def _as_published(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a config of transformers 5 with the keys and values that the converter looks for."""
    if settings["model_type"] == "granitemoehybrid":
        kinds = {"full_attention": "attention", "linear_attention": "mamba"}
        settings["layer_types"] = [kinds[kind] for kind in settings["layer_types"]]
    if settings["model_type"] in ("deepseek_v3", "glm4_moe_lite", "kimi_k2"):
        settings["scoring_func"] = "sigmoid"  # the published configs set this, those of transformers do not
    if settings["model_type"] == "gemma4_unified_text":
        settings["moe_intermediate_size"] = None
    classes = {"minicpm": "MiniCPMForCausalLM", "exaone": "ExaoneForCausalLM"}
    classes |= {"bailing_moe": "BailingMoeV2ForCausalLM", "deepseek": "DeepseekForCausalLM"}
    classes |= {"maincoder": "MaincoderForCausalLM", "smallthinker": "SmallThinkerForCausalLM"}
    classes["muse_glimmer_text"] = "MuseGlimmerForConditionalGeneration"
    if settings["model_type"] in classes:
        settings["architectures"] = [classes[settings["model_type"]]]
    if settings["model_type"] == "exaone":
        settings["rms_norm_eps"] = settings["layer_norm_epsilon"]  # transformers gives it both names
    if settings["model_type"] == "bailing_moe":  # each shared expert counts for itself in the class's size
        settings["moe_shared_expert_intermediate_size"] = settings["moe_intermediate_size"]
    if settings["model_type"] == "gpt_neox":
        settings["rotary_pct"] = settings["rope_parameters"]["partial_rotary_factor"]
    if settings["model_type"] == "gpt2":
        settings["n_ctx"] = settings["n_positions"]
    if settings["model_type"] == "afmoe":
        settings["route_norm"] = True
    if settings["model_type"] in ("granite_swa", "granitemoe_swa"):
        settings["no_rope_layers"] = [int(bool(theta)) for theta in settings["layer_rope_theta"]]
    if settings["model_type"] == "mimo_v2_flash":
        slides = [int(kind == "sliding_attention") for kind in settings["layer_types"]]
        settings |= {"hybrid_layer_pattern": slides, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        settings |= {f"swa_{key}": settings[key] for key in ("head_dim", "num_attention_heads", "v_head_dim")}
        settings |= {"swa_num_key_value_heads": 2 * settings["num_key_value_heads"]}
        full, sliding = (settings["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
        settings |= {"layernorm_epsilon": settings["rms_norm_eps"], "swa_rope_theta": sliding["rope_theta"]}
        settings["rope_parameters"] = full
    if settings["model_type"] == "kimi_linear":
        full = [index + 1 for index, kind in enumerate(settings["layer_types"]) if kind == "full_attention"]
        settings["linear_attn_config"] = {
            **{"full_attn_layers": full, "num_heads": settings["linear_num_heads"]},
            **{"head_dim": settings["linear_head_dim"], "short_conv_kernel_size": settings["linear_conv_kernel_dim"]},
        }
        settings |= {"moe_router_activation_func": "sigmoid", "scoring_func": "sigmoid"}
        settings["first_k_dense_replace"] = settings["mlp_layer_types"].count("dense")
    if settings["model_type"] == "bailing_hybrid":
        settings |= {"no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"}
        settings |= {"head_dim": settings["linear_head_dim"], "norm_topk_prob": settings["moe_renormalize"]}
        settings |= {"moe_shared_expert_intermediate_size": settings["moe_intermediate_size"]}
        settings |= {"n_group": settings["num_expert_group"], "scoring_func": "sigmoid"}
        settings |= {"num_experts_per_tok": settings["num_experts_per_token"]}
    if settings["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        settings["norm_eps"] = settings["layer_norm_epsilon"]
        settings["hybrid_override_pattern"] = "".join(letters[kind] for kind in settings.pop("layers_block_type"))
        settings["num_hidden_layers"] = len(settings["hybrid_override_pattern"])
        if "E" not in settings["hybrid_override_pattern"]:
            del settings["num_experts_per_tok"]
    return settings


# Tensor names of published files by those of transformers, where the converter knows the former alone.
PUBLISHED_NAMES = {
    "kimi_linear": ((r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1"),),
    "bitnet": ((r"attn_sub_norm", "inner_attn_ln"), (r"ffn_sub_norm", "ffn_layernorm")),
}


def _rename(path: Path, model_type: str) -> None:
    tensors = load_file(path)
    for pattern, name in PUBLISHED_NAMES[model_type]:
        tensors = {re.sub(pattern, name, stored): tensor for stored, tensor in tensors.items()}
    save_file(tensors, path)


def _changes(name: str) -> dict[str, Any]:
    return {key: value for prefix in CHANGES if name.startswith(prefix) for key, value in CHANGES[prefix].items()}


def compare(name: str, write: Callable[[Path, Path, str], None], kind: str, folder: Path) -> tuple[float, Path]:
    """Return the largest difference of logits relative to the largest logit, and the file."""
    if name in MULTIMODAL_NAMES:
        model_type, reference = name, make_folder(folder / "hf", name)
    else:
        model_type, changes = CASES[name]
        reference = make(folder / "hf", model_type, {**changes, **_changes(name)})
    if model_type.startswith("gemma"):  # the converter counts the tokens in this file
        vocabulary = {"model": {"vocab": {str(token): token for token in range(97)}}, "added_tokens": []}
        (folder / "hf" / "tokenizer.json").write_text(json.dumps(vocabulary))
    (folder / "config.json").write_text((folder / "hf" / "config.json").read_text())
    settings = json.loads((folder / "hf" / "config.json").read_text())
    settings["architectures"] = [type(reference).__name__]
    (folder / "hf" / "config.json").write_text(json.dumps(_as_published(settings)))
    if model_type in PUBLISHED_NAMES:
        _rename(folder / "hf" / "model.safetensors", model_type)
    path = folder / "model.gguf"
    write(folder / "hf", path, kind)
    if model_type == "bitnet":
        make_ternary(reference)
    if kind != "f32":
        round_weights(reference, kind)
    tokens = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        opened = open_model_folder(path)
        assert isinstance(opened, GgufFolder)
        opened = replace(opened, config=replace(opened.config, dtype="float32"))
        actual = whole(load_model(opened, CPU).model, tokens)
    return ((actual - expected).abs().max() / expected.abs().max()).item(), path


def facts(path: Path) -> dict[str, Any]:
    """Return the keys and values except the tokenizer's, and the shape of every tensor."""
    reader = GGUFReader(path)
    skipped = ("GGUF.", "general.", "tokenizer.")
    keys = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith(skipped) or name == "general.architecture"
    }
    return {
        "keys": keys,
        "factors": [float(x) for tensor in reader.tensors if tensor.name == "rope_freqs.weight" for x in tensor.data],
        "tensors": {tensor.name: [int(size) for size in tensor.shape] for tensor in reader.tensors},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--type", choices=TYPES, default="f32")
    parser.add_argument("--fuse-qkv", action="store_true", help="q, k and v of a layer in one tensor, where they may")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write, recorded = converter(arguments.llama_cpp, fuse_qkv=arguments.fuse_qkv), {}
    for name in (*CASES, *MULTIMODAL_NAMES):
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        lost = next((reason for prefix, reason in REASONS.items() if name.startswith(prefix)), None)
        if lost is not None:
            print(f"| {name} | {lost} |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                difference, path = compare(name, write, arguments.type, Path(folder))
                config = Fields(json.loads((Path(folder) / "config.json").read_text()), "config.json")
                recorded[name] = {
                    "config": dict(TextPart.from_config(config).config.values),
                    **facts(path),
                }
                outcome = f"{difference:.1e}" + ("" if difference <= BOUND else " DIFFERS")
                fused = sum(".attn_qkv." in tensor for tensor in recorded[name]["tensors"])
                outcome += f", {fused} fused tensors" if arguments.fuse_qkv else ""
            except UserError as error:
                outcome = f"refused: {error}"
            except NotImplementedError:
                outcome = "the converter has no such model"
            except Exception as error:  # raised by the converter
                import traceback

                traceback.print_exc()
                outcome = f"{type(error).__name__}: {error}"
        print(f"| {name} | {outcome:.150} |", flush=True)
    if arguments.record:
        arguments.record.write_text(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main()
