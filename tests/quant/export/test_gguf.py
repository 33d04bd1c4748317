"""Check that exported GGUF files have the values, types and metadata that the gguf library reads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.quant.export import _ggml_blocks as blocks
from mycli.quant.export import gguf as writer
from mycli.quant.export._gguf_tokenizer import tokenizer_metadata
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.gguf.files import GgufFiles
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields
from tests.attacks.fuzz_models import in_blocks
from tests.support import quantizing
from tests.support.engines import whole
from tests.support.exports import dense_values, export_to
from tests.support.fim_model import MARKS, write_fim_tokenizer
from tests.support.gguf_exports import make_exported
from tests.support.grids import chosen
from tests.support.models import CPU, random_model
from tests.support.packed_folder import write_packed
from tests.support.packed_mixture import FIELDS
from tests.support.paths import PICO


def test_the_library_reads_a_file_of_ours(tmp_path: Path) -> None:
    """llama.cpp's own package reads names, types, shapes and values; rows of q and k are in pairs."""
    done = export_to(PICO, "gguf", tmp_path / "pico.gguf")
    reader = gguf.GGUFReader(done.path)
    read = {field.name: field.contents() for field in reader.fields.values() if not field.name.endswith("tokens")}
    header = [read[key] for key in ("general.architecture", "llama.block_count", "tokenizer.ggml.pre")]
    assert header == ["llama", 6, "smollm"]
    names = {tensor.name for tensor in reader.tensors}
    library = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 6)
    original = dense_values(PICO)
    assert names == {library.get_name(name, try_suffixes=(".weight",)) for name in original}
    query = next(tensor for tensor in reader.tensors if tensor.name == "blk.3.attn_q.weight")
    stored = torch.from_numpy(quants.dequantize(query.data, GGMLQuantizationType(query.tensor_type)).copy())
    ours = original["model.layers.3.self_attn.q_proj.weight"]
    assert torch.equal(stored, ours.reshape(4, 2, 32, 256).swapaxes(1, 2).reshape(256, 256))


def _in_fp32(path: Path) -> ModelFolder:
    # A file's embedding is read in the dtype of the model.
    opened = open_model_folder(path)
    return replace(opened, config=replace(opened.config, dtype="float32"))


