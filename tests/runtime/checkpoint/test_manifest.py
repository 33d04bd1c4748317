"""Test a folder's tensors against hostile indexes and links (A12, A19 to A24) and its config (A22, A29 to A32)."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE
from mycli.runtime.checkpoint.validation import check_tensors
from mycli.runtime.errors import ModelError, NotFoundError
from mycli.runtime.hub.store import missing_files
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.registry import parse_config
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import BY_SAFETENSORS_NAME
from mycli.runtime.utils.json_fields import Fields
from tests.attacks.safetensors_attacks import ATTACKS, SHARD_NAMES, simple

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
A, B = {"a": ("F32", (2,), bytes(8))}, {"b": ("F32", (1,), bytes(4))}


def sharded(folder: Path, **weight_map: Any) -> Path:
    (folder / SHARDS[0]).write_bytes(simple(**A))
    (folder / SHARDS[1]).write_bytes(simple(**B))
    index = {"metadata": {"total_size": 12}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1], **weight_map}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_single_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(simple(**A, **B))
    manifest = Manifest.open(tmp_path)
    assert (list(manifest.tensors), manifest.nbytes, manifest.warnings) == (["a", "b"], 12, ())


def test_shards(tmp_path: Path) -> None:
    manifest = Manifest.open(sharded(tmp_path))
    assert {name: entry.file for name, entry in manifest.tensors.items()} == {"a": SHARDS[0], "b": SHARDS[1]}
    assert manifest.warnings == ()


def test_a_single_file_counts_next_to_an_index_of_shards_that_are_gone(tmp_path: Path) -> None:
    """As in transformers; published copies of a model often keep the index of the original's shards."""
    (sharded(tmp_path) / SINGLE).write_bytes(simple(**A, **B))
    assert set(Manifest.open(tmp_path).files) == set(SHARDS), "a whole set of shards comes first"
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ModelError, match=f"{SHARDS[1]} missing"):
        Manifest.open(tmp_path)
    (tmp_path / SHARDS[0]).unlink()
    manifest = Manifest.open(tmp_path)
    assert set(manifest.files) == {SINGLE} and set(manifest.tensors) == {"a", "b"}
    assert missing_files(tmp_path, None) == ["config.json"]


