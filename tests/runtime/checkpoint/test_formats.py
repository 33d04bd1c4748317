"""Test `quantization_config`: written as engines expect it, read back unchanged, refused by name otherwise (B14)."""

import copy
import json
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from mycli.runtime.checkpoint.formats import read_quantization
from mycli.runtime.checkpoint.formats.compressed_tensors import write_quantization
from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.registry import parse_config
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields

RAW = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "dtype": "bfloat16",
}
CONFIG = parse_config(Fields(RAW, "config.json"))
NAMES = [linear.name for linear in CONFIG.linears()]


def read(section: Any) -> dict[str, Packing]:
    return read_quantization(Fields({"quantization_config": section}, "config.json"), CONFIG)


ONE = {name: Packing(4, 128) for name in NAMES if name != "lm_head"}
MIXED = {name: Packing(8 if name == "lm_head" else 2 + (".1." in name), 64) for name in NAMES}


@pytest.mark.parametrize("packings", [ONE, MIXED], ids=["one", "mixed-with-head"])
def test_what_is_written_is_read_back(packings: dict[str, Packing]) -> None:
    section = write_quantization(packings, [name for name in NAMES if name not in packings], "bfloat16")
    assert read(section) == packings
    QuantizationConfig.model_validate(copy.deepcopy(section))  # the strict schema of the reference


def test_mixed_targets_are_disjoint_exact_names() -> None:
    groups = write_quantization(MIXED, [], "bfloat16")["config_groups"]
    targets = [target for name in sorted(groups) for target in groups[name]["targets"]]
    assert sorted(targets) == sorted(MIXED)
    assert list(groups) == sorted(groups)


def test_an_exact_name_wins_over_a_regex_over_the_class() -> None:
    section = write_quantization(ONE, ["lm_head"], "bfloat16")
    group = section["config_groups"]["group_0"]

    def with_bits(bits: int, targets: list[str]) -> dict[str, Any]:
        return {**group, "targets": targets, "weights": {**group["weights"], "num_bits": bits}}

    section["config_groups"] = {
        "a": with_bits(8, ["Linear"]),
        "b": with_bits(4, [r"re:.*\.mlp\.up_proj$"]),
        "c": with_bits(2, ["model.layers.3.mlp.up_proj"]),
    }
    actual = read(section)
    assert actual["model.layers.3.mlp.up_proj"].bits == 2
    assert actual["model.layers.4.mlp.up_proj"].bits == 4
    assert actual["model.layers.4.mlp.down_proj"].bits == 8
    assert "lm_head" not in actual


ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}}
MEASURED = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured", "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config_groups/group_1", ATTENTION),
        ("sparsity_config", MEASURED),
        ("config_groups/group_0/targets", [r"re:^model\.layers\.(?:[0-9]|1[0-9])\.(?!vision).*"]),
    ],
    ids=["attention", "measured-sparsity", "groups-of-a-regex"],
)
def test_what_is_not_about_the_weights_changes_nothing(path: str, value: Any) -> None:
    assert read(changed(path, value)) == ONE


