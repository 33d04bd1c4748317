"""Check that exports are read back with equal weights, refused where that is impossible, and rounded on request."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mycli.quant.export import ExportRequest, find_export_target, targets
from mycli.quant.export._folder import only_packing
from mycli.quant.export._weights import Weights, exact_values
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.formats import read_dense
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.resolve import Source
from tests.support import quantizing
from tests.support.exports import dense_values, export_to, packed_family, same
from tests.support.families import CASES, class_of, make
from tests.support.gguf_exports import make_exported
from tests.support.models import CPU, random_model


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("copies")
    folders = {"dense": random_model(base / "dense")}
    for bits, group in ((4, 32), (4, 64), (4, None), (8, 32), (8, None), (3, 64), (2, 32)):
        name = f"int{bits}-{f'g{group}' if group else 'channel'}"
        recipe = Recipe(method="rtn", bits=bits, group=group)
        folders[name] = quantizing.make(Source("dense", folders["dense"]), base / name, recipe).folder
    return folders


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
    done = export_to(copies[name], to, tmp_path / "out")
    assert not done.rounded and not done.left_out and not done.separate_experts and done.path.exists()
    assert same(dense_values(copies[name]), dense_values(done.path))


@pytest.mark.parametrize("to", ["gguf", "gptq", "awq", "mlx", "safetensors"])
def test_progress_ends_at_the_number_of_tensors_and_the_size_is_that_of_the_files(
    to: str, copies: dict[str, Path], tmp_path: Path
) -> None:
    module, variant = find_export_target(to)
    folder, calls = copies["int4-g64"], list[tuple[str, int, int]]()
    request = ExportRequest(Source("int4", folder), open_model_folder(folder), tmp_path / "out.gguf", variant)
    done = module.export(request, lambda *call: calls.append(call))
    assert calls == [("exporting", tensor, len(calls)) for tensor in range(1, len(calls) + 1)] and len(calls) > 20
    files = [path for path in (done.path, *done.path.rglob("*")) if path.is_file() and path.name != "mycli.json"]
    assert done.nbytes == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize(("name", "group"), [("int4-g32", 32), ("int4-channel", -1)])
def test_the_config_describes_the_words(name: str, group: int, copies: dict[str, Path], tmp_path: Path) -> None:
    """Other programs choose their kernels by the group; -1 is a whole row."""
    expected = {
        "gptq": {"bits": 4, "group_size": group, "desc_act": False, "sym": True},
        "awq": {"bits": 4, "group_size": group, "zero_point": True, "modules_to_not_convert": None},
    }
    for layout, settings in expected.items():
        done = export_to(copies[name], layout, tmp_path / layout)
        section = json.loads((done.path / "config.json").read_text())["quantization_config"]
        assert settings.items() <= section.items()


@pytest.mark.parametrize("layout", ["gptq", "awq", "mlx"])
def test_dense_tensors_keep_their_dtype(layout: str, copies: dict[str, Path], tmp_path: Path) -> None:
    """Embeddings in blocks become fp32, which alone holds their values."""
    done = export_to(copies["int4-g64"], layout, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (copies["int4-g64"], done.path))
    dense = {name: values for name, values in before.items() if name in after}
    assert "model.embed_tokens.weight" in dense and "model.norm.weight" in dense
    assert all(after[name].dtype == values.dtype == torch.bfloat16 for name, values in dense.items())
    for variant, dtype in (("gguf", torch.bfloat16), ("gguf:q4_0", torch.float32)):
        file = export_to(copies["int4-g64"], variant, tmp_path / f"{dtype}.gguf", requantize=True).path
        done = export_to(file, layout, tmp_path / str(dtype), requantize=True)
        embedding = load_file(done.path / "model.safetensors")["model.embed_tokens.weight"]
        expected = dense_values(file)["model.embed_tokens.weight"]
        assert embedding.dtype == dtype and torch.equal(embedding.float(), expected)


@pytest.mark.parametrize("layout", ["gptq", "mlx"])
def test_products_of_other_layouts_are_not_rounded(layout: str, copies: dict[str, Path], tmp_path: Path) -> None:
    packed = export_to(copies["int4-g64"], layout, tmp_path / layout).path
    with pytest.raises(ModelError, match="int4-g64.* weights, which bf16 does not hold exactly"):
        export_to(packed, "safetensors", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"bits": 8}, "linears have 2 different widths or groups"),
        ({"group_size": 32}, "linears have 2 different widths or groups"),
        ({"offsets": True}, "int4-g64-offset weights: GPTQ holds symmetric integers only"),
        ({"permuted": True}, "int4-g64.* weights: GPTQ holds symmetric integers only"),
        ({"codes": "e2m1"}, "e2m1.* weights: GPTQ holds symmetric integers only"),
    ],
    ids=str,
)
def test_a_linear_that_differs_is_refused(change: dict[str, Any], cause: str, copies: dict[str, Path]) -> None:
    folder = open_model_folder(copies["int4-g64"])
    packings = dict(folder.packings)
    packings["model.layers.1.mlp.up_proj"] = replace(packings["model.layers.1.mlp.up_proj"], **change)
    request = SimpleNamespace(folder=SimpleNamespace(config=folder.config, packings=packings))
    with pytest.raises(ModelError, match=cause):
        only_packing(cast(ExportRequest, request), "GPTQ")


def test_a_plain_folder_holds_what_the_packed_one_means(copies: dict[str, Path], tmp_path: Path) -> None:
    """compressed-tensors: products are rounded to the scales' dtype, as every reader of that layout computes them."""
    done = export_to(copies["int4-g32"], "safetensors", tmp_path / "out")
    opened = open_model_folder(done.path)
    assert not done.rounded and not opened.packings and opened.config.dtype == "bfloat16"
    exact, actual = dense_values(copies["int4-g32"]), dense_values(done.path)
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
        export_to(copies[name], to, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "most"), [("f16", 1e-12), ("q8_0", 1e-4), ("q4_0", 0.01), ("q4_k", 0.008)], ids=lambda part: str(part)
)
def test_rounding_is_done_when_asked_and_says_what_it_cost(
    kind: str, most: float, copies: dict[str, Path], tmp_path: Path
) -> None:
    done = export_to(copies["dense"], f"gguf:{kind}", tmp_path / "out.gguf", requantize=True)
    before, after = dense_values(copies["dense"]), dense_values(done.path)
    errors = {tensor.name: tensor.error for tensor in done.rounded}
    before.pop("model.embed_tokens.weight")  # which is read in the model's dtype, rounded once more
    for name, tensor in before.items():
        lost = ((tensor - after[name]).square().sum() / tensor.square().sum()).item()
        assert lost == pytest.approx(errors.get(name, 0.0), rel=1e-3, abs=1e-12) and lost <= most