@pytest.mark.parametrize("kind", ["gguf", "gguf:q8_0"])
def test_pico_answers_from_its_file_as_from_its_folder(kind: str, tmp_path: Path) -> None:
    done = export_to(PICO, kind, tmp_path / "pico.gguf", requantize=True)
    tokens = torch.randint(3, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    # Rounded weights are compared with a dense copy of themselves.
    same = PICO if kind == "gguf" else export_to(done.path, "safetensors:fp32", tmp_path / "dense").path
    mine, theirs = (whole(load_model(_in_fp32(path), CPU).model, tokens) for path in (done.path, same))
    if kind == "gguf":
        assert torch.equal(mine, theirs)
    # Each product rounds its activations to 16 bits, 2^-16 of the largest: over six layers the errors stay below 2^-10.
    error = (mine - theirs).abs().amax(-1)
    assert (error <= 2.0**-10 * theirs.abs().amax(-1)).all()
    best = theirs.topk(2).values
    clear = best[..., 0] - best[..., 1] > 2 * error
    assert clear.float().mean() > 0.9 and torch.equal(mine.argmax(-1)[clear], theirs.argmax(-1)[clear])


@pytest.fixture(scope="module")
def pico_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_to(PICO, "gguf:f32", tmp_path_factory.mktemp("pico") / "pico.gguf").path


@pytest.mark.parametrize("kind", chosen(["IQ4_XS", "Q5_K", "IQ2_XS"], quick=["IQ2_XS"]))
def test_blocks_of_a_file_are_copied(kind: str, pico_f32: Path, tmp_path: Path) -> None:
    source, copy = tmp_path / "source.gguf", tmp_path / "copy.gguf"
    source.write_bytes(in_blocks(pico_f32, kind))
    assert not export_to(source, "gguf", copy).rounded
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    copied = {tensor.name: tensor for tensor in gguf.GGUFReader(copy).tensors}
    assert tensors.keys() == copied.keys() and tensors["token_embd.weight"].tensor_type.name == kind
    assert all(np.array_equal(tensors[name].data, copied[name].data) for name in tensors)
    dense = export_to(source, "gguf:f32", tmp_path / "dense.gguf")
    assert not dense.rounded
    for tensor in gguf.GGUFReader(dense.path).tensors:
        original = tensors[tensor.name]
        assert np.array_equal(tensor.data, quants.dequantize(original.data, original.tensor_type)), tensor.name
    with pytest.raises(ModelError, match="fp32 values that BF16 does not hold"):
        export_to(source, "gguf:bf16", tmp_path / "half.gguf")


def _packed(folder: Path, bits: int) -> Path:
    dense = random_model(folder / "dense")
    return quantizing.make(Source("dense", dense), folder / "packed", Recipe("rtn", bits=bits, group=32)).folder


def test_groups_with_offsets_are_q4_1(tmp_path: Path) -> None:
    offsets = export_to(_packed(tmp_path, 4), "mlx", tmp_path / "mlx").path
    done = export_to(offsets, "gguf", tmp_path / "out.gguf")
    assert done.kinds["Q4_1"] == 21 and not done.rounded
    before, after = dense_values(offsets), dense_values(done.path)
    assert all(torch.equal(after[name], values) for name, values in before.items())


def test_groups_of_8_bits_with_offsets_are_rounded_to_q8_0(tmp_path: Path) -> None:
    offsets = export_to(_packed(tmp_path, 8), "mlx", tmp_path / "mlx").path
    with pytest.raises(ModelError, match="int8-g32-offset weights, which Q8_0 does not hold exactly"):
        export_to(offsets, "gguf", tmp_path / "out.gguf")
    done = export_to(offsets, "gguf", tmp_path / "out.gguf", requantize=True)
    assert done.kinds["Q8_0"] == len(done.rounded) == 21


def test_codes_of_5_bits_are_in_q8_0(tmp_path: Path) -> None:
    fields = {key: value for key, value in FIELDS.items() if "experts" not in key and "moe" not in key}
    packed = write_packed(tmp_path / "packed", {**fields, "model_type": "llama"}, {"": 5})
    shutil.copy(PICO / "tokenizer.json", packed)
    done = export_to(packed, "gguf", tmp_path / "a.gguf")
    assert done.kinds["Q8_0"] == 14 and not done.rounded
    before, after = dense_values(packed), dense_values(done.path)
    assert all(torch.equal(after[name], values) for name, values in before.items())
    offsets = export_to(packed, "mlx", tmp_path / "mlx").path
    with pytest.raises(ModelError, match="int5-g32-offset weights, which Q8_0 does not hold exactly"):
        export_to(offsets, "gguf", tmp_path / "b.gguf")


def test_codes_of_mxfp4_keep_their_values(tmp_path: Path) -> None:
    folder, generator = random_model(tmp_path / "mlx"), torch.Generator().manual_seed(4)
    tensors = load_file(folder / "model.safetensors")
    packed = [name for name in tensors if name.endswith("_proj.weight")]
    for name in packed:
        rows, columns = tensors[name].shape
        codes = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)
        scales = torch.randint(0, 140, (rows, columns // 32), generator=generator).to(torch.uint8)
        tensors |= {name: codes.view(torch.uint32), f"{name.removesuffix('weight')}scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    done = export_to(folder, "gguf", tmp_path / "a.gguf")
    assert done.kinds["MXFP4"] == len(packed) == 21 and not done.rounded
    before, after = dense_values(folder), dense_values(done.path)
    assert all(torch.equal(after[name], values) for name, values in before.items())
    down = next(tensor for tensor in gguf.GGUFReader(done.path).tensors if tensor.name == "blk.1.ffn_down.weight")
    assert np.array_equal(quants.dequantize(down.data, down.tensor_type), before["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("kind", "packing", "scale", "offset", "exact"),
    [
        ("Q4_1", Packing(4, 32, offsets=True), 1.0, 1.0, True),
        ("Q4_1", Packing(4, 32, offsets=True), 1.0, 1 + 2.0**-10, False),  # the minimum is -7 + 2^-10
        ("Q4_1", Packing(4, 32, offsets=True), 1 + 2.0**-11, 8 * 2.0**-11, False),
        ("MXFP4", Packing(4, 32, codes="e2m1"), 2.0**-3, None, True),
        ("MXFP4", Packing(4, 32, codes="e2m1"), 3.0, None, False),
    ],
)
def test_blocks_whose_scale_or_minimum_is_rounded_are_not_exact(
    kind: str, packing: Packing, scale: float, offset: float | None, exact: bool
) -> None:
    codes = torch.arange(32, dtype=torch.uint8).view(1, 32) % 16
    offsets = None if offset is None else torch.tensor([[offset]])
    weight = PackedWeight(pack(codes, 4), torch.tensor([[scale]]), packing, 32, offsets)
    encoded = blocks.from_packed(weight, kind)
    assert encoded is not None and encoded[1] == exact


def test_scales_beyond_half_precision_are_rounded_on_request(tmp_path: Path) -> None:
    folder, name = _packed(tmp_path, 4), "model.layers.0.mlp.down_proj"
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight_scale"][0, 0] = 1e-9
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name}.weight: its scales are not float16 values, which Q4_0 needs"):
        export_to(folder, "gguf", tmp_path / "out.gguf")
    (rounded,) = export_to(folder, "gguf", tmp_path / "out.gguf", requantize=True).rounded
    assert rounded.name == f"{name}.weight" and 0 < rounded.error < 1e-9


@pytest.mark.parametrize(("columns", "kind"), [(256, "Q4_K"), (160, "Q8_0"), (200, "F16")])
def test_rows_that_do_not_fill_super_blocks_have_the_next_larger_type(columns: int, kind: str, tmp_path: Path) -> None:
    dense = random_model(tmp_path / "dense", intermediate_size=columns)
    done = export_to(dense, "gguf:q4_k", tmp_path / "a.gguf", requantize=True)
    assert GgufFiles.open(done.path).header.tensors["blk.0.ffn_down.weight"].dtype == kind


def test_metadata_comes_back_as_the_config_it_was(tmp_path: Path) -> None:
    changes = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}}
    changes["rope_parameters"] |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = random_model(tmp_path / "llama3", num_hidden_layers=1, max_position_embeddings=512, **changes)
    done = export_to(folder, "gguf", tmp_path / "out.gguf")
    before, after = open_model_folder(folder).config, open_model_folder(done.path).config
    for field in (
        "rope_scaling",
        "rope_theta",
        "heads",
        "kv_heads",
        "head_dim",
        "max_context",
        "vocab_size",
        "tie_embeddings",
    ):
        assert getattr(before, field) == getattr(after, field), field
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


def _random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_rounding_is_the_librarys_bit_for_bit(kind: str) -> None:
    rounding = {"Q4_0": blocks.round_q4_0, "Q8_0": blocks.round_q8_0}[kind]
    data = torch.cat([_random(64, 32), torch.zeros(1, 32), torch.full((1, 32), -1.5), _random(64, 32) * 1e-6])
    actual = rounding(data).numpy()
    expected = quants.quantize(data.numpy(), GGMLQuantizationType[kind])
    assert np.array_equal(actual, expected)


def test_nested_scales_lose_little_more_than_free_ones() -> None:
    """Q4_K loses 0.51 % of the square of normal weights; scales without a search for the best, 0.53 %."""
    weights = _random(64, 256)
    actual = dequantize_blocks(writer._round(weights, "Q4_K")[0], "Q4_K")
    assert ((actual - weights).square().sum() / weights.square().sum()).item() < 0.0052
    edges = torch.stack([torch.zeros(256), torch.ones(256), -torch.ones(256), torch.linspace(0, 1, 256)])
    lost = (dequantize_blocks(writer._round(edges, "Q4_K")[0], "Q4_K") - edges).abs().view(4, 8, 32).amax(-1)
    # A group spans from zero or below to zero or above in 15 steps; its scale and minimum are off by at most half of
    # 1/63 of the largest of the block, all of it within a rounding of float16.
    groups = edges.view(4, 8, 32)
    reach, least = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0), -groups.amin(-1).clamp(max=0)
    nested = (reach.amax(1, keepdim=True) + least.amax(1, keepdim=True)) / 126
    assert (lost <= reach / 30 + nested + 2.0**-10 * reach).all()
    assert not lost[0].any() and lost[1:3].max() <= 2.0**-10


