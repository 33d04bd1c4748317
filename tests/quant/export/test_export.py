"""Check that exports are read back with equal weights, refused where that is impossible, and rounded on request."""

import json
import re
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
from transformers.quantizers.quantizers_utils import should_convert_module

from mycli.quant import pipeline
from mycli.quant.export import Exported, ExportRequest, find_export_target, mlx, targets
from mycli.quant.export import _ggml_blocks as blocks
from mycli.quant.export import gguf as writer
from mycli.quant.export._gguf_tokenizer import tokenizer_metadata
from mycli.quant.export._weights import Weights, exact_values
from mycli.quant.planning import plan as planning
from mycli.quant.progress import silent
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.formats import read_dense
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields
from tests.attacks.fuzz_models import in_blocks
from tests.support.engines import whole
from tests.support.families import CASES, make
from tests.support.models import CPU, random_model
from tests.support.paths import PICO


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("copies")
    folders = {"dense": random_model(base / "dense")}
    for bits, group in ((4, 32), (4, 64), (8, 32), (8, None), (3, 64), (2, 32)):
        name = f"int{bits}-{f'g{group}' if group else 'channel'}"
        recipe = Recipe(method="rtn", bits=bits, group=group)
        work = planning.plan_quantization(Source("dense", folders["dense"]), recipe, report="none")
        folders[name] = pipeline.quantize(work, base / name, CPU).folder
    return folders


# Sizes that fill groups of 32 and words of AWQ.
WIDE = {
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}


def run(folder: Path, to: str, target: Path, **options: bool) -> Exported:
    module, variant = find_export_target(to)
    request = ExportRequest(Source(folder.name, folder), open_model_folder(folder), target, variant, **options)
    return module.export(request, silent)


def values(folder: Path) -> dict[str, Tensor]:
    opened = open_model_folder(folder)
    weights = Weights(opened)
    return {name: weights.dense(name).float() for name, _ in opened.config.tensors()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


LOSSLESS = [
    *((name, "gguf") for name in ("dense", "int4-g32", "int4-g64", "int8-g32", "int8-channel", "int3-g64", "int2-g32")),
    *((name, "gptq") for name in ("int4-g32", "int8-channel", "int3-g64", "int2-g32")),
    *((name, "awq") for name in ("int4-g32", "int4-g64")),
    *((name, "mlx") for name in ("int4-g64", "int8-g32", "int8-channel", "int3-g64", "int2-g32")),
    ("dense", "gguf:f32"),
    ("dense", "gguf:bf16"),
    ("int4-g32", "gguf:q4_0"),
    ("int4-g32", "gguf:q8_0"),
    ("int4-g32", "safetensors:fp32"),
    ("dense", "safetensors"),
]


@pytest.mark.parametrize(("name", "to"), LOSSLESS, ids=["-to-".join(case) for case in LOSSLESS])
def test_what_fits_keeps_every_value(name: str, to: str, copies: dict[str, Path], tmp_path: Path) -> None:
    done = run(copies[name], to, tmp_path / "out")
    assert not done.rounded and done.path.exists()
    assert same(values(copies[name]), values(done.path))


def test_a_plain_folder_holds_what_the_packed_one_means(copies: dict[str, Path], tmp_path: Path) -> None:
    """compressed-tensors: products are rounded to the scales' dtype, as every reader of that layout computes them."""
    done = run(copies["int4-g32"], "safetensors", tmp_path / "out")
    opened = open_model_folder(done.path)
    assert not done.rounded and not opened.packings and opened.config.dtype == "bfloat16"
    exact, actual = values(copies["int4-g32"]), values(done.path)
    assert all(torch.equal(actual[name], exact[name].bfloat16().float()) for name in exact)


REFUSED = [
    ("dense", "gguf:q8_0", "Q8_0 does not hold"),
    ("dense", "gguf:f16", "F16 does not hold"),
    ("int8-g32", "gguf:q4_0", "Q4_0 does not hold"),
    ("dense", "gguf:q4_k", "does not hold"),
    ("dense", "gptq", "not quantized"),
    ("dense", "awq", "not quantized"),
    ("dense", "mlx", "not quantized"),
    ("int8-g32", "awq", "int8-g32 weights: AWQ"),
]


@pytest.mark.parametrize(("name", "to", "message"), REFUSED, ids=["-to-".join(case[:2]) for case in REFUSED])
def test_what_does_not_fit_is_refused_and_nothing_is_left(
    name: str, to: str, message: str, copies: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        run(copies[name], to, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "most"), [("f16", 1e-12), ("q8_0", 1e-4), ("q4_0", 0.01), ("q4_k", 0.008)], ids=lambda part: str(part)
)
def test_rounding_is_done_when_asked_and_says_what_it_cost(
    kind: str, most: float, copies: dict[str, Path], tmp_path: Path
) -> None:
    done = run(copies["dense"], f"gguf:{kind}", tmp_path / "out.gguf", requantize=True)
    before, after = values(copies["dense"]), values(done.path)
    errors = {tensor.name: tensor.error for tensor in done.rounded}
    before.pop("model.embed_tokens.weight")  # which is read in the model's dtype, rounded once more
    for name, tensor in before.items():
        lost = ((tensor - after[name]).square().sum() / tensor.square().sum()).item()
        assert lost == pytest.approx(errors.get(name, 0.0), rel=1e-3, abs=1e-12) and lost <= most


def test_what_bf16_does_not_hold_fp32_does(copies: dict[str, Path], tmp_path: Path) -> None:
    file = run(copies["dense"], "gguf:q8_0", tmp_path / "a.gguf", requantize=True).path
    with pytest.raises(ModelError, match="bf16 does not hold") as refused:
        run(file, "safetensors", tmp_path / "out")
    assert refused.value.code == "fp32-or-requantize"
    assert same(values(file), values(run(file, "safetensors:fp32", tmp_path / "out").path))


def test_an_output_is_not_replaced_unasked_and_its_suffix_is_given(copies: dict[str, Path], tmp_path: Path) -> None:
    done = run(copies["dense"], "gguf", tmp_path / "out")
    assert done.path == tmp_path / "out.gguf"
    with pytest.raises(UsageError, match="exists already"):
        run(copies["dense"], "gguf", tmp_path / "out.gguf")
    run(copies["dense"], "gguf", tmp_path / "out.gguf", overwrite=True)
    run(copies["int4-g32"], "mlx", tmp_path / "folder")
    with pytest.raises(UsageError, match="exists already"):
        run(copies["int4-g32"], "mlx", tmp_path / "folder")
    run(copies["int4-g32"], "mlx", tmp_path / "folder", overwrite=True)
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="thesis.txt"):
        run(copies["int4-g32"], "mlx", tmp_path / "folder", overwrite=True)


