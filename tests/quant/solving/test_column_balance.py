"""Test the factors of outlying columns, and that a model with planted outliers loses hardly more than without."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.recipe import Recipe
from mycli.quant.solving import blockwise
from mycli.quant.solving.blockwise import BlockSolver, OriginalBlocks, solve_copies_of_block
from mycli.quant.solving.column_balance import balance, column_scale
from mycli.quant.solving.linear_solver import LinearSolver
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.models.part_spec import NormSpec, OutputRows
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.planted_outliers import write

NORM = NormSpec("norm", 8, 1e-6)
SIZES = torch.ones(8)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("planted") / "model")


def test_factors_are_powers_of_two_between_both_sizes() -> None:
    assert column_scale(SIZES, SIZES, NORM) is None
    gains, columns = SIZES.clone(), SIZES.clone()
    gains[2], columns[2] = 100.0, 0.01  # the factor between them is 100
    gains[5], columns[6], columns[7] = 0.01, 7.0, 0.0
    scale = column_scale(gains, columns, NORM)
    assert scale is not None and scale.tolist() == [1, 1, 128, 1, 1, 0.125, 0.5, 1]
    assert column_scale(SIZES, torch.zeros(8), NORM) is None


@pytest.mark.parametrize(("gain", "factor"), [(64.0, 8.0), (63.0, None), (1 / 64, 0.125), (1 / 63, None)])
def test_columns_are_balanced_from_a_factor_of_8_on(gain: float, factor: float | None) -> None:
    gains = torch.where(torch.arange(8) == 2, gain, 1.0)
    scale = column_scale(gains, SIZES, NORM)
    assert (None if scale is None else scale.tolist()) == (None if factor is None else [1, 1, factor, *[1] * 5])


def test_unused_inputs_are_small_on_both_sides() -> None:
    small = torch.where(torch.arange(8) == 3, 1e-3, 1.0)
    assert column_scale(small, small, NORM) is None


def test_copies_of_a_row_have_one_factor() -> None:
    source = OutputRows("qkv", 0, 2, 2, 2)  # inputs 0 and 2 come from row 0, 4 and 6 from row 2
    columns = SIZES.clone()
    columns[6] = 256.0
    scale = column_scale(SIZES, columns, source)
    assert scale is not None and scale[4] == scale[6] < 1 and (scale[[0, 1, 2, 3, 5, 7]] == 1).all()


def test_planted_outliers_are_the_same_function_and_are_found(planted: Path) -> None:
    tokens = torch.arange(64).view(2, 32)
    pico, hard = (StreamedModel(open_model_folder(folder), CPU) for folder in (PICO, planted))
    assert torch.equal(pico.hidden(tokens), hard.hidden(tokens))
    assert balance(pico.block(0), pico.stored_dtype) == ({}, {})
    block = hard.block(0)
    changed, factors = balance(block, hard.stored_dtype)
    assert set(factors) == {"qkv", "o", "gate_up", "down"}
    gains = load_file(PICO / "model.safetensors")
    assert set(changed) == {f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")}
    for name, gain in changed.items():
        left = gain.float() / gains[name].float()
        assert set(left.unique().tolist()) <= {0.5, 1.0, 2.0}, "planted were 64 and 1/64"
    stream, context = hard.embed(tokens), hard.context(32)
    exact = stream.clone()
    hard.advance(block, stream, context)
    hard.advance(hard.block(0), exact, context)
    assert torch.equal(stream, exact)


def test_they_cost_hardly_anything(planted: Path) -> None:
    tokens = torch.randint(3, 4096, (16, 64), generator=torch.Generator().manual_seed(0))
    lost, baseline = list[list[float]](), list[list[float]]()
    for folder in (PICO, planted):
        model = StreamedModel(open_model_folder(folder), CPU, dense=True)
        packings = Recipe(bits=2, head="keep").packings(model.config)
        original, solver = OriginalBlocks(model, tokens), LinearSolver("gptq", torch.bfloat16)
        (solved,) = solve_copies_of_block([BlockSolver(original, packings, solver)], 0)
        lost.append([layer.output_error or 0.0 for layer in solved.layers])
        baseline.append([layer.rounding_output_error or 0.0 for layer in solved.layers])
    assert sum(lost[1]) < 1.3 * sum(lost[0])
    assert sum(baseline[1]) > 3 * sum(baseline[0]), "rounding without data knows nothing of the factors"


@pytest.mark.slow
def test_copies_look_for_outlying_columns_once_if_there_are_none(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(3, 4096, (8, 32), generator=torch.Generator().manual_seed(0))
    calls: list[int] = []
    monkeypatch.setattr(blockwise, "balance", lambda *block: (calls.append(1), balance(*block))[1])
    for folder, searches in ((PICO, 1), (planted, 2)):
        model = StreamedModel(open_model_folder(folder), CPU, dense=True)
        solver = LinearSolver("rtn", torch.bfloat16)
        widths = [Recipe("awq", bits=bits, head="keep").packings(model.config) for bits in (4, 2)]
        original = OriginalBlocks(model, tokens)
        calls.clear()
        together = solve_copies_of_block([BlockSolver(original, packings, solver) for packings in widths], 0)
        assert len(calls) == searches
        for packings, copy in zip(widths, together, strict=True):
            (alone,) = solve_copies_of_block([BlockSolver(OriginalBlocks(model, tokens), packings, solver)], 0)
            assert copy.layers == alone.layers and copy.changed.keys() == alone.changed.keys()
            for name, linear in alone.linears.items():
                assert torch.equal(linear.codes, copy.linears[name].codes)
                assert torch.equal(linear.scales, copy.linears[name].scales)