def test_file_types_are_the_librarys() -> None:
    names = {kind.value: kind.name for kind in gguf.LlamaFileType}
    known = {kind: names[value] for kind, value in writer._FILE_TYPES.items() if value in names}
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "MXFP4"} <= known.keys()
    for kind, name in known.items():
        assert name in (f"ALL_{kind}", f"MOSTLY_{kind}", f"MOSTLY_{kind}_S", f"MOSTLY_{kind}_MOE"), kind


@pytest.mark.parametrize("name", ["pico", "sentencepiece"])
def test_tokens_without_an_embedding_row_are_not_written(name: str) -> None:
    """As <image_soft_token> of Gemma 3 1B; a vocabulary larger than the embedding is an error."""
    raw = json.loads((PICO / "tokenizer.json").read_text())
    if name == "sentencepiece":
        raw = {
            "model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0, "b": 1}, "merges": []},
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "added_tokens": [],
        }
    rows = 1 + max((*raw["model"]["vocab"].values(), *(token["id"] for token in raw["added_tokens"])))
    raw["added_tokens"].append({"id": rows, "content": "<image>", "special": True})
    keys = tokenizer_metadata(Fields(raw, "tokenizer.json"), Fields({}, ""), rows)
    assert len(keys["tokenizer.ggml.tokens"]) == rows and "<image>" not in keys["tokenizer.ggml.tokens"]
    raw["model"]["vocab"]["beyond"] = rows
    with pytest.raises(ModelError, match=f"'beyond' has id {rows}, but the model has {rows} embedding rows"):
        tokenizer_metadata(Fields(raw, "tokenizer.json"), Fields({}, ""), rows)


