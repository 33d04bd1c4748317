"""Test a folder written by method nf4: equal values when read, the planned size, and bitsandbytes' format."""

import json
from pathlib import Path

import pytest
import torch

from mycli.quant import pipeline
from mycli.quant.planning import plan as planning
from mycli.quant.planning.target import OutputTarget
from mycli.quant.recipe import Recipe
from mycli.quant.rounding.grid import Grid, dequantize_codes
from mycli.quant.solvers import nf4
from mycli.runtime.checkpoint.formats import quantizable, read_dense
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.hub.resolve import Source
from tests.support.engines import whole
from tests.support.foreign_layouts import stored
from tests.support.models import CPU, random_model
from tests.support.quantizing import UNMEASURED


@pytest.fixture(scope="module", params=[32, 64], ids=["g32", "g64"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    base = tmp_path_factory.mktemp("nf4")
    source = random_model(base / "source")
    recipe = Recipe("nf4", group=request.param)
    work = planning.plan_quantization(Source("source", source), recipe, UNMEASURED)
    folder = pipeline.quantize(work, OutputTarget(base / "out"), CPU).folder
    opened = open_model_folder(folder)
    assert opened.packings == work.packings and {one.name for one in work.packings.values()} == {recipe.name}
    assert opened.checked_manifest().nbytes == work.size.bytes, "the size that --dry-run tells is exact"
    return source, folder, request.param


def test_the_folder_means_what_the_method_chose(made: tuple[Path, Path, int]) -> None:
    source, folder, group = made
    original, copy = open_model_folder(source), open_model_folder(folder)
    read, kept = copy.checkpoint(), original.checkpoint()
    for spec in quantizable(original.config):
        if spec.name not in copy.packings:
            assert torch.equal(read.read(f"{spec.name}.weight"), kept.read(f"{spec.name}.weight"))
            continue
        grid = Grid(copy.packings[spec.name], torch.bfloat16)
        expected = dequantize_codes(nf4.solve(kept.read(f"{spec.name}.weight"), grid).quantized, grid)
        found = read_dense(read, spec, copy.packings, torch.device("cpu"))
        assert found.dtype == torch.float32 and torch.equal(found, expected), spec.name


def test_tensors_and_their_description_are_those_of_the_maker(made: tuple[Path, Path, int]) -> None:
    _, folder, group = made
    case = stored("bitsandbytes")["nf4-g64-nested"]
    manifest = open_model_folder(folder).checked_manifest()
    name = "model.layers.0.mlp.down_proj"
    ours = {entry.removeprefix(f"{name}."): manifest.tensors[entry] for entry in manifest.tensors if name in entry}
    assert ours.keys() == case.tensors.keys()
    state = "weight.quant_state.bitsandbytes__nf4"
    theirs = json.loads(bytes(case.tensors[state].tolist()))
    found = json.loads(manifest.content(f"{name}.{state}"))
    assert found == theirs | {"blocksize": group, "shape": [128, 192], "nested_offset": found["nested_offset"]}
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "bitsandbytes" and section["llm_int8_skip_modules"] == ["lm_head"]
    assert section.items() >= case.section["quantization_config"].items()


def test_its_products_run_on_the_table_kernel(made: tuple[Path, Path, int]) -> None:
    source, folder, _ = made
    model = load_model(open_model_folder(folder), CPU).model
    tokens = torch.randint(3, 4096, (1, 12), generator=torch.Generator().manual_seed(0))
    opened, plain = open_model_folder(folder), load_model(open_model_folder(source), CPU).model
    for block in plain.blocks:
        for linear in block.products.values():
            parts = [
                read_dense(opened.checkpoint(), spec, opened.packings, torch.device("cpu")) for spec in linear.specs
            ]
            linear.replace(torch.cat(parts))
    found, expected = whole(model, tokens), whole(plain, tokens)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.slow
def test_bitsandbytes_decodes_the_same_weights_in_transformers(made: tuple[Path, Path, int]) -> None:
    maker = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes and accelerate are not installed")
    from transformers import AutoModelForCausalLM

    _, folder, _ = made
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), open_model_folder(folder)
    for spec in quantizable(ours.config):
        if spec.name in ours.packings:
            weight = theirs.get_submodule(spec.name).weight
            expected = maker.dequantize_4bit(weight.data, weight.quant_state)
            found = read_dense(ours.checkpoint(), spec, ours.packings, torch.device("cpu"))
            assert torch.equal(found.to(expected.dtype), expected), spec.name