# Of families whose files have the experts of a layer in one tensor, or queries, keys and values in one by key head.
JOINED = (
    "falcon-40b-biases-untied",
    "gpt_neox-parallel",
    "gpt2-tied",
    "apertus-llama3",  # with tensors of one value, without axes
    "gemma4-8top2",
    "gpt_oss-8top1-tied",
    "granitemoe-8top2",
    "llama4-every-other-top2-biases-tied",
)


@pytest.mark.parametrize(
    "case, changes",
    [
        *((name, {}) for name in JOINED),
        *(
            pytest.param(name, {}, marks=pytest.mark.slow)
            for name in ("mistral4-beyond", "granitemoe_swa-thetas-tied-biases")
        ),
        pytest.param("granitemoe-8top2", {"num_local_experts": 1, "num_experts_per_tok": 1}, id="one-expert"),
    ],
)
def test_transformers_finds_every_tensor_of_a_plain_folder(case: str, changes: dict[str, int], tmp_path: Path) -> None:
    """It gives random values to tensors that it does not find, and warns."""
    model_type, others = CASES[case]
    reference = make(tmp_path / "source", model_type, {**others, **changes})
    tokens = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    done = export_to(tmp_path / "source", "safetensors:fp32", tmp_path / "out")
    theirs, info = class_of(model_type).from_pretrained(
        done.path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, reference(tokens).logits)
    assert same(dense_values(tmp_path / "source"), dense_values(done.path))


@pytest.mark.parametrize("name", ["falcon-7b", "gemma-gqa4:2", "deepseek_v2-groups-odd-sizes-biases-tied"])
def test_transformers_reads_the_plain_folder_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    """Its classes do not take every field, and have names of their own."""
    make_exported(tmp_path / "source", name)
    file = export_to(tmp_path / "source", "gguf:f32", tmp_path / "a.gguf", requantize=True).path
    written = export_to(file, "safetensors:fp32", tmp_path / "plain").path
    tokens = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, actual = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
            for folder in (tmp_path / "source", written)
        )
    torch.testing.assert_close(actual, expected)


def test_what_bf16_does_not_hold_fp32_does(copies: dict[str, Path], tmp_path: Path) -> None:
    file = export_to(copies["dense"], "gguf:q8_0", tmp_path / "a.gguf", requantize=True).path
    with pytest.raises(ModelError, match="bf16 does not hold") as refused:
        export_to(file, "safetensors", tmp_path / "out")
    assert refused.value.code == "fp32-or-requantize"
    assert same(dense_values(file), dense_values(export_to(file, "safetensors:fp32", tmp_path / "out").path))


def test_an_output_is_not_replaced_unasked_and_its_suffix_is_given(copies: dict[str, Path], tmp_path: Path) -> None:
    done = export_to(copies["dense"], "gguf", tmp_path / "out")
    assert done.path == tmp_path / "out.gguf"
    with pytest.raises(UsageError, match="exists already"):
        export_to(copies["dense"], "gguf", tmp_path / "out.gguf")
    export_to(copies["dense"], "gguf", tmp_path / "out.gguf", overwrite=True)
    export_to(copies["int4-g32"], "mlx", tmp_path / "folder")
    with pytest.raises(UsageError, match="exists already"):
        export_to(copies["int4-g32"], "mlx", tmp_path / "folder")
    export_to(copies["int4-g32"], "mlx", tmp_path / "folder", overwrite=True)
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="thesis.txt"):
        export_to(copies["int4-g32"], "mlx", tmp_path / "folder", overwrite=True)


