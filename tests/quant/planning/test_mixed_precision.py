"""Test mixed widths: each layer's share of the divergence, and the choice of widths for a budget."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import product as combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mycli.cli.main import main
from mycli.quant.evaluate import TokenWindows, evaluate
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.pipeline import choose_widths, copy_shares
from mycli.quant.planning import mixed_precision as allocate
from mycli.quant.planning.mixed_precision import Share
from mycli.quant.planning.plan import plan_low_copy, plan_quantization
from mycli.quant.progress import silent
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.quantization.scheme import BITS
from tests.support.models import CPU, random_model
from tests.support.paths import DRAFT
from tests.support.quantizing import UNMEASURED, make

pytestmark = pytest.mark.usefixtures("short_calibration_text")
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}


def share(loss: float, weights: int = 1000) -> Share:
    sizes: Mapping[int, int] = {bits: weights * bits // 8 for bits in BITS}
    return Share(weights, sizes, {bits: loss * 4.0 ** (3 - bits) for bits in BITS})


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """The path of `pico-draft` with large gains in its first layer, and small columns behind them."""
    shutil.copytree(DRAFT, tmp_path / "planted")
    weights = tmp_path / "planted" / "model.safetensors"
    weights.chmod(0o644)
    tensors, layer = load_file(weights), "model.layers.0."
    tensors[f"{layer}post_attention_layernorm.weight"][::8] *= 64
    for name in ("gate", "up"):
        tensors[f"{layer}mlp.{name}_proj.weight"][:, ::8] /= 64
    save_file(tensors, weights, metadata={"format": "pt"})
    return tmp_path / "planted"


@pytest.mark.slow
def test_the_loss_of_outlying_columns_counts_unless_they_are_balanced(tmp_path: Path, planted: Path) -> None:
    def losses(folder: Path, balances: bool) -> list[float]:
        recipe = Recipe("gptq", 4, 32, samples=8, seq=32)
        copy = plan_quantization(Source("draft", folder), recipe, UNMEASURED)
        shares = copy_shares(replace(copy, balances=balances), tmp_path / "low", CPU, 4, silent)
        return [share.loss[3] for share in shares]

    plain = losses(DRAFT, True)
    assert sum(losses(planted, False)) > 3 * sum(plain)
    assert losses(planted, True) == pytest.approx(plain, rel=0.1)


@pytest.mark.slow
def test_widths_are_chosen_for_the_balanced_model(tmp_path: Path, planted: Path) -> None:
    recipe = Recipe("gptq", group=32, target_bpw=3.9, samples=8, seq=32)
    plain, chosen = (
        choose_widths(plan_quantization(Source("draft", folder), recipe, UNMEASURED), CPU, tmp_path / "out")
        for folder in (DRAFT, planted)
    )
    assert chosen.widths == plain.widths


def test_the_shares_add_up_to_the_divergence(tmp_path: Path) -> None:
    """Half of gradient times change is the divergence itself, as far as that is quadratic."""
    make(Source("draft", DRAFT, None, None), tmp_path / "low", Recipe("rtn", 4, 64))
    model, low = StreamedModel(open_model_folder(DRAFT), CPU), StreamedModel(open_model_folder(tmp_path / "low"), CPU)
    windows = torch.randint(0, 4096, (8, 64), generator=torch.Generator().manual_seed(0))
    shares = allocate.measure_shares(model, low, windows)
    assert len(shares) == 4 * model.config.layers
    measured = evaluate(low, TokenWindows(windows, False, ""), model).divergence
    assert measured is not None
    assert sum(each.loss[4] for each in shares) == pytest.approx(measured.kl.value, rel=0.25)
    assert all(each.loss[8] < each.loss[4] / 50 < each.loss[2] / 100 for each in shares)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a random mixture; no token reaches the last of its four experts."""
    folder = random_model(tmp_path_factory.mktemp("models") / "mixture", deviation=0.05, head_dim=32, **MIXTURE)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith("block_sparse_moe.gate.weight"):
            tensor[3] = tensor[2]  # of equal scores the first is chosen
            tensor[:3] *= 8
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def test_the_shares_of_experts_add_up_to_the_divergence(tmp_path: Path, mixture: Path) -> None:
    make(Source("mixture", mixture, None, None), tmp_path / "low", Recipe("rtn", 4, 64))
    model, low = (StreamedModel(open_model_folder(folder), CPU) for folder in (mixture, tmp_path / "low"))
    windows = torch.randint(0, 4096, (8, 64), generator=torch.Generator().manual_seed(0))
    shares = allocate.measure_shares(model, low, windows)
    measured = evaluate(low, TokenWindows(windows, False, ""), model).divergence
    assert measured is not None
    assert sum(each.loss[4] for each in shares) == pytest.approx(measured.kl.value, rel=0.25)


