"""Test `head="auto"`: both heads are measured, and the folder has the bytes of the recipe that names the chosen one."""

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.quant import shared_work
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.pipeline import quantize
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.planning.target import OutputTarget
from mycli.quant.progress import Callbacks, ReportProgress, silent
from mycli.quant.recipe import Head, Recipe
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.checkpoint.safetensors_header import INDEX
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.quantization import head
from mycli.runtime.quantization.head import HeadKl, read_head_kl
from mycli.runtime.utils.json_fields import Fields
from tests.support.grids import chosen
from tests.support.models import CPU, random_model, shorten_report

pytestmark = pytest.mark.usefixtures("short_calibration_text")

RTN = Recipe("rtn", bits=4, group=32)
GPTQ = Recipe("gptq", bits=4, group=32, samples=8, seq=48)


@pytest.fixture(autouse=True)
def short_report(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_report(monkeypatch, 512)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source("someone/small", random_model(tmp_path / "source"), None, None)


def made(source: Source, target: Path, recipe: Recipe, report: Any = "quick", **options: Any) -> dict[str, Any]:
    work = plan_quantization(source, recipe, PlanSettings(report))
    quantize(work, OutputTarget(target), CPU, **options)
    card: dict[str, Any] = json.loads((target / "mycli.json").read_text())
    return card


def with_head(recipe: Recipe, chosen: Head) -> Recipe:
    return Recipe(recipe.method, recipe.bits, recipe.group, head=chosen, samples=recipe.samples, seq=recipe.seq)


Named = Callable[[Recipe, Head], tuple[dict[str, Any], Source]]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Named:
    """Return the card of a copy whose recipe names the head, and its source; each copy is made once, within a test."""
    folder = tmp_path_factory.mktemp("named")
    source = Source("someone/small", random_model(folder / "source"), None, None)

    @cache
    def make_once(recipe: Recipe, chosen: Head) -> tuple[dict[str, Any], Source]:
        return made(source, folder / f"{recipe.method}-{chosen}", with_head(recipe, chosen)), source

    return make_once


def name_of(value: Any) -> str:
    return str(value.method if isinstance(value, Recipe) else value[1] if isinstance(value, tuple) else value)


EVERY = product((GPTQ, RTN), ((1e9, "int8"), (-1e9, "keep")), (False, True))
QUICK = [(GPTQ, (1e9, "int8"), False), (GPTQ, (-1e9, "keep"), True)]
QUICK += [(RTN, (1e9, "int8"), True), (RTN, (-1e9, "keep"), False)]


@pytest.mark.parametrize(("recipe", "choice", "in_place"), chosen(EVERY, QUICK), ids=name_of)
def test_the_folder_is_that_of_the_recipe_that_names_the_head(
    named: Named,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: Recipe,
    choice: tuple[float, Head],
    in_place: bool,
) -> None:
    limit, head_of_copy = choice
    monkeypatch.setattr(head, "MAX_ADDED_KL", limit)
    copies = {name: named(recipe, name) for name in ("keep", "int8")}
    expected, source = copies[head_of_copy]
    auto = made(source, tmp_path / "auto", recipe, in_place=in_place)
    kl = {name: card["card"]["divergence"]["kl"]["value"] for name, (card, _) in copies.items()}
    assert auto["card"]["head"] == {**kl, "chosen": head_of_copy}
    assert auto["files"] == expected["files"], "weights and config.json"
    for part in ("size", "layers"):
        assert auto[part] == expected[part]
    assert auto["card"] == {**expected["card"], "head": auto["card"]["head"]}
    assert ("lm_head" in open_model_folder(tmp_path / "auto").packings) is (head_of_copy == "int8")


def test_without_a_report_the_head_is_kept(source: Source, tmp_path: Path) -> None:
    assert made(source, tmp_path / "out", RTN, "none")["card"] is None
    assert "lm_head" not in open_model_folder(tmp_path / "out").packings


@pytest.mark.parametrize(("added", "packed"), [(-0.01, True), (0.0299, True), (0.0301, False)])
def test_the_limit_is_relative_to_the_kl_of_the_blocks(added: float, packed: bool) -> None:
    assert HeadKl(0.5, 0.5 * (1 + added)).packed is packed


def test_a_card_is_read_back() -> None:
    kl = HeadKl(0.25, 0.2525)
    assert read_head_kl(Fields({"card": {"head": kl.record}}, "mycli.json")) == kl
    assert read_head_kl(Fields({"card": {"head": None}}, "mycli.json")) is None
    assert read_head_kl(Fields({"card": None}, "mycli.json")) is None
    with pytest.raises(ModelError):
        read_head_kl(Fields({"card": {"head": {"keep": "much", "int8": 1}}}, "mycli.json"))


@pytest.mark.parametrize("limit", [1 << 20, 600], ids=["one-file", "shards"])
def test_a_new_plan_keeps_what_was_written(tmp_path: Path, limit: int) -> None:
    tensors = {
        name: torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("abc")
    }
    old = [(name, torch.float32, (8, 16)) for name in "abc"]
    new = [("a", torch.float32, (8, 16)), ("b", torch.bfloat16, (8, 16)), ("d", torch.int8, (3,)), old[2]]
    with CheckpointWriter(tmp_path / "out", old, max_shard_bytes=limit) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.replan(new)
        with pytest.raises(ValueError, match="2 tensors not written, b among them"):
            writer.finish()
        writer.write("b", tensors["b"].bfloat16())
        writer.write("d", torch.arange(3, dtype=torch.int8))
        writer.finish()
    copy = Checkpoint(Manifest.open(tmp_path / "out"))
    assert all(torch.equal(copy.read(name), tensors[name]) for name in "ac")
    assert torch.equal(copy.read("b"), tensors["b"].bfloat16()) and copy.read("d").tolist() == [0, 1, 2]
    assert (tmp_path / "out" / INDEX).exists() is (limit == 600)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == (1 if limit > 600 else 3)


@pytest.mark.parametrize("limit", [shared_work.REMEMBERED_BYTES, 0])
def test_the_original_reads_the_text_once_unless_that_needs_much_memory(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """It is compared with both heads, then with the activations of the result."""
    monkeypatch.setattr(shared_work, "REMEMBERED_BYTES", limit)
    read, stages, hidden = list[Path](), dict[str, int](), StreamedModel.hidden

    def counted(model: StreamedModel, tokens: torch.Tensor, progress: ReportProgress = silent) -> torch.Tensor:
        read.append(model.folder.path)
        return hidden(model, tokens, progress)

    monkeypatch.setattr(StreamedModel, "hidden", counted)
    report = Callbacks(lambda stage, done, total: stages.update({stage: done}))
    made(source, tmp_path / "copy", RTN, callbacks=report)
    assert read.count(source.folder) == (1 if limit else 2)
    layers = open_model_folder(source.folder).config.layers
    assert stages["layers of model 1 of 2"] == stages["layers of model 2 of 2"] == layers
