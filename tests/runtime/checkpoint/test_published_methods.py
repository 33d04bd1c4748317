"""Test layouts stored under another program's `quant_method`: the same tensors are read, or refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.checkpoint.formats.compressed_tensors import write_quantization
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields
from tests.runtime.checkpoint.test_foreign_layouts import read
from tests.runtime.checkpoint.test_formats import CONFIG, NAMES, RAW
from tests.runtime.checkpoint.test_formats import read as read_section
from tests.support.foreign_layouts import COLUMNS, ROWS, Case, digest, integers, stored, weights

AUTO_ROUND = {"quant_method": "auto-round", "data_type": "int", "sym": False, "autoround_version": "0.5.1"}
QUARK = {"quant_method": "quark", "export": {}, "exclude": ["lm_head"]}


def quark(scheme: str, dtype: str = "fp8_e4m3") -> dict[str, Any]:
    return {**QUARK, "global_quant_config": {"weight": {"dtype": dtype, "qscheme": scheme}}}


# As AMD publishes FP8 with a quantized cache: sections for k_proj and v_proj that differ only in their outputs.
CACHED = quark("per_tensor")
CACHED["layer_quant_config"] = {
    name: {**CACHED["global_quant_config"], "output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    for name in ("*k_proj", "*v_proj")
}


def naive(kind: str) -> dict[str, Any]:
    """Return a section of a format that does not name the type of the weights."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}}
    section = {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {"group_0": group}}
    return {**section, "ignore": ["lm_head", "re:model[.]layers[.]3[.].*"]}


def renamed() -> dict[str, Case]:
    cases: dict[str, tuple[Case, dict[str, Any]]] = {}
    for name, case in stored("gptq").items():
        if "ordered" in name:
            continue
        settings = case.section["quantization_config"]
        section = {**AUTO_ROUND, "bits": settings["bits"], "group_size": settings["group_size"]}
        if name.startswith("gptq_v2"):
            cases[f"auto-round-{name}"] = case, {**section, "packing_format": "auto_round:gptqmodel"}
            cases[f"auto-round-plain-{name}"] = case, {**section, "packing_format": "auto_round"}
        else:
            cases[f"auto-round-{name}"] = case, {**section, "packing_format": "auto_round:auto_gptq"}
            old = {**section, "quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}
            cases[f"intel-{name}"] = case, old
            cases[f"auto-round-unsaid-{name}"] = case, section
    for name, case in stored("awq").items():
        group = case.section["quantization_config"]["group_size"]
        section = {**AUTO_ROUND, "bits": 4, "group_size": group, "packing_format": "auto_round:auto_awq"}
        cases[f"auto-round-awq-{name}"] = case, section
    eight = {"quant_method": "auto-round", "data_type": "fp8_e4m3", "bits": 8, "act_bits": 8}
    for name, case in stored("fp8").items():
        if name.endswith(("-1-e4m3fn", "-32x1-e4m3fn")):
            scheme = "per_channel" if "x" in name else "per_tensor"
            cases[f"quark-{name}"] = case, quark(scheme)
            with_cache = replace(case, tensors={**case.tensors, "output_scale": torch.ones(())})
            cases[f"quark-cache-{name}"] = with_cache, CACHED
            cases[f"auto-round-{name}"] = case, {**eight, "packing_format": "auto_round:fp8_static"}
            cases[f"fbgemm-{name}"] = case, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
            algo = "FP8_PER_CHANNEL_PER_TOKEN" if "x" in name else "FP8"
            cases[f"modelopt-{name}"] = case, {"quant_method": "modelopt", "quant_algo": algo}
    return {name: replace(case, section={"quantization_config": section}) for name, (case, section) in cases.items()}


RENAMED = renamed()


@pytest.mark.parametrize("name", RENAMED)
def test_another_name_changes_no_weight(name: str, tmp_path: Path) -> None:
    case = RENAMED[name]
    _, dense = read(tmp_path, case)
    if case.weight is None:
        assert digest(dense.to(getattr(torch, case.digest.split()[0]))) == case.digest
    else:
        assert torch.allclose(dense, case.weight, rtol=0, atol=2**-22 * dense.abs().max().item())


def nvfp4() -> tuple[Case, Tensor]:
    codes, scales = integers(1, 16, ROWS, COLUMNS), (weights(2, ROWS, COLUMNS // 16).abs() * 50).to(torch.float8_e4m3fn)
    shared = torch.tensor(0.00123)
    tensors = {
        "weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": shared,
        "input_scale": torch.tensor(0.5),
    }
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*positive, *(-value for value in positive)], dtype=torch.float64)[codes]
    expected = values * scales.double().repeat_interleave(16, 1) * shared.double()
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    return Case({"quantization_config": section}, tensors, None), expected


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4"])
def test_nvfp4_of_modelopt_is_code_times_both_scales(method: str, tmp_path: Path) -> None:
    case, expected = nvfp4()
    section = {**case.section["quantization_config"], "quant_method": method}
    weight, dense = read(tmp_path, replace(case, section={"quantization_config": section}))
    assert weight.packing.name == "e2m1-g16" and dense.dtype == torch.float32
    # One fp32 rounding for the product of the scales and one for the weight.
    assert ((dense.double() - expected).abs() <= 2.0**-23 * expected.abs()).all()


def test_a_mixture_of_modelopt_is_told_by_its_tensors(tmp_path: Path) -> None:
    case, expected = nvfp4()
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
    weight, _ = read(tmp_path, replace(case, section={"quantization_config": mixed}))
    assert weight.packing.layout == "modelopt"
    (tmp_path / "8").mkdir()
    eight = stored("fp8")["weight_scale-1-e4m3fn"]
    weight, _ = read(tmp_path / "8", replace(eight, section={"quantization_config": mixed}))
    assert weight.packing.layout == "fp8"


@pytest.mark.parametrize(
    ("section", "scheme"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.3*"]}, "e2m1-g16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.3*"]}, "e4m3-channel"),
        ({**quark("per_tensor"), "exclude": ["lm_head", "model.layers.3.*"]}, "e4m3-channel"),
        ({**CACHED, "exclude": ["lm_head", "model.layers.3.*"]}, "e4m3-channel"),
        (naive("float"), "e4m3-channel"),
        (naive("int"), "int8-channel"),
    ],
    ids=["nvfp4", "modelopt-fp8", "quark", "quark-cache", "naive-float", "naive-int"],
)
def test_without_tensors_the_section_tells_what_is_quantized(section: dict[str, Any], scheme: str) -> None:
    actual = read_section(section)
    expected = [name for name in NAMES if name != "lm_head" and ".layers.3." not in name]
    assert list(actual) == expected and {packing.name for packing in actual.values()} == {scheme}
    assert CONFIG.layers > 4, "there is a layer that is left out"


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_modelopt_up_to_0_29_has_a_file_of_its_own(algorithm: str, tmp_path: Path) -> None:
    """Without it, the model would be taken for an unquantized one."""
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert not open_model_folder(tmp_path).packings
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    record = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(record))
    assert list(open_model_folder(tmp_path).packings) == [name for name in NAMES if name != "lm_head"]
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "quantization_config": {"quant_method": "awq"}}))
    assert {packing.layout for packing in open_model_folder(tmp_path).packings.values()} == {"awq"}