@pytest.mark.parametrize(
    ("to", "cause", "hint"),
    [
        ("onnx", "not a layout", "choose from: awq, gguf, gptq, mlx, safetensors"),
        ("", "not a layout", "choose from: awq, gguf, gptq, mlx, safetensors"),
        ("gguf:q9", "not a variant", "choose from: gguf:f32, gguf:f16, gguf:bf16, gguf:q8_0, gguf:q4_0, gguf:q4_k"),
        ("gptq:4", "not a variant", "choose from: gptq"),
        ("gguf:q4_k_m", "a mix of types is made by quantizing", ""),
        ("q4_k_m", "a mix of types is made by quantizing", ""),
    ],
)
def test_a_target_that_there_is_not(to: str, cause: str, hint: str) -> None:
    with pytest.raises(UsageError, match=cause) as refused:
        find_export_target(to)
    assert refused.value.hint == hint
    assert targets() == ["awq", "gguf", "gptq", "mlx", "safetensors"]


def test_exact_values_are_the_products_without_rounding(copies: dict[str, Path]) -> None:
    weights = Weights(open_model_folder(copies["int4-g32"]))
    name = next(iter(weights.linears))
    actual = exact_values(weights.packed(name))
    assert actual.dtype == torch.float32 and not torch.equal(actual, actual.bfloat16().float())


def test_gptq_names_a_packed_head(tmp_path: Path) -> None:
    source = Source("dense", random_model(tmp_path / "dense"))
    for head in ("keep", "int4"):
        recipe = Recipe(method="rtn", bits=4, group=32, head=head)
        packed = quantizing.make(source, tmp_path / head, recipe).folder
        done = export_to(packed, "gptq", tmp_path / f"gptq-{head}")
        settings = json.loads((done.path / "config.json").read_text())["quantization_config"]
        assert settings["lm_head"] is (head == "int4") and same(dense_values(packed), dense_values(done.path))


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_head_of_another_width_is_written_dequantized(tmp_path: Path, layout: str) -> None:
    """Both formats have one width; AWQ has no packed head at all."""
    source = Source("dense", random_model(tmp_path / "dense"))
    packed = quantizing.make(source, tmp_path / "packed", Recipe("rtn", bits=4, group=32, head="int8")).folder
    done = export_to(packed, layout, tmp_path / layout, requantize=True)
    opened = open_model_folder(done.path)
    assert "lm_head" not in opened.packings and len(opened.packings) == 21
    head = opened.checkpoint().read("lm_head.weight")
    expected = read_dense(
        open_model_folder(packed).checkpoint(), opened.config.head(), open_model_folder(packed).packings, CPU.device
    )
    assert head.dtype == torch.bfloat16 and torch.equal(head, expected.bfloat16())


def test_a_dtype_has_one_name(tmp_path: Path) -> None:
    """A model of transformers 4 names its dtype torch_dtype, which would contradict that of the export."""
    folder = random_model(tmp_path / "old", dtype=None, torch_dtype="bfloat16")
    for variant, dtype in (("", "bfloat16"), (":fp32", "float32")):
        config = json.loads(
            (export_to(folder, f"safetensors{variant}", tmp_path / dtype).path / "config.json").read_text()
        )
        assert config["dtype"] == dtype and "torch_dtype" not in config


@pytest.mark.parametrize("layout", ["gptq", "awq", "mlx"])
@pytest.mark.parametrize("case", ["gpt_neox-parallel", "falcon-40b-biases-untied", "gpt2-tied"])
def test_layouts_without_joined_linears_refuse_families_whose_files_have_them(
    case: str, layout: str, tmp_path: Path
) -> None:
    """Queries, keys and values would be packed apart, and other programs would not find theirs."""
    packed = packed_family(tmp_path, case, Recipe("rtn", bits=4, group=None, head="keep"))
    with pytest.raises(ModelError, match=r"0\.(self_attention|attention|attn)\.(query_key_value|c_attn)"):
        export_to(packed, layout, tmp_path / layout, requantize=True)


def test_packed_rows_that_do_not_fill_blocks_are_written_as_floats(tmp_path: Path) -> None:
    source = Source("dense", random_model(tmp_path / "dense", intermediate_size=200))
    packed = quantizing.make(source, tmp_path / "packed", Recipe("rtn", bits=4, group=None)).folder
    done = export_to(packed, "gguf", tmp_path / "out")
    assert done.kinds["Q4_0"] == 18 and not done.rounded
    assert same(dense_values(packed), dense_values(done.path))


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
        export_to(folder, to, tmp_path / "out.gguf", requantize=True)
    assert [path.name for path in tmp_path.iterdir()] == ["large"]