@pytest.mark.parametrize("to", ["onnx", "gguf:q9", "gptq:4", ""])
def test_a_target_that_there_is_not(to: str) -> None:
    with pytest.raises(UsageError, match="not a layout|not a variant"):
        find_export_target(to)
    assert targets() == ["awq", "gguf", "gptq", "mlx", "safetensors"]


def test_the_library_reads_a_file_of_ours(tmp_path: Path) -> None:
    """llama.cpp's own package reads names, types, shapes and values; rows of q and k are in pairs."""
    done = run(PICO, "gguf", tmp_path / "pico.gguf")
    reader = gguf.GGUFReader(done.path)
    read = {field.name: field.contents() for field in reader.fields.values() if not field.name.endswith("tokens")}
    header = [read[key] for key in ("general.architecture", "llama.block_count", "tokenizer.ggml.pre")]
    assert header == ["llama", 6, "smollm"]
    names = {tensor.name for tensor in reader.tensors}
    library = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 6)
    original = values(PICO)
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
    done = run(PICO, kind, tmp_path / "pico.gguf", requantize=True)
    tokens = torch.randint(3, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    # Rounded weights are compared with a dense copy of themselves.
    same = PICO if kind == "gguf" else run(done.path, "safetensors:fp32", tmp_path / "dense").path
    mine, theirs = (whole(load_model(_in_fp32(path), CPU).model, tokens) for path in (done.path, same))
    if kind == "gguf":
        assert torch.equal(mine, theirs)
    # Each product rounds its activations to 16 bits, 2^-16 of the largest: over six layers the errors stay below 2^-10.
    error = (mine - theirs).abs().amax(-1)
    assert (error <= 2.0**-10 * theirs.abs().amax(-1)).all()
    best = theirs.topk(2).values
    clear = best[..., 0] - best[..., 1] > 2 * error
    assert clear.float().mean() > 0.9 and torch.equal(mine.argmax(-1)[clear], theirs.argmax(-1)[clear])


@pytest.mark.parametrize("kind", ["IQ4_XS", "Q5_K", "IQ2_XS"])
def test_blocks_of_a_file_are_copied(kind: str, tmp_path: Path) -> None:
    source, copy = tmp_path / "source.gguf", tmp_path / "copy.gguf"
    source.write_bytes(in_blocks(run(PICO, "gguf:f32", tmp_path / "pico.gguf").path, kind))
    assert not run(source, "gguf", copy).rounded
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    copied = {tensor.name: tensor for tensor in gguf.GGUFReader(copy).tensors}
    assert tensors.keys() == copied.keys() and tensors["token_embd.weight"].tensor_type.name == kind
    assert all(np.array_equal(tensors[name].data, copied[name].data) for name in tensors)
    dense = run(source, "gguf:f32", tmp_path / "dense.gguf")
    assert not dense.rounded
    for tensor in gguf.GGUFReader(dense.path).tensors:
        original = tensors[tensor.name]
        assert np.array_equal(tensor.data, quants.dequantize(original.data, original.tensor_type)), tensor.name
    with pytest.raises(ModelError, match="fp32 values that BF16 does not hold"):
        run(source, "gguf:bf16", tmp_path / "half.gguf")


def test_metadata_comes_back_as_the_config_it_was(copies: dict[str, Path], tmp_path: Path) -> None:
    changes = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}}
    changes["rope_parameters"] |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = random_model(tmp_path / "llama3", num_hidden_layers=1, max_position_embeddings=512, **changes)
    done = run(folder, "gguf", tmp_path / "out.gguf")
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
    """Q4_K's error on normal weights is that of llama.cpp's own rounding: 0.5 % of the square."""
    weights = _random(64, 256)
    actual = dequantize_blocks(blocks.round_q4_k(weights), "Q4_K")
    assert ((actual - weights).square().sum() / weights.square().sum()).item() < 0.006
    edges = torch.stack([torch.zeros(256), torch.ones(256), -torch.ones(256), torch.linspace(0, 1, 256)])
    lost = (dequantize_blocks(blocks.round_q4_k(edges), "Q4_K") - edges).abs().view(4, 8, 32).amax(-1)
    # A group spans from zero or below to zero or above in 15 steps; its scale and minimum are off by at most half of
    # 1/63 of the largest of the block, all of it within a rounding of float16.
    groups = edges.view(4, 8, 32)
    reach, least = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0), -groups.amin(-1).clamp(max=0)
    nested = (reach.amax(1, keepdim=True) + least.amax(1, keepdim=True)) / 126
    assert (lost <= reach / 30 + nested + 2.0**-10 * reach).all()
    assert not lost[0].any() and lost[1:3].max() <= 2.0**-10


