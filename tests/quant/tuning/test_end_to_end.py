"""Test training of scales: it lowers the KL of held-out text, is rejected where it does not, and is reproducible."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.quant.calibration.hessian import HELD_OUT_EVERY
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.output.model_card import Tuning
from mycli.quant.output.work_folder import Solved
from mycli.quant.pipeline import code_notes, quantize
from mycli.quant.planning.memory import BATCH
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.target import OutputTarget
from mycli.quant.recipe import Recipe
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes
from mycli.quant.solvers import rtn
from mycli.quant.tuning import end_to_end as tuning
from mycli.quant.tuning.end_to_end import Tuned, _Student, recomputed, tune_model
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.quantization.scheme import Packing
from tests.support.families import CASES
from tests.support.families import make as make_family
from tests.support.models import CPU, shorten_report
from tests.support.paths import DRAFT
from tests.support.quantizing import UNMEASURED, make
from tests.support.rounding import rounded

pytestmark = pytest.mark.usefixtures("short_calibration_text")

SOURCE = Source("pico-draft", DRAFT, None, None)
WINDOWS = torch.randint(0, 4096, (2 * HELD_OUT_EVERY, 24), generator=torch.Generator().manual_seed(0))


def tune(windows: Tensor = WINDOWS, *, codes: bool = False) -> tuple[list[Solved], Tuned]:
    model = StreamedModel(open_model_folder(DRAFT), CPU)
    packings: dict[str, Packing] = {}
    blocks = []
    for layer in range(model.config.layers):
        packing, solved = rounded(model, layer)
        packings |= packing
        blocks.append(solved)
    return blocks, tune_model(model, blocks, packings, torch.bfloat16, windows, seed=0, codes=codes)


def test_what_is_computed_again_has_the_gradients_it_would_have_had() -> None:
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    start = torch.ones(2, 3, requires_grad=True)
    calls = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return (x @ weight).tanh()

    def gradients(again: bool) -> list[torch.Tensor]:
        x = start
        for _ in range(2):
            x = recomputed(lambda x: (layer(x),), x)[0] if again else layer(x)
        x.square().sum().backward()
        found = [leaf.grad for leaf in (weight, start) if leaf.grad is not None]
        weight.grad = start.grad = None
        return found

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other)
    assert calls[:4] == [False, False, True, True], "nothing is kept of the first pass"


@pytest.mark.parametrize(
    "case",
    [
        "mixtral-4top2",
        "smallthinker-rotating-untied",
        "gemma4-experts-ple-shared-kv-double-untied",
        "gemma3n-sparse-shared-kv",
        "maincoder-hd24",
        "falcon_h1-multipliers",
        "stablelm-parallel-head-norms",
    ],
)
@pytest.mark.usefixtures("quick_configs")
def test_all_families_predict_and_learn_as_in_one_graph(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are not read in order.

    There are experts, embeddings by layer, keys and values that layers share, and norms whose tensors are not the gain.
    """
    make_family(tmp_path / "model", *CASES[case])
    model = StreamedModel(open_model_folder(tmp_path / "model"), CPU, 2 * 24, dense=True)
    grid = Grid(Packing(8, None), torch.float32)
    windows, rows = WINDOWS % model.config.vocab_size, torch.tensor([4, 1, 5])
    stream, side_inputs, context = model.embed(windows), model.side_inputs(windows), model.context(24)
    blocks: list[Solved] = []
    for index in range(model.config.layers):
        block, codes = model.block(index), dict[str, Quantized]()
        for linear in block.products.values():
            parts = linear.weight().split([spec.out_features for spec in linear.specs])
            solved = [rtn.solve(part, grid).quantized for part in parts]
            linear.replace(torch.cat([dequantize_codes(each, grid) for each in solved]))
            codes |= {spec.name: each for spec, each in zip(linear.specs, solved, strict=True)}
        model.advance(block, stream, context, side_inputs)
        blocks.append(Solved(codes, {}, ()))
    packings = {name: grid.packing for solved in blocks for name in solved.linears}
    student = _Student(model, blocks, packings, torch.float32, windows, codes=False)
    with torch.no_grad():
        expected = model.logits(stream[rows]).log_softmax(-1)
        torch.testing.assert_close(student.log_probabilities(rows), expected, rtol=1e-3, atol=1e-3)

    def gradients() -> list[Tensor | None]:
        for leaf in student.leaves():
            leaf.grad = None
        student.log_probabilities(rows)[..., 7].sum().backward()  # type: ignore[no-untyped-call]  # torch's stub
        return [leaf.grad for leaf in student.leaves()]

    found = gradients()
    monkeypatch.setattr(tuning, "recomputed", lambda run, *inputs: run(*inputs))
    for one, other in zip(found, gradients(), strict=True):
        assert (one is None) == (other is None)  # as of an expert without tokens
        if one is not None and other is not None:
            assert (one - other).norm() <= 1e-2 * other.norm() + 1e-6  # the first of two passes has native kernels
    assert sum(one is not None for one in found) > len(found) / 2