@pytest.mark.parametrize("pattern", ["backbone.layers.1.mixer.up_proj", r"re:^backbone\.layers\.1\.mixer\.up"])
def test_names_are_those_of_the_files(pattern: str) -> None:
    """Names of Nemotron-H begin with `backbone` in its files and with `model` here."""
    sizes = {"hidden_size": 64, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    raw = {**sizes, "model_type": "nemotron_h", "intermediate_size": 96, "hybrid_override_pattern": "*-"}
    section = write_quantization({"": Packing(4, 32)}, [pattern, "lm_head"], "bfloat16")
    config = parse_config(Fields(raw, "config.json"))
    packings = read_quantization(Fields({"quantization_config": section}, "config.json"), config)
    unquantized = {linear.name for linear in config.linears()} - packings.keys()
    assert unquantized == {"model.layers.1.mixer.up_proj", "lm_head"}


@pytest.mark.parametrize("packed", [False, True])
def test_a_dense_head_needs_no_entry_in_ignore(packed: bool) -> None:
    """AutoRound's FP8 folders for llm-compressor target all linear layers; vLLM does not count the head as one."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    section = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": []}
    section["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    headers = {
        f"{linear.name}.weight": TensorEntry(
            f"{linear.name}.weight",
            "F8_E4M3" if packed or linear.name != "lm_head" else "BF16",
            (linear.out_features, linear.in_features),
            "model.safetensors",
            0,
            0,
        )
        for linear in CONFIG.linears()
    }
    actual = read_quantization(Fields({"quantization_config": section}, "config.json"), CONFIG, headers)
    assert actual.keys() == {name for name in NAMES if packed or name != "lm_head"}


def test_sides_of_a_block_may_be_text() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"}
    section = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    section["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    assert {packing.dialect for packing in read(section).values()} == {("float-quantized", "block", 128, 64)}


def test_the_block_of_bitsandbytes_follows_from_the_number_of_scales() -> None:
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    fields = Fields({"quantization_config": section}, "config.json")

    def blocks(config: ModelConfig, block: int, *dimensions: int) -> set[object]:
        headers = {}
        for linear in config.linears():
            name, count = f"{linear.name}.weight.absmax", -(-linear.out_features * linear.in_features // block)
            headers[name] = TensorEntry(name, "F32", (*dimensions, count), "a.safetensors", 0, 4 * count)
        return {packing.dialect[1] for packing in read_quantization(fields, config, headers).values()}

    for block in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        assert blocks(CONFIG, block) == {block}
    small = parse_config(Fields({**RAW, "hidden_size": 16, "intermediate_size": 16}, "config.json"))
    assert blocks(small, 128, 1) == {64}, "not the shape of scales"
    assert {packing.dialect[1] for packing in read_quantization(fields, small).values()} == {64}


def test_no_section_is_no_quantization() -> None:
    assert read_quantization(Fields({}, "config.json"), CONFIG) == {}


PRESETS = {name for name in PRESET_SCHEMES if not name.startswith(("MXFP6", "UNQUANTIZED"))}
PRESET_FORMATS = {"W8A8": "int-quantized", "INT8": "int-quantized", "FP8": "float-quantized"}
PRESET_FORMATS |= {"FP8_DYNAMIC": "float-quantized", "FP8_BLOCK": "float-quantized"}
PRESET_FORMATS |= {name: "nvfp4-pack-quantized" for name in PRESETS if name.startswith("NVFP4")}
PRESET_FORMATS |= {name: "mxfp4-pack-quantized" for name in PRESETS if name.startswith("MXFP4")}
PRESET_FORMATS |= {name: "mxfp8-quantized" for name in PRESETS if name.startswith("MXFP8")}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_what_compressed_tensors_makes_of_it(name: str) -> None:
    section = {"quant_method": "compressed-tensors", "format": PRESET_FORMATS.get(name, "pack-quantized")}
    section["ignore"] = ["lm_head"]
    config = QuantizationConfig.model_validate({**section, "config_groups": {name: ["Linear"]}})
    written = json.loads(config.model_dump_json())["config_groups"]
    packings = read({**section, "config_groups": {name.lower(): ["Linear"]}})
    assert packings == read({**section, "config_groups": written}) and len(packings) == len(ONE)
    for group in written.values():
        group["weights"]["strategy"] = group["weights"]["strategy"].upper()
        group["weights"]["type"] = group["weights"]["type"].upper()
    assert read({**section, "config_groups": written}) == packings


@pytest.mark.parametrize(
    "weights",
    [
        {"strategy": "channel"},
        {"num_bits": 4, "group_size": 64},
        {"num_bits": 4, "group_size": -1},
        {"num_bits": 3, "group_size": 32, "symmetric": False},
        {},
    ],
    ids=str,
)
def test_fields_left_out_have_the_defaults_of_compressed_tensors(weights: dict[str, Any]) -> None:
    layout = "pack-quantized" if weights else "int-quantized"  # packed codes have no tensor-wise scale
    section: dict[str, Any] = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]}
    section["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    written = json.loads(QuantizationConfig.model_validate(copy.deepcopy(section)).model_dump_json())
    assert read(section) == read(written)


def test_a_group_of_minus_1_is_a_channel() -> None:
    """compressed-tensors writes "channel" for it; files of other programs say "group"."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": -1}
    section: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    section["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    assert {(packing.bits, packing.group_size) for packing in read(section).values()} == {(4, None)}


def changed(path: str, value: Any) -> dict[str, Any]:
    section: dict[str, Any] = write_quantization(ONE, ["lm_head"], "bfloat16")
    inner: Any = section
    *parents, last = path.split("/")
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return section


WEIGHTS = "config_groups/group_0/weights"
REFUSED = {
    "method": ("quant_method", "aqlm", "quant_method"),
    "format": ("format", "marlin-24", "format"),
    "sparse": ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
    "rotated": ("transform_config", {"config_groups": {"u": {}}}, "transform_config"),
    "bits-1": (f"{WEIGHTS}/num_bits", 1, "num_bits"),
    "bits-9": (f"{WEIGHTS}/num_bits", 9, "num_bits"),
    "bits-string": (f"{WEIGHTS}/num_bits", "4", "num_bits"),
    "float": (f"{WEIGHTS}/type", "float", "type"),
    "asymmetric-string": (f"{WEIGHTS}/symmetric", "no", "symmetric"),
    "strategy": (f"{WEIGHTS}/strategy", "block", "strategy"),
    "actorder": (f"{WEIGHTS}/actorder", "random", "actorder"),
    "actorder-list": (f"{WEIGHTS}/actorder", ["group"], "actorder"),
    "group-zero": (f"{WEIGHTS}/group_size", 0, "group_size"),
    "group-huge": (f"{WEIGHTS}/group_size", 1 << 40, "group_size"),
    "group-format": ("config_groups/group_0/format", "float-quantized", "type"),
    "weights-list": (WEIGHTS, [4], "weights"),
    "targets-number": ("config_groups/group_0/targets", [7], "targets"),
    "no-groups": ("config_groups", {}, "config_groups"),
    "catastrophic-regex": ("config_groups/group_0/targets", [r"re:(a+)+$"], "too complex"),
    "many-wildcards": ("config_groups/group_0/targets", ["re:" + ".*" * 20 + "x"], "too complex"),
    "regex-not-a-regex": ("config_groups/group_0/targets", ["re:(["], "not a regular expression"),
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"B14-{case}")
def test_refused_by_name(case: str) -> None:
    path, value, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        read(changed(path, value))
