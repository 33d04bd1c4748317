"""Test a folder's tensors against its config (A22, A29 to A32)."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.safetensors_header import SINGLE
from mycli.runtime.checkpoint.validation import check_tensors
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.registry import parse_config
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import BY_SAFETENSORS_NAME
from mycli.runtime.utils.json_fields import Fields
from tests.attacks.safetensors_attacks import simple


def config(**changes: Any) -> ModelConfig:
    values = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    return parse_config(Fields({**values, **changes}, "config.json"))


Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def blank(dtype: str, *shape: int) -> tuple[str, tuple[int, ...], bytes]:
    count = BY_SAFETENSORS_NAME[dtype].nbytes
    for size in shape:
        count *= size
    return dtype, shape, bytes(count)


def dense(config: ModelConfig) -> Tensors:
    return {name: blank("BF16", *shape) for name, shape in config.tensors()}


def packed(config: ModelConfig, packings: dict[str, Packing]) -> Tensors:
    tensors = dense(config)
    for name, packing in packings.items():
        _, (rows, columns), _ = tensors.pop(f"{name}.weight")
        tensors[f"{name}.weight_packed"] = blank("I32", rows, -(-columns * packing.bits // 32))
        tensors[f"{name}.weight_scale"] = blank("BF16", rows, columns // (packing.group_size or columns))
        tensors[f"{name}.weight_shape"] = ("I64", (2,), struct.pack("<2q", rows, columns))
    return tensors


def manifest(folder: Path, tensors: Tensors) -> Manifest:
    (folder / SINGLE).write_bytes(simple(**tensors))
    return Manifest.open(folder)


CONFIGS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


@pytest.mark.parametrize("bits", [None, 2, 3, 4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_model_passes(name: str, bits: int | None, tmp_path: Path) -> None:
    described = config(**CONFIGS[name])
    packings = {x: Packing(bits, 32) for x in [linear.name for linear in described.linears()]} if bits else {}
    check_tensors(manifest(tmp_path, packed(described, packings)), described, packings)


Q, LAYER = "model.layers.0.self_attn.q_proj", "model.layers.1"


FOUR = Packing(4, 32)


def _put(**tensors: Any) -> Callable[[Tensors], object]:
    return lambda all_tensors: all_tensors.update({name.replace("__", "."): value for name, value in tensors.items()})


def _q(kind: str, value: tuple[str, tuple[int, ...], bytes] | None) -> Callable[[Tensors], object]:
    name = f"{Q}.{kind}"
    return lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value})


def _all_f32(tensors: Tensors) -> None:
    tensors.update({name: blank("F32", *value[1]) for name, value in tensors.items() if name.endswith("scale")})


def _rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


# Changes to the packed model, and the expected error text.
MISMATCHES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "A22-norm-missing": (lambda t: t.pop("model.norm.weight"), "model.norm.weight: missing"),
    "A22-unexpected": (_put(extra__weight=blank("BF16", 4)), "extra.weight: not part of the model"),
    "A22-many-unexpected": (_put(**{f"e{i}": blank("BF16", 1) for i in range(9)}), "e0, e1, e2 and 6 more: not part"),
    "A29-width-too-small": (
        _q("weight_packed", blank("I32", 64, 7)),
        r"weight_packed has shape \[64, 7\], expected \[64, 8\]",
    ),
    "A29-width-too-large": (_q("weight_packed", blank("I32", 64, 9)), r"weight_packed has shape \[64, 9\]"),
    "A29-transposed": (_q("weight_packed", blank("I32", 8, 64)), r"weight_packed has shape \[8, 64\]"),
    "A29-rows": (_q("weight_packed", blank("I32", 63, 8)), r"weight_packed has shape \[63, 8\]"),
    "A29-dtype": (_q("weight_packed", blank("F32", 64, 8)), "weight_packed is F32, expected I32"),
    "A29-scale-groups": (
        _q("weight_scale", blank("BF16", 64, 1)),
        r"weight_scale has shape \[64, 1\], expected \[64, 2\]",
    ),
    "A29-scale-rows": (_q("weight_scale", blank("BF16", 32, 2)), r"weight_scale has shape \[32, 2\]"),
    "A29-scale-flat": (_q("weight_scale", blank("BF16", 128)), r"weight_scale has shape \[128\]"),
    "A29-scale-dtype": (_q("weight_scale", blank("I32", 64, 2)), "weight_scale is I32, expected BF16 or F16 or F32"),
    "A29-scale-missing": (_q("weight_scale", None), "weight_scale: missing"),
    "A29-shape-missing": (_q("weight_shape", None), "weight_shape: missing"),
    "A29-shape-differs": (
        _q("weight_shape", ("I64", (2,), struct.pack("<2q", 64, 63))),
        r"holds \[64, 63\], expected \[64, 64\]",
    ),
    "A29-shape-swapped": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight_shape": ("I64", (2,), struct.pack("<2q", 64, 96))}),
        r"holds \[64, 96\], expected \[96, 64\]",
    ),
    "A29-shape-huge": (_q("weight_shape", ("I64", (2,), b"\xff" * 16)), r"holds \[-1, -1\]"),
    "A29-shape-dtype": (_q("weight_shape", ("F32", (2,), bytes(8))), "weight_shape is F32"),
    "A29-asymmetric": (_q("weight_zero_point", blank("I32", 8, 2)), f"{Q}.weight_zero_point: zero points, but"),
    "A30-g-idx": (_q("weight_g_idx", blank("I32", 64)), f"{Q}.weight_g_idx: an order of inputs"),
    "A31-gptq": (_q("qweight", blank("I32", 8, 64)), f"{Q}.qweight: a weight of GPTQ or AWQ, but"),
    "A29-also-dense": (_q("weight", blank("BF16", 64, 64)), f"{Q}.weight: not quantized, but"),
    "A29-dense-instead": (_rename(f"{Q}.weight_packed", f"{Q}.weight"), f"{Q}.weight: not quantized, but"),
    "B12-fewer-rows": (
        _put(model__embed_tokens__weight=blank("BF16", 99, 64)),
        r"has shape \[99, 64\], expected \[100, 64\]",
    ),
    "B12-more-rows": (
        _put(model__embed_tokens__weight=blank("BF16", 128, 64)),
        r"has shape \[128, 64\], expected \[100, 64\]",
    ),
    "B19-bias": (_q("bias", blank("BF16", 64)), f"{Q}.bias: a bias where config.json has none"),
    "A10-integer-norm": (_put(model__norm__weight=blank("I32", 64)), "model.norm.weight is I32"),
    "A8-norm-shape": (_put(model__norm__weight=blank("BF16", 1, 64)), r"has shape \[1, 64\], expected \[64\]"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_model_rejected(case: str, tmp_path: Path) -> None:
    described = config()
    packings = dict.fromkeys([linear.name for linear in described.linears()][:-1], FOUR)
    tensors = packed(described, packings)
    change, problem = MISMATCHES[case]
    change(tensors)
    with pytest.raises(ModelError, match=problem) as caught:
        check_tensors(manifest(tmp_path, tensors), described, packings)
    assert remedy(caught.value)


# A valid dense model with a config that does not fit it.
CLAIMS: dict[str, tuple[dict[str, Any], dict[str, Packing], str]] = {
    "B4-more-layers": ({"num_hidden_layers": 4000}, {}, r"model.layers.2.* and \d+ more: missing"),
    "B4-fewer-layers": ({"num_hidden_layers": 1}, {}, "model.layers.1.* more: not part of the model"),
    "B4-hidden": ({"hidden_size": 1 << 20, "head_dim": 16}, {}, r"embed_tokens.weight has shape \[100, 64\]"),
    "B4-intermediate": ({"intermediate_size": 1 << 24}, {}, r"gate_proj.weight has shape \[96, 64\]"),
    "B5-head-dim": ({"head_dim": 32}, {}, r"q_proj.weight has shape \[64, 64\], expected \[128, 64\]"),
    "B6-kv-heads": ({"num_key_value_heads": 4}, {}, r"k_proj.weight has shape \[32, 64\], expected \[64, 64\]"),
    "B12-vocab-above-rows": ({"vocab_size": 1 << 20}, {}, r"embed_tokens.weight has shape \[100, 64\]"),
    "B19-bias-missing": ({"attention_bias": True}, {}, "q_proj.bias, .* missing"),
    "A29-says-packed": ({}, {Q: FOUR}, f"{Q}.weight: not quantized, but"),
    "A29-group-does-not-divide": ({}, {"model.layers.0.mlp.down_proj": Packing(4, 128)}, "does not divide 96"),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_config_rejected(case: str, tmp_path: Path) -> None:
    changes, packings, problem = CLAIMS[case]
    with pytest.raises(ModelError, match=problem):
        check_tensors(manifest(tmp_path, dense(config())), config(**changes), packings)


def test_packed_model_that_config_calls_dense(tmp_path: Path) -> None:
    tensors = packed(config(), {Q: FOUR})
    with pytest.raises(ModelError, match=f"{Q}.weight_packed: quantized, but config.json does not say so"):
        check_tensors(manifest(tmp_path, tensors), config(), {})


def test_three_bit_words_of_whole_codes_pass(tmp_path: Path) -> None:
    """Accept ten 3-bit codes per word, the format of compressed-tensors up to 0.17."""
    packings = {Q: Packing(3, 32)}
    tensors = packed(config(), packings)
    tensors[f"{Q}.weight_packed"] = blank("I32", 64, 7)
    check_tensors(manifest(tmp_path, tensors), config(), packings)
    with pytest.raises(ModelError, match=r"\[64, 7\], expected \[64, 8\]"):
        check_tensors(manifest(tmp_path, tensors), config(), {Q: Packing(4, 32)})


@pytest.mark.parametrize("case", ["A32-tied-and-stored", "A32-tied-other-shape", "A32-untied-missing"])
def test_tied_head(case: str, tmp_path: Path) -> None:
    tied = config(tie_word_embeddings=True)
    if case == "A32-tied-and-stored":
        check_tensors(manifest(tmp_path, dense(config())), tied, {})
    elif case == "A32-tied-other-shape":
        tensors = {**dense(tied), "lm_head.weight": blank("BF16", 90, 64)}
        with pytest.raises(ModelError, match=r"lm_head.weight has shape \[90, 64\]"):
            check_tensors(manifest(tmp_path, tensors), tied, {})
    else:
        with pytest.raises(ModelError, match="lm_head.weight: missing") as caught:
            check_tensors(manifest(tmp_path, dense(tied)), config(), {})
        assert "tie_word_embeddings" in caught.value.hint


def test_harmless_leftovers_pass(tmp_path: Path) -> None:
    tensors = dense(config())
    tensors[f"{LAYER}.self_attn.rotary_emb.inv_freq"] = blank("F32", 8)
    tensors["model.rotary_emb.inv_freq"] = blank("F32", 8)
    check_tensors(manifest(tmp_path, tensors), config(), {})
