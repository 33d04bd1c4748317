"""Test exports to MLX: names, stacks of experts, and what MLX cannot hold."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from mycli.quant.export import mlx
from mycli.quant.export._weights import Weights
from mycli.quant.recipe import Recipe
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing
from tests.support import quantizing
from tests.support.exports import WIDE, dense_values, export_to, packed_family, same
from tests.support.families import CASES, make
from tests.support.packed_folder import write_packed
from tests.support.packed_mixture import FIELDS


@pytest.mark.parametrize("different", [(), ("down_proj",), ("experts.3.down_proj",)], ids=["same", "all", "one"])
def test_experts_of_a_layer_are_quantized_alike(different: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "mixture", FIELDS, {**dict.fromkeys(different, 8), "": 4})
    if different == ("experts.3.down_proj",):
        with pytest.raises(ModelError, match=r"experts\.0\.down_proj.* are quantized differently"):
            export_to(folder, "mlx", tmp_path / "mlx", requantize=True)
    else:
        assert export_to(folder, "mlx", tmp_path / "mlx", requantize=True).nbytes > 0


def test_mlx_names_widths_by_the_names_of_the_files(tmp_path: Path) -> None:
    """mlx-lm looks a module up by its own name, which is that of its tensors."""
    recipe = Recipe("rtn", bits=4, group=32, head="keep", target_bpw=5.0, widths=(8, 4, 4, 4) * 3)
    packed = packed_family(tmp_path, "exaone-llama3", recipe, **WIDE)
    done = export_to(packed, "mlx", tmp_path / "mlx", requantize=True)
    section = json.loads((done.path / "config.json").read_text())["quantization"]
    stored = load_file(done.path / "model.safetensors")
    wide = {name for name, settings in section.items() if isinstance(settings, dict)}
    assert wide == {
        f"transformer.h.{layer}.attn.attention.{part}_proj" for layer in range(3) for part in ("q", "k", "v")
    }
    assert all(section[name]["bits"] == 8 and f"{name}.scales" in stored for name in wide)
    assert same(dense_values(packed), dense_values(done.path))


@pytest.mark.parametrize(("case", "stack"), [("qwen2_moe-shared", "switch_mlp"), ("dots1-8top2", "experts")])
def test_mlx_stacks_experts_under_its_name_of_them(case: str, stack: str, tmp_path: Path) -> None:
    packed = packed_family(tmp_path, case, Recipe("rtn", bits=4, group=32, head="keep"), **WIDE)
    done = export_to(packed, "mlx", tmp_path / "mlx", requantize=True)
    scales = {name: tensor for name, tensor in load_file(done.path / "model.safetensors").items() if "scales" in name}
    stacks = {name.split(".")[4]: len(tensor) for name, tensor in scales.items() if tensor.dim() == 3}
    assert stacks == {stack: 8} and same(dense_values(packed), dense_values(done.path))


@pytest.mark.parametrize("case", ["apertus-llama3", "llama4-without-experts-tied"])
def test_mlx_has_tensors_of_one_value_and_llama4_without_experts(case: str, tmp_path: Path) -> None:
    packed = packed_family(tmp_path, case, Recipe("rtn", bits=4, group=32, head="keep"), **WIDE)
    done = export_to(packed, "mlx", tmp_path / "mlx", requantize=True)
    assert same(dense_values(packed), dense_values(done.path))


def test_mlx_has_no_baichuan(tmp_path: Path) -> None:
    model_type, changes = CASES["baichuan-mha"]
    make(tmp_path / "dense", model_type, {**changes, "hidden_size": 64, "intermediate_size": 64})
    packed = quantizing.make(Source("dense", tmp_path / "dense"), tmp_path / "int4").folder
    with pytest.raises(ModelError, match="baichuan: mlx-lm has no such model"):
        export_to(packed, "mlx", tmp_path / "mlx")


@pytest.mark.parametrize("change", [{"codes": "e2m1"}, {"permuted": True}, {"bits": 7}, {"group_size": 48}], ids=str)
def test_packings_that_mlx_does_not_hold_are_refused(change: dict[str, Any]) -> None:
    packing, spec = replace(Packing(4, 32), **change), LinearSpec("a", 96, 96)
    weights = cast(Weights, SimpleNamespace(packings={"a": packing}, linears={"a.weight": spec}))
    with pytest.raises(ModelError, match="which MLX does not hold"):
        mlx._group(weights, "a.weight")


def test_biases_that_mlx_would_round_are_refused() -> None:
    """Scales may fit bf16 when offsets, which become biases, do not."""
    offsets = torch.full((4, 1), 1.0 + 2**-10)
    weight = PackedWeight(
        pack(torch.ones(4, 32, dtype=torch.uint8), 4), torch.ones(4, 1), Packing(4, 32, offsets=True), 32, offsets
    )
    with pytest.raises(ModelError, match="bfloat16 does not hold"):
        mlx._converted(weight, "a.weight", 32, torch.bfloat16, rounding=False)
    _, error = mlx._converted(weight, "a.weight", 32, torch.bfloat16, rounding=True)
    assert error == pytest.approx((2**-10 / (6 - 2**-10)) ** 2)  # codes of 1 mean -6 + 2^-10