@pytest.mark.parametrize("head", [False, True, None], ids=str)
def test_gptq_tells_whether_the_head_is_quantized(head: bool | None) -> None:
    """Without the key, it is not."""
    actual = read_section({"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": head})
    assert list(actual) == [name for name in NAMES if head or name != "lm_head"]


def test_compressed_tensors_first_had_another_section(tmp_path: Path) -> None:
    section = write_quantization({"": Packing(8, None)}, ["lm_head"], "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "compression_config": section}))
    folder = open_model_folder(tmp_path)
    assert {packing.name for packing in folder.packings.values()} == {"int8-channel"}
    assert not folder.raw.has("compression_config"), "an export would describe its dense weights as quantized"


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")], ids=len)
def test_mlx_describes_a_multimodal_model_in_its_outer_config(keys: tuple[str, ...]) -> None:
    settings = {"group_size": 64, "bits": 4, "language_model.model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 8}}
    text = {**RAW, "model_type": "gemma3_text", "head_dim": 32}
    raw = {"model_type": "gemma3", "text_config": text, **dict.fromkeys(keys, settings)}
    packings = ModelFolder.from_config(Fields(raw, "config.json")).packings
    assert packings.pop("model.layers.0.mlp.up_proj").bits == 8
    assert {packing.name for packing in packings.values()} == {"int4-g64-offset"}


REFUSED = {
    "auto-round-mx": ({**AUTO_ROUND, "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp'"),
    "auto-round-mlx": ({**AUTO_ROUND, "bits": 4, "packing_format": "mlx"}, "packing_format 'mlx'"),
    "auto-round-llm-compressor": ({**AUTO_ROUND, "bits": 4, "packing_format": "llm_compressor"}, "'llm_compressor'"),
    "auto-round-int8-activations": (
        {**AUTO_ROUND, "bits": 8, "act_bits": 8, "packing_format": "auto_round"},
        "act_bits '8'",
    ),
    "auto-round-mixed-symmetry": (
        {**AUTO_ROUND, "bits": 4, "extra_config": {"model.layers.0.mlp.up_proj": {"sym": True}}},
        "sym differs",
    ),
    "modelopt-awq": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
    "modelopt-blocks": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "quant_algo 'FP8_PB_WO'"),
    "modelopt-unsaid": ({"quant_method": "modelopt"}, "quant_algo is missing"),
    "quark-int4": (quark("per_group", "int4"), "dtype 'int4'"),
    "quark-fp4": (quark("per_group", "fp4"), "dtype 'fp4'"),
    "quark-blocks": (quark("per_block"), "qscheme 'per_block'"),
    "quark-two-levels": ({**QUARK, "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}]}}, "weight"),
    "quark-layers": (
        {**quark("per_tensor"), "layer_quant_config": {"*up_proj": {"weight": {"dtype": "fp4"}}}},
        "dtype 'fp4'",
    ),
    "torchao": ({"quant_method": "torchao", "quant_type": {}}, "'torchao' is not supported"),
    "hqq": ({"quant_method": "hqq"}, "'hqq' is not supported"),
    "private-file": ({"quant_method": "_parts"}, "'_parts' is not supported"),
    "method-number": ({"quant_method": 4}, "quant_method must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_layout_here_holds_is_refused_by_name(name: str) -> None:
    section, message = REFUSED[name]
    with pytest.raises(ModelError, match=message) as caught:
        read_section(section)
    if name != "modelopt-unsaid" and "number" not in name:
        assert "readable" in (caught.value.hint or "")


def in_blocks(method: str, sides: list[int]) -> dict[str, Any]:
    if method == "fp8":
        return {"quant_method": method, "weight_block_size": sides}
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": sides}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": method, "format": "float-quantized", "config_groups": groups}


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_blocks_have_sides_up_to_2_to_the_20(method: str) -> None:
    assert {packing.codes for packing in read_section(in_blocks(method, [1, 1 << 20])).values()} == {"e4m3"}
    for sides in ([128], [0, 128], [128, 0], [128, (1 << 20) + 1], [128, 128, 128]):
        with pytest.raises(ModelError, match="two sizes|weight_block_size"):
            read_section(in_blocks(method, sides))