def test_marks_to_fill_in_the_middle_have_ids(tmp_path: Path) -> None:
    """llama.cpp finds the marks of some models by their text, and those of the others by these ids alone."""
    write_fim_tokenizer(tmp_path)
    raw, rows = json.loads((tmp_path / "tokenizer.json").read_text()), 4096
    keys = tokenizer_metadata(Fields(raw, "tokenizer.json"), Fields({}, ""), rows)
    parts = ("pre", "suf", "mid", "pad", "rep", "sep")
    assert [keys["tokenizer.ggml.tokens"][keys[f"tokenizer.ggml.fim_{part}_token_id"]] for part in parts] == [*MARKS]
    named = {"prefix_token": "the", "suffix_token": {"content": "and"}, "middle_token": "for"}
    tokens = tokenizer_metadata(Fields(raw, "tokenizer.json"), Fields(named, ""), rows)
    assert tokens["tokenizer.ggml.tokens"][tokens["tokenizer.ggml.fim_suf_token_id"]] == "and"
    plain = json.loads((PICO / "tokenizer.json").read_text())
    keys = tokenizer_metadata(Fields(plain, "tokenizer.json"), Fields({}, ""), rows)
    assert not [key for key in keys if ".fim_" in key]


@pytest.mark.parametrize(
    ("variant", "types"), [("q8_0", ("F32", "Q8_0")), ("f32", ("F32", "F32")), ("f16", ("F16", "F16"))]
)
def test_matrices_of_which_half_is_transposed_have_no_blocks(
    variant: str, types: tuple[str, str], tmp_path: Path
) -> None:
    make_exported(tmp_path / "hf", "deepseek_v3-groups-yarn")
    done = export_to(tmp_path / "hf", f"gguf:{variant}", tmp_path / "a.gguf", requantize=True)
    kinds = {name: entry.dtype for name, entry in GgufFiles.open(done.path).header.tensors.items()}
    for part, kind in (("attn_k_b", types[0]), ("attn_v_b", types[0]), ("attn_output", types[1])):
        assert {kinds[name] for name in kinds if f".{part}." in name} == {kind}, part