def test_kl_falls_on_windows_held_apart_and_codes_stay() -> None:
    blocks, tuned = tune()
    assert 0 < tuned.kl.after < 0.98 * tuned.kl.before
    assert len(tuned.blocks) == len(blocks) + 1, "one more, with the last norm"
    assert list(tuned.blocks[-1].changed) == ["model.norm.weight"]
    for before, after in zip(blocks, tuned.blocks, strict=False):
        for name, quantized in before.linears.items():
            assert torch.equal(quantized.codes, after.linears[name].codes)
    again = tune()[1]
    assert again.kl == tuned.kl
    for one, other in zip(tuned.blocks, again.blocks, strict=True):
        assert all(torch.equal(one.linears[name].scales, other.linears[name].scales) for name in one.linears)
        assert all(torch.equal(one.changed[name], other.changed[name]) for name in one.changed)


@pytest.mark.slow
def test_codes_are_trained_too_if_wanted_and_move_little() -> None:
    many = torch.randint(0, 4096, (16 * HELD_OUT_EVERY, 8), generator=torch.Generator().manual_seed(0))
    blocks, tuned = tune(many, codes=True)
    assert 0 < tuned.kl.after < 0.98 * tuned.kl.before
    moves = torch.cat(
        [
            (after.linears[name].codes.int() - before.linears[name].codes.int()).flatten()
            for before, after in zip(blocks, tuned.blocks, strict=False)
            for name in before.linears
        ]
    )
    assert 0 < moves.ne(0).float().mean() < 0.2
    assert moves.abs().max() == 1


def test_few_windows_change_no_codes_which_a_note_says() -> None:
    few = WINDOWS[:HELD_OUT_EVERY]
    assert list(code_notes(len(few))) and not list(code_notes(2 * len(few)))
    blocks, tuned = tune(few, codes=True)
    for before, after in zip(blocks, tuned.blocks, strict=False):
        assert all(torch.equal(linear.codes, after.linears[name].codes) for name, linear in before.linears.items())


@pytest.mark.parametrize(("limit", "expected"), [(1 << 24, BATCH), (3 * 24 * 4096, 3), (1, 1)])
def test_logits_bound_the_windows_at_once(limit: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def train(rates: object, loss: object, windows: int, at_once: int, *_: object) -> Tuning:
        counts.append(at_once)
        return Tuning(1.0, 1.0)

    monkeypatch.setattr(tuning, "LOGITS_AT_ONCE", limit)
    monkeypatch.setattr(tuning, "train", train)
    tune()
    assert counts == [expected]


def test_what_makes_it_worse_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "RATE", 3.0)
    blocks, tuned = tune()
    assert tuned.blocks == blocks and tuned.kl.after == tuned.kl.before


@pytest.mark.slow
def test_a_tuned_copy_measures_what_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_report(monkeypatch, 2048)
    recipe = Recipe(bits=3, group=64, samples=4 * HELD_OUT_EVERY, seq=64)
    plain = make(SOURCE, tmp_path / "plain", recipe, "quick")
    tuned = make(SOURCE, tmp_path / "tuned", Recipe(**{**vars(recipe), "tune": True}), "quick")
    told = json.loads((tmp_path / "tuned" / "mycli.json").read_text())["tuning"]
    assert told["after"] <= told["before"] and any("tuning" in note for note in tuned.notes)
    assert json.loads((tmp_path / "plain" / "mycli.json").read_text())["tuning"] is None
    assert plain.report.evaluation is not None and tuned.report.evaluation is not None
    assert plain.report.evaluation.divergence is not None and tuned.report.evaluation.divergence is not None
    assert tuned.report.evaluation.divergence.kl.value < plain.report.evaluation.divergence.kl.value
    assert plain.size == tuned.size


def test_too_little_to_judge_by_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tuning needs calibration"):
        plan_quantization(SOURCE, Recipe("rtn", tune=True))
    few = plan_quantization(SOURCE, Recipe(group=64, samples=HELD_OUT_EVERY - 1, seq=64, tune=True), UNMEASURED)
    with pytest.raises(UsageError, match="windows"):
        quantize(few, OutputTarget(tmp_path / "few"), CPU)