@pytest.mark.parametrize("case", ["A1-empty", "A6-one-byte-short", "A11-duplicate-name", "A18-html", "A18-zip"])
def test_hostile_file_is_named(case: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(ATTACKS[case][0]())
    with pytest.raises(ModelError, match=f"^{SINGLE}: .*{ATTACKS[case][1]}"):
        Manifest.open(tmp_path)


@pytest.mark.parametrize("case", SHARD_NAMES)
def test_shard_name_rejected(case: str, tmp_path: Path) -> None:
    sharded(tmp_path, c=SHARD_NAMES[case])
    with pytest.raises(ModelError, match="which is not a shard") as caught:
        Manifest.open(tmp_path)
    assert "\n" not in caught.value.message
    if case in ("A21-bin", "A21-pt"):
        assert "pickles can run code" in caught.value.hint


def _index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(text)


def _shard(number: int, **tensors: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / SHARDS[number]).write_bytes(simple(**tensors))


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "A12-in-two-shards": (_shard(1, **A, **B), f"^a: both in {SHARDS[0]} and in {SHARDS[1]}"),
    "A12-in-wrong-shard": (
        lambda folder: sharded(folder, a=SHARDS[1], b=SHARDS[0]),
        f"a should be in {SHARDS[1]}, but is in {SHARDS[0]}",
    ),
    "A22-shard-missing": (lambda folder: (folder / SHARDS[1]).unlink(), f"{SHARDS[1]} missing"),
    "A22-tensor-missing": (lambda folder: sharded(folder, c=SHARDS[0]), "'c' should be in .* but is in no shard"),
    "A22-index-missing": (lambda folder: (folder / INDEX).unlink(), f"without {INDEX}"),
    "A22-index-empty": (_index('{"weight_map": {}}'), "lists no tensors"),
    "A22-index-without-map": (_index("{}"), "lists no tensors"),
    "A22-index-list": (_index("[]"), "must hold an object"),
    "A22-index-map-list": (_index('{"weight_map": ["a"]}'), "weight_map must be an object"),
    "A22-index-duplicate": (
        _index('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        "duplicate key 'a'",
    ),
    "A22-index-33MB": (_index('{"weight_map": {"a": "' + "x" * (33 << 20) + '"}}'), "more than the 32 MiB allowed"),
    "A13-index-too-many-values": (_index('{"weight_map": {"a": [' + "0," * 350_001 + "0]}}"), "more than the 350000"),
    "A14-index-deep": (_index('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}"), "nested too deeply"),
    "A24-index-is-fifo": (lambda folder: ((folder / INDEX).unlink(), os.mkfifo(folder / INDEX)), "not a regular file"),
    "A24-shard-is-fifo": (
        lambda folder: ((folder / SHARDS[0]).unlink(), os.mkfifo(folder / SHARDS[0])),
        "not a regular",
    ),
    "A24-shard-is-folder": (
        lambda folder: ((folder / SHARDS[0]).unlink(), (folder / SHARDS[0]).mkdir()),
        "not a regular",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folder_rejected(case: str, tmp_path: Path) -> None:
    change, problem = FOLDERS[case]
    change(sharded(tmp_path))
    with pytest.raises(ModelError, match=problem):
        Manifest.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt", "model.pkl"])
def test_pickles_alone_are_refused(name: str, tmp_path: Path) -> None:
    """A19: the pickle file is never opened."""
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(ModelError, match=f"only as pickles .*{name}") as caught:
        Manifest.open(tmp_path)
    assert "safetensors/convert" in caught.value.hint


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"no {SINGLE} and no {INDEX}"):
        Manifest.open(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="only as GGUF"):
        Manifest.open(tmp_path)


@pytest.mark.parametrize("name", ["missing", "file", "file/below", "x" * 300, "nul\0"])
def test_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError):
        Manifest.open(tmp_path / name)


def test_extra_shard_is_a_warning(tmp_path: Path) -> None:
    """A22: a file missing from the index is not part of the model and is not read."""
    (sharded(tmp_path) / "old.safetensors").write_bytes(b"junk")
    manifest = Manifest.open(tmp_path)
    assert set(manifest.tensors) == {"a", "b"}
    assert manifest.warnings == (f"old.safetensors not in {INDEX}: not used",)


def test_links_of_the_hugging_face_cache_are_legal(tmp_path: Path) -> None:
    """A23: a snapshot contains only links to blobs."""
    snapshot, blobs = tmp_path / "models--o--m/snapshots/abc", tmp_path / "models--o--m/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0123").write_bytes(simple(**A))
    (snapshot / SINGLE).symlink_to("../../blobs/0123")
    manifest = Manifest.open(snapshot)
    assert (list(manifest.tensors), manifest.warnings) == (["a"], ())
    assert manifest.tensors["a"].file == SINGLE


@pytest.mark.parametrize("outside", [True, False])
def test_link_out_of_the_folder_is_a_warning(outside: bool, tmp_path: Path) -> None:
    """A23: outside a cache such a link may be intended, so it is reported but allowed."""
    folder = tmp_path / "model"
    folder.mkdir()
    target = (tmp_path if outside else folder) / "elsewhere"
    target.write_bytes(simple(**A))
    (folder / SINGLE).symlink_to(target)
    warnings = Manifest.open(folder).warnings
    assert ["outside the folder" in warning for warning in warnings] == ([True] if outside else [])


def test_folder_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    sharded(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert Manifest.open(tmp_path / "link").warnings == ()


# Against the config


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


def test_three_megabytes_of_header(tmp_path: Path) -> None:
    """A13: the header of a large valid model costs no more than its parsing."""
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight_packed": ("I32", (0, 8), b"") for i in range(30_000)}
    assert len(manifest(tmp_path, tensors).tensors) == 30_000


def test_needs_no_torch() -> None:
    names = "mycli.runtime.checkpoint.manifest, mycli.runtime.utils.atomic_folder"
    code = f"import sys, {names}; sys.exit(bool({{'torch', 'numpy'}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
