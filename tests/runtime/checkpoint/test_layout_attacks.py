"""Test whole models with one linear in a foreign layout: they generate, or the error names file, tensor or field."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mycli.cli.remedies import remedy
from mycli.quant.source_weights import SourceWeights, source_scheme
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from mycli.runtime.layers.transformer import Transformer
from tests.attacks.layout_attacks import ATTACKS
from tests.support.engines import whole
from tests.support.foreign_layouts import LINEAR, Case, stored

CPU = Placement(torch.device("cpu"), torch.float32)
ONE_OF_EACH = {
    "gptq": "gptq-int4-g32-ordered",
    "awq": "gemm-g32",
    "fp8": "32x128-block16x32",
    "mlx": "nvfp4",
    "bitsandbytes": "nf4-g64-nested",
}


def model_folder(folder: Path, case: Case) -> Path:
    (folder / "config.json").write_text(json.dumps(case.config))
    dense = replace(case, section={})
    (folder / "dense").mkdir()
    (folder / "dense" / "config.json").write_text(json.dumps(dense.config))
    generator = torch.Generator().manual_seed(0)
    config = open_model_folder(folder / "dense").config
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in config.tensors()}
    del tensors[f"{LINEAR}.weight"]
    packed = {f"{LINEAR}.{part}": tensor.contiguous() for part, tensor in case.tensors.items()}
    save_file({**tensors, **packed}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", ONE_OF_EACH)
def test_a_model_answers_as_with_the_weight_itself(layout: str, tmp_path: Path) -> None:
    folder = open_model_folder(model_folder(tmp_path, stored(layout)[ONE_OF_EACH[layout]]))
    assert list(folder.packings) == [LINEAR]
    warnings: list[str] = []
    actual = load_model(folder, CPU, warn=warnings.append).model
    weight = SourceWeights(folder).read(f"{LINEAR}.weight")
    tensors = {name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if LINEAR not in name}
    save_file({**tensors, f"{LINEAR}.weight": weight}, tmp_path / "dense" / "model.safetensors")
    dense = load_model(open_model_folder(tmp_path / "dense"), CPU).model
    tokens = torch.arange(8).view(1, 8)
    assert isinstance(actual, Transformer) and isinstance(dense, Transformer)
    expected = whole(dense, tokens)
    assert (whole(actual, tokens) - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_by_name(attack: str, tmp_path: Path) -> None:
    (layout, name), change, message = ATTACKS[attack]
    case = stored(layout)[name]
    section, tensors = copy.deepcopy(case.section), dict(case.tensors)
    (inner,) = section.values()
    change(inner, tensors)
    folder = model_folder(tmp_path, replace(case, section=section, tensors=tensors))
    with pytest.raises(ModelError, match=message) as caught:
        load_model(open_model_folder(folder), CPU)
    assert remedy(caught.value) and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("layout", "name", "scheme"),
    [("fp8", "32x128-block16x32", "e4m3-g32"), ("mlx", "affine-bfloat16-int8-g64", "int8-g64-offset")],
)
def test_eight_bits_may_be_quantized_again(layout: str, name: str, scheme: str, tmp_path: Path) -> None:
    folder = open_model_folder(model_folder(tmp_path, stored(layout)[name]))
    assert source_scheme(folder, "it") == scheme
    source = SourceWeights(folder)
    assert source.dtype(f"{LINEAR}.weight") == source.read(f"{LINEAR}.weight").dtype == torch.bfloat16


def test_fewer_bits_are_not(tmp_path: Path) -> None:
    folder = open_model_folder(model_folder(tmp_path, stored("awq")["gemm-g32"]))
    with pytest.raises(ModelError, match=r"it is already quantized \(awq, int4-g32-offset\)"):
        source_scheme(folder, "it")