def test_experts_of_a_layer_get_one_width_or_one_for_each_tensor(mixture: Path) -> None:
    config = open_model_folder(mixture).config
    names = [product for layer in config.layer_specs for product in layer.products()]
    for by_tensor, kinds in ((False, ["qkv", "o", "experts"]), (True, ["qkv", "o", "gate_up", "down"])):
        units = allocate.width_units(config, by_tensor=by_tensor)
        assert len(units) == config.layers * len(kinds)
        assert sorted(place for unit in units for place in unit) == list(range(len(names)))
        for unit, kind in zip(units, config.layers * kinds, strict=True):
            assert len(unit) == (1 if kind in ("qkv", "o") else 8 if kind == "experts" else 4)
            assert all(kind in names[place] for place in unit)
            assert len({place // (len(names) // config.layers) for place in unit}) == 1
    joined = allocate.add_shares([share(1.0), share(0.5, 3000)])
    assert joined == Share(4000, {bits: 4000 * bits // 8 for bits in BITS}, share(1.5).loss)


def test_widths_of_a_mixture_fit_its_target(tmp_path: Path, mixture: Path) -> None:
    recipe = Recipe("gptq", group=32, target_bpw=4.2, samples=8, seq=48)
    work = plan_quantization(Source("mixture", mixture), recipe, UNMEASURED)
    chosen = choose_widths(work, CPU, tmp_path / "out")
    assert chosen.widths is not None and len(set(chosen.widths)) > 1
    for layer in range(work.config.layers):
        attention, experts = chosen.widths[10 * layer : 10 * layer + 2], chosen.widths[10 * layer + 2 : 10 * layer + 10]
        assert len(set(experts)) == 1 and min(attention) >= experts[0]
    made = make(Source("mixture", mixture), tmp_path / "out", chosen)
    assert made.size.quantized_bits_per_weight <= 4.2
    packings = open_model_folder(tmp_path / "out").packings
    assert [packing.bits for name, packing in packings.items() if name.endswith("w2")] == [
        width for place, width in enumerate(chosen.widths) if place % 10 > 2 and place % 2
    ]


def test_no_other_choice_of_equal_size_loses_less() -> None:
    shares = [share(loss) for loss in (1.0, 0.2, 0.05, 0.01)]
    found = allocate.allocate(shares, 3.5, 3)
    assert sum(found) <= 14 and found == tuple(sorted(found, reverse=True))

    def loss(widths: tuple[int, ...]) -> float:
        return sum(each.loss[bits] for each, bits in zip(shares, widths, strict=True))

    others = [each for each in combinations((3, 4, 8), repeat=4) if sum(each) <= 14]
    assert loss(found) == min(map(loss, others))
    assert allocate.allocate(shares, 3.0, 3) == (3, 3, 3, 3)
    assert allocate.allocate(shares, 8.0, 3) == (8, 8, 8, 8)


def test_bits_go_where_the_loss_falls_not_where_it_is_high() -> None:
    sizes, steep = share(1.0).bytes, share(1.0)
    nearly_flat = Share(1000, sizes, {bits: 10.0 - bits / 100 for bits in BITS})
    assert allocate.allocate([nearly_flat, steep], 3.5, 3) == (3, 4)
    worse_with_more = Share(1000, sizes, {bits: 1.0 + bits / 100 for bits in BITS})
    assert allocate.allocate([worse_with_more, steep], 8.0, 3) == (3, 8)


def test_what_is_too_little_is_refused() -> None:
    assert allocate.low_width(3.5, 128) == 3 and allocate.low_width(3.1, 128) == 2 and allocate.low_width(9, None) == 4
    assert [allocate.low_width(bits, 128) for bits in (3.125, 3.124, 2.0, 1.0)] == [3, 2, 2, 2]
    with pytest.raises(UsageError, match=r"2\.01 bits per weight is too low: 3 bits with scales take 3\.000"):
        allocate.allocate([share(1.0)], 2.01, 3)


@pytest.mark.parametrize(
    ("group", "target", "bits"),
    [(128, 4.125, 3), (128, 4.13, 4), (64, 4.25, 3), (32, 4.5, 3), (128, 3.125, 2), (None, 4.0, 3), (64, 1.0, 2)],
)
def test_the_copy_has_the_widest_width_that_fits_with_all_its_tensors(
    group: int | None, target: float, bits: int
) -> None:
    source = Source("draft", DRAFT)
    work = plan_quantization(source, Recipe("rtn", group=group, target_bpw=target), UNMEASURED)
    assert plan_low_copy(work).recipe.bits == bits


def test_scales_in_fp32_count_as_they_are_written(tmp_path: Path) -> None:
    source = Source("tiny", random_model(tmp_path / "source", dtype="float32"))
    recipe = Recipe("rtn", group=32, target_bpw=4.25, samples=2, seq=32)
    chosen = choose_widths(plan_quantization(source, recipe, UNMEASURED), CPU, tmp_path / "out")
    size = make(source, tmp_path / "out", chosen).size
    assert 4 < size.quantized_bits_per_weight <= 4.25


def test_the_command_keeps_to_the_target_and_fuses_what_readers_fuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYCLI_DEVICE", "cpu")
    monkeypatch.setattr("mycli.quant.planning.pace._SECONDS", 0.01)
    arguments = ["quantize", "pico-draft", "--target-bpw", "3.6", "--group", "64", "--samples", "8", "--seq", "64"]
    told = []
    (tmp_path / ".out.widths.partial-1-0123456789ab" / "low").mkdir(parents=True)  # of a run that was killed
    for last in (["--dry-run"], ["--report", "none"]):
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, *last, "--json", "-o", str(tmp_path / "out")])
        assert stopped.value.code in (0, None)
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["size"] == told[1]["size"] and 3.3 < told[1]["size"]["quantized_bits_per_weight"] <= 3.6
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["out"]
    widths = {layer["name"]: layer["packing"] for layer in told[1]["layers"]}
    assert len(set(widths.values())) > 1
    for name, width in widths.items():
        assert widths[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("gate", "up")] == width
    recipe = json.loads((tmp_path / "out" / "mycli.json").read_text())["recipe"]
    assert recipe["target_bpw"] == 3.6 and len(recipe["widths"]) == 8
