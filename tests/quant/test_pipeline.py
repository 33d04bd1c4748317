"""Test quantizing a whole model: solved values are written, other readers agree, the record tells what was done."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.quant import pipeline
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.output import model_card as record
from mycli.quant.pipeline import quantize, result_notes
from mycli.quant.planning import plan as planning
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.planning.target import OutputTarget
from mycli.quant.progress import Callbacks
from mycli.quant.quality_report import QualityReport
from mycli.quant.recipe import Recipe
from mycli.quant.rounding.grid import Grid, dequantize_codes
from mycli.quant.solvers import rtn
from mycli.quant.solving.linear_solver import TOO_FEW_TOKENS
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.checkpoint.validation import check_tensors
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.integrity import files_to_verify, verify_files
from mycli.runtime.hub.resolve import Source
from mycli.runtime.quantization.packed_weight import PackedWeight
from mycli.runtime.quantization.packed_weight import dequantize as dequantize_packed
from mycli.runtime.quantization.scheme import BITS
from tests.support.models import CPU, random_model, shorten_report, write_config
from tests.support.paths import DRAFT, PICO
from tests.support.quantizing import DATA, GROUP_32, UNMEASURED, make, rewrite

pytestmark = pytest.mark.usefixtures("short_calibration_text")


@pytest.fixture(autouse=True)
def short_report(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_report(monkeypatch, 2048)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    folder = random_model(tmp_path / "source")
    shutil.copy(PICO / "generation_config.json", folder / "generation_config.json")
    (folder / "LICENSE").write_text("as is")
    (folder / "README.md").write_text("about the original")
    return Source("someone/small", folder, "someone/small", "0" * 40)


@pytest.mark.slow
def test_hessians_of_the_model_lose_less_than_those_of_its_layers(tmp_path: Path) -> None:
    """The transform scales rows, whose gradients then have another size."""
    source, lost = Source("draft", DRAFT, None, None), {}
    for hessian in ("layer", "model"):
        recipe = Recipe("awq+gptq", 3, 64, samples=16, seq=128, hessian=hessian)
        lost[hessian] = make(source, tmp_path / hessian, recipe, "quick").report.kl or 0.0
    assert 0 < lost["model"] < 0.95 * lost["layer"]
    assert json.loads((tmp_path / "model" / "mycli.json").read_text())["recipe"]["hessian"] == "model"


def test_hessians_of_the_model_need_a_method_that_uses_them() -> None:
    with pytest.raises(UsageError, match="method awq has no Hessian of the whole model") as refused:
        Recipe("awq", hessian="model")
    assert refused.value.code == "hessian-method"


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("rtn", bits=4, group=32),
        Recipe("rtn", bits=3, group=64),
        Recipe("rtn", bits=8, group=None, scales="absmax"),
        Recipe("rtn", bits=2, group=32, head="int8"),
    ],
    ids=lambda recipe: recipe.name,
)
def test_the_folder_holds_what_the_scheme_solved(source: Source, tmp_path: Path, recipe: Recipe) -> None:
    target = tmp_path / "out"
    make(source, target, recipe)
    work = plan_quantization(source, recipe, UNMEASURED)
    opened = open_model_folder(target)
    config, packings = opened.config, opened.packings
    assert packings == work.packings
    manifest = Manifest.open(target)
    check_tensors(manifest, config, packings)
    assert manifest.nbytes == work.size.bytes, "the size that --dry-run tells is exact"
    original, copy = Checkpoint(Manifest.open(source.folder)), Checkpoint(manifest)
    for name, _ in work.config.tensors():
        linear = name.removesuffix(".weight")
        if linear not in packings:
            assert torch.equal(copy.read(name), original.read(name))
            continue
        grid = Grid(packings[linear], torch.bfloat16, recipe.scales)
        weight = original.read(name)
        solved = rtn.solve(weight, grid).quantized
        packed, scales = copy.read(f"{linear}.weight_packed"), copy.read(f"{linear}.weight_scale")
        restored = dequantize_packed(PackedWeight(packed, scales, grid.packing, weight.shape[1]))
        assert torch.equal(restored, dequantize_codes(solved, grid).bfloat16())
        assert copy.read(f"{linear}.weight_shape").tolist() == list(weight.shape)


def restored_state(folder: Path) -> dict[str, Tensor]:
    packings = open_model_folder(folder).packings
    state: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            state.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  # not a dict
    for name, packing in packings.items():
        packed, scales = state.pop(f"{name}.weight_packed"), state.pop(f"{name}.weight_scale")
        shape = state.pop(f"{name}.weight_shape").tolist()
        state[f"{name}.weight"] = dequantize_packed(PackedWeight(packed, scales, packing, shape[1]))
    return state


@pytest.mark.parametrize(("bits", "head"), list(zip(BITS, ("keep", "int8") * 2, strict=True)))
def test_transformers_reads_it_bit_for_bit(source: Source, tmp_path: Path, bits: int, head: Any) -> None:
    """E10: `compressed-tensors` decompresses our file to exactly our weights, so logits are equal to the last bit."""
    from transformers import AutoModelForCausalLM

    target = tmp_path / "out"
    make(source, target, Recipe("gptq" if bits == 4 else "rtn", bits, 32, head=head, samples=8, seq=48))
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.bfloat16)
    ours.load_state_dict(restored_state(target))
    tokens = torch.randint(0, 4096, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


def test_companions_travel_and_the_record_tells_all(source: Source, tmp_path: Path) -> None:
    target = tmp_path / "out"
    (source.folder / "additional_chat_templates").mkdir()
    (source.folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (source.folder / "tekken.json").write_text("{}")
    make(source, target)
    make(source, target, overwrite=True)
    paths = [path for path in target.rglob("*") if path.is_file()]
    names = {path.relative_to(target).as_posix() for path in paths}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE", record.CARD_FILE} <= names
    assert "tekken.json" in names
    assert "README.md" not in names
    written = json.loads((target / record.CARD_FILE).read_text())
    assert written["schema_version"] == 1
    assert (target / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert "additional_chat_templates/tool_use.jinja" in written["files"]
    copy = Source("out", target)
    assert {file.state for file in verify_files(copy, files_to_verify(copy), lambda count: None)} == {"ok"}
    assert written["recipe"] == {
        "method": "rtn",
        "bits": 4,
        "group": 32,
        "scales": "mse",
        "head": "auto",
        "samples": 128,
        "seq": None,
        "seed": 0,
        "target_bpw": None,
        "widths": None,
        "tune": False,
        "tune_codes": False,
        "hessian": "layer",
    }
    assert written["calibration"] is None
    assert (written["source"]["repo"], written["source"]["revision"]) == ("someone/small", "0" * 40)
    assert written["card"] is None
    assert len(written["layers"]) == 21 and all(0 < layer["error"] < 0.05 for layer in written["layers"])
    # Every file except the record itself, and every source file, with its sha256sum.
    assert set(written["files"]) == names - {record.CARD_FILE}
    assert written["files"] == record.digests((path for path in paths if path.name != record.CARD_FILE), target)
    assert (
        written["source"]["files"]["model.safetensors"]
        == record.digests(source.folder.glob("*.safetensors"))["model.safetensors"]
    )
    assert json.loads((target / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


def test_the_card_measures_the_copy_against_its_source(source: Source, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    work = plan_quantization(source, Recipe("rtn", bits=2, group=32))
    outcome = quantize(work, OutputTarget(tmp_path / "out"), CPU, Callbacks(lambda *step: steps.append(step)))
    card = outcome.report.evaluation
    assert card is not None and card.divergence is not None
    assert card.context == 64 and card.scored_tokens == planning.QUICK_TOKENS // 64 * 63
    assert card.divergence.kl.value > 1e-3
    written = json.loads((tmp_path / "out" / record.CARD_FILE).read_text())
    assert written["card"]["divergence"]["kl"]["value"] == card.divergence.kl.value
    for stage in ("quantizing", "layers of model 1 of 2", "layers of model 2 of 2", "windows"):
        assert any(name == stage and done == total for name, done, total in steps)


def test_the_source_runs_once_for_all_precisions_of_the_report(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[Path] = []
    hidden = StreamedModel.hidden

    def counted(model: StreamedModel, *rest: Any) -> Tensor:
        passes.append(model.folder.path)
        return hidden(model, *rest)

    monkeypatch.setattr(StreamedModel, "hidden", counted)
    outcome = make(source, tmp_path / "out", Recipe("rtn", bits=4, group=32, head="keep"), "quick")
    assert passes.count(source.folder) == 1
    others = len(passes) - 1  # in fp32, and where a kernel multiplies packed weights with activations of 16 and 8 bits
    assert others == (1 if outcome.report.activations is None else 3)


@pytest.mark.parametrize("fault", ["E9-same-bytes-twice"])
@pytest.mark.parametrize("recipe", [GROUP_32, DATA], ids=lambda recipe: recipe.method)
def test_the_same_recipe_gives_the_same_bytes(source: Source, tmp_path: Path, recipe: Recipe, fault: str) -> None:
    for name in ("first", "second"):
        make(source, tmp_path / name, recipe, report="quick" if recipe is GROUP_32 else "none")
    first, second = (record.digests((tmp_path / name).iterdir()) for name in ("first", "second"))
    assert first == second and record.CARD_FILE in first


def test_one_tensor_is_in_memory_at_a_time(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    read = Checkpoint.read

    def watched(self: Checkpoint, name: str) -> Tensor:
        kept = [ref() for ref in alive if ref() is not None]
        assert sum(tensor.nbytes for tensor in kept if tensor is not None) == 0, f"kept while {name} was read"
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", watched)
    make(source, tmp_path / "out")
    assert len(alive) == len(load_file(source.folder / "model.safetensors"))


@pytest.mark.parametrize("fault", ["E4-fewer-tokens-than-inputs"])
def test_what_was_unusual_is_said(source: Source, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "COLLAPSED_KL", 1e-3)  # a random model has little to lose
    text = tmp_path / "text.txt"
    text.write_text("One two three. " * 200)
    rewrite(source, "model.layers.0.input_layernorm.weight", lambda gain: gain.index_fill(0, torch.tensor([7]), 0))
    work = plan_quantization(source, Recipe(bits=2, group=32, samples=6, seq=48), PlanSettings(text=text))
    outcome = quantize(work, OutputTarget(tmp_path / "out"), CPU)
    assert outcome.fallbacks == 0
    dead, collapsed = outcome.notes
    assert "3 layers with inputs that calibration never used, at most 1, in model.layers.0.self_attn.q_proj" in dead
    assert "the model has collapsed" in collapsed
    written = json.loads((tmp_path / "out" / record.CARD_FILE).read_text())
    assert written["calibration"]["mix"] == {"file": 6} and written["calibration"]["seq"] == 48
    assert all(layer["output_error"] <= layer["rounding_output_error"] for layer in written["layers"])

    notes = make(Source("draft", DRAFT, None, None), tmp_path / "few", Recipe(group=64, samples=8, seq=32)).notes
    assert notes == ("calibrated on 256 tokens, fewer than the 384 inputs of a layer; use more",)


@pytest.mark.parametrize("tied", [False, True], ids=["E11-own-head", "E11-tied-head"])
@pytest.mark.parametrize("recipe", [GROUP_32, DATA], ids=lambda recipe: recipe.method)
def test_all_but_the_linears_of_blocks_is_kept(source: Source, tmp_path: Path, recipe: Recipe, tied: bool) -> None:
    """Head, embedding and norms are unchanged bit for bit, and `ignore` lists the head."""
    if tied:
        tensors = load_file(source.folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, source.folder / "model.safetensors", metadata={"format": "pt"})
        write_config(source.folder, tie_word_embeddings=True)
    make(source, tmp_path / "out", recipe)
    before, after = (load_file(folder / "model.safetensors") for folder in (source.folder, tmp_path / "out"))
    linears = {name for name in before if ".self_attn." in name or ".mlp." in name}
    packed = {f"{name}_{part}" for name in linears for part in ("packed", "scale", "shape")}
    assert len(linears) == 21 and set(after) == (set(before) - linears) | packed
    assert all(torch.equal(after[name], before[name]) for name in set(before) - linears)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["ignore"] == ["lm_head"]
    assert [group["targets"] for group in written["config_groups"].values()] == [["Linear"]]


def test_notes_name_the_layers_that_they_are_about() -> None:
    """The first three of layers with too few tokens, and the layer with the most unused inputs."""
    few = [record.Layer(f"few.{number}", "int4", 0.1, fallback=TOO_FEW_TOKENS) for number in range(4)]
    other = [record.Layer("other", "int4", 0.1, fallback="another reason")]
    dead = [record.Layer(f"dead.{count}", "int4", 0.1, dead_columns=count) for count in (0, 2, 7, 5)]
    notes = list(result_notes((*other, *few, *dead), record.Tuning(0.25, 0.125), QualityReport()))
    assert sorted(notes[:2]) == [
        "1 of 9 layers were rounded to nearest: another reason",
        f"4 of 9 layers were rounded to nearest: {TOO_FEW_TOKENS} (few.0, few.1, few.2, ...)",
    ]
    assert notes[2:] == [
        "tuning: mean KL of held-out calibration windows 0.25 → 0.125",
        "3 layers with inputs that calibration never used, at most 7, in dead.7",
    ]
    (note,) = result_notes(tuple(few[:3]), None, QualityReport())
    assert note.endswith("(few.0, few.1, few.2)")