def test_exact_values_are_the_products_without_rounding(copies: dict[str, Path]) -> None:
    weights = Weights(open_model_folder(copies["int4-g32"]))
    name = next(iter(weights.linears))
    actual = exact_values(weights.packed(name))
    assert actual.dtype == torch.float32 and not torch.equal(actual, actual.bfloat16().float())


def test_gptq_names_a_packed_head(tmp_path: Path) -> None:
    source = Source("dense", random_model(tmp_path / "dense"))
    for head in ("keep", "int4"):
        recipe = Recipe(method="rtn", bits=4, group=32, head=head)
        work = planning.plan_quantization(source, recipe, report="none")
        packed = pipeline.quantize(work, tmp_path / head, CPU).folder
        done = run(packed, "gptq", tmp_path / f"gptq-{head}")
        settings = json.loads((done.path / "config.json").read_text())["quantization_config"]
        assert settings["lm_head"] is (head == "int4") and same(values(packed), values(done.path))


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_head_of_another_width_is_written_dequantized(tmp_path: Path, layout: str) -> None:
    """Both formats have one width; AWQ has no packed head at all."""
    source = Source("dense", random_model(tmp_path / "dense"))
    work = planning.plan_quantization(source, Recipe("rtn", bits=4, group=32, head="int8"), report="none")
    packed = pipeline.quantize(work, tmp_path / "packed", CPU).folder
    done = run(packed, layout, tmp_path / layout, requantize=True)
    opened = open_model_folder(done.path)
    assert "lm_head" not in opened.packings and len(opened.packings) == 21
    head = opened.checkpoint().read("lm_head.weight")
    expected = read_dense(
        open_model_folder(packed).checkpoint(), opened.config.head(), open_model_folder(packed).packings, CPU.device
    )
    assert head.dtype == torch.bfloat16 and torch.equal(head, expected.bfloat16())


@pytest.mark.parametrize("name", ["qwen2_moe-shared", "qwen3_5-delta"])
def test_routers_and_gates_are_listed_as_not_packed(name: str, tmp_path: Path) -> None:
    """Readers replace all linears but those that the config names: shared_expert_gate, in_proj_a and others."""
    model_type, changes = CASES[name]
    original = make(tmp_path / "dense", model_type, {**changes, **WIDE})
    work = planning.plan_quantization(
        Source("dense", tmp_path / "dense"), Recipe("rtn", bits=4, group=32, head="keep"), report="none"
    )
    packed = open_model_folder(pipeline.quantize(work, tmp_path / "packed", CPU).folder)
    gates = {linear.name for layer in packed.config.layer_specs for linear in layer.unquantized}
    sections = {}
    for layout in ("gptq", "awq"):
        done = run(packed.path, layout, tmp_path / layout, requantize=True)
        assert open_model_folder(done.path).packings.keys() == packed.packings.keys()
        sections[layout] = json.loads((done.path / "config.json").read_text())["quantization_config"]
    listed = sections["awq"]["modules_to_not_convert"]
    linears = [name for name, module in original.named_modules() if isinstance(module, torch.nn.Linear)]
    converted = {name for name in linears if should_convert_module(name, [*listed, "lm_head"])}
    assert converted == {name for name in linears if name in packed.packings} and gates & {*linears}
    # As vLLM and SGLang: a name that contains one of the list.
    assert not any(gate in name for gate in listed for name in packed.packings) and gates == {*listed}
    rules = sections["gptq"]["dynamic"]
    assert len(rules) < len(gates) and all(rule.startswith("-:") for rule in rules)
    matching = {name for name in (*gates, *packed.packings) if any(re.match(rule[2:], name) for rule in rules)}
    assert matching == gates


def test_a_dtype_has_one_name(tmp_path: Path) -> None:
    """A model of transformers 4 names its dtype torch_dtype, which would contradict that of the export."""
    folder = random_model(tmp_path / "old", dtype=None, torch_dtype="bfloat16")
    for variant, dtype in (("", "bfloat16"), (":fp32", "float32")):
        config = json.loads((run(folder, f"safetensors{variant}", tmp_path / dtype).path / "config.json").read_text())
        assert config["dtype"] == dtype and "torch_dtype" not in config


def test_file_types_are_the_librarys() -> None:
    names = {kind.value: kind.name for kind in gguf.LlamaFileType}
    known = {kind: names[value] for kind, value in writer._FILE_TYPES.items() if value in names}
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "MXFP4"} <= known.keys()
    for kind, name in known.items():
        assert name in (f"ALL_{kind}", f"MOSTLY_{kind}", f"MOSTLY_{kind}_S", f"MOSTLY_{kind}_MOE"), kind


def test_biases_that_mlx_would_round_are_refused() -> None:
    """Scales may fit bf16 when offsets, which become biases, do not."""
    offsets = torch.full((4, 1), 1.0 + 2**-10)
    weight = PackedWeight(
        pack(torch.zeros(4, 32, dtype=torch.uint8), 4), torch.ones(4, 1), Packing(4, 32, offsets=True), 32, offsets
    )
    with pytest.raises(ModelError, match="bfloat16 does not hold"):
        mlx._converted(weight, "a.weight", 32, torch.bfloat16, rounding=False)


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


@pytest.mark.parametrize(
    ("to", "kind", "value"),
    [
        *(("gguf:f16", "F16", 1e5), ("gguf:q8_0", "Q8_0", 1e7), ("gguf:q4_0", "Q4_0", 1e6)),
        ("safetensors:fp16", "fp16", 1e5),
    ],
)
def test_values_beyond_fp16_are_refused_and_not_written_as_infinity(
    to: str, kind: str, value: float, copies: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "large"
    shutil.copytree(copies["dense"], folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][0, 0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name}: values beyond the range of {kind}"):
        run(folder, to, tmp_path / "out.gguf", requantize=True)
    assert [path.name for path in tmp_path.iterdir()] == ["large"]
