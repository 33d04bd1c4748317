"""Test `quantize --sweep`, which creates and compares copies, and `choose`, which picks the best copy that fits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.flags.recipe import RecipeFlags
from mycli.cli.quantizing.sweep import _plot, sweep_recipes
from mycli.quant import pipeline, shared_work
from mycli.quant.layer_streaming import StreamedModel
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.errors import UsageError
from tests.support.command_line import Mycli
from tests.support.models import random_model, shorten_report

pytestmark = pytest.mark.usefixtures("short_calibration_text")

CPU = ("--device", "cpu")
SMALL = ("quantize", "pico-draft", "--group", "64", "--samples", "8", "--seq", "64", *CPU)


@pytest.fixture(autouse=True)
def short_report(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_report(monkeypatch, 1024)


def test_every_combination_once_in_the_order_typed() -> None:
    recipes = sweep_recipes(RecipeFlags(group="64"), ["bits=4,2 method=rtn,gptq", "scales=absmax"])
    assert [recipe.name for recipe in recipes] == [
        f"{method}-absmax-int{bits}-g64" for bits in (4, 2) for method in ("rtn", "gptq")
    ]


@pytest.mark.parametrize(
    "text", ["", "bits", "bits=", "bits=x", "bits=5", "seed=1", "bits=4 bits=3", "bits=4,4", "method=nf4 bits=3"]
)
def test_a_sweep_that_makes_no_sense_is_refused(text: str) -> None:
    if not text:
        assert len(sweep_recipes(RecipeFlags(), [text])) == 1
        return
    with pytest.raises(UsageError):
        sweep_recipes(RecipeFlags(), [text])


def test_copies_are_made_once_compared_and_equal_to_single_ones(
    mycli: Mycli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plot = tmp_path / "copies", tmp_path / "sweep.svg"
    sweep = (*SMALL, "--sweep", "bits=4,2", "method=rtn,awq,gptq", "-o", str(out))
    measured: list[str] = []
    measure = pipeline.measure_result

    def interrupted(original: object, result: ModelFolder, *rest: Any, **options: Any) -> object:
        measured.append(result.path.name)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return measure(original, result, *rest, **options)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(pipeline, "measure_result", interrupted)
    stopped = mycli(*sweep)  # rtn and two of the four that are solved together are finished
    assert stopped.returncode == 130 and "stopped; to continue: mycli" in stopped.stderr
    again = mycli(*sweep, "--plot", str(plot))
    assert again.returncode == 0 and "resumed: all blocks were finished by an earlier run" in again.stderr
    assert again.stderr.count("finished earlier") == 3 and plot.read_text().count("<title>") == 12
    rows = json.loads(mycli(*sweep, "--json").stdout)["sweep"]
    names = [f"{method}-int{bits}-g64" for bits in (4, 2) for method in ("rtn", "awq", "gptq")]
    assert [row["name"] for row in rows] == names and len(measured) == 7, "nothing was made again"
    assert rows[0]["kl"] < rows[3]["kl"] and rows[0]["bytes"] > rows[3]["bytes"] and rows[1]["seconds"] > 0
    for method, bits in (("gptq", "4"), ("awq", "2")):
        single, name = tmp_path / method, f"{method}-int{bits}-g64"
        options = ("--method", method, "--bits", bits, "-o", str(single), "--max-fallback", "1")
        assert mycli(*SMALL, *options).returncode == 0
        for file in ("model.safetensors", "mycli.json"):
            assert (single / file).read_bytes() == (out / name / file).read_bytes()


@pytest.mark.slow
def test_copies_share_the_moments_of_gradients(mycli: Mycli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured moments are the source's, so the second copy has the bytes of a single one."""
    measured: list[int] = []
    output_moments = shared_work.output_moments

    def counted(model: StreamedModel, *rest: Any) -> object:
        measured.append(model.at_once)
        return output_moments(model, *rest)

    monkeypatch.setattr(shared_work, "output_moments", counted)
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": True}
    source = str(random_model(tmp_path / "source", **tiny))
    model = ("quantize", source, *SMALL[2:], "--group", "32", "--hessian", "model")
    assert mycli(*model, "--sweep", "bits=4,2", "-o", str(tmp_path / "copies")).returncode == 0
    assert len(measured) == 1
    # Of random weights, rounding to nearest is kept where it is better.
    done = mycli(*model, "--bits", "2", "-o", str(tmp_path / "single"), "--max-fallback", "1")
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "mycli.json"):
        assert (tmp_path / "single" / name).read_bytes() == (
            tmp_path / "copies" / "gptq-int2-g32-model" / name
        ).read_bytes()
    assert len(measured) == 2


def test_a_copy_of_other_weights_or_of_a_shorter_report_is_not_finished(mycli: Mycli, tmp_path: Path) -> None:
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": True}
    source = random_model(tmp_path / "source", **tiny)
    options = ("--sweep", "bits=8 method=rtn", "--group", "32", "-o", str(tmp_path / "copies"), *CPU)
    sweep = ("quantize", str(source), *options)
    assert mycli(*sweep).returncode == 0
    assert "finished earlier" in mycli(*sweep).stderr
    longer = mycli(*sweep, "--report", "full")
    assert longer.returncode == 2 and "exists already" in longer.stderr
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1  # the lowest bit of a weight
    weights.write_bytes(data)
    other = mycli(*sweep)
    assert other.returncode == 2 and "exists already" in other.stderr


@pytest.mark.slow
def test_another_text_or_source_is_another_copy(mycli: Mycli, tmp_path: Path) -> None:
    sweep = (*SMALL, "--sweep", "bits=4", "-o", str(tmp_path / "copies"))
    assert mycli(*sweep).returncode == 0
    (tmp_path / "text.txt").write_text("Once upon a time there was a boat. " * 400)
    other = mycli(*sweep, "--calib", str(tmp_path / "text.txt"))
    assert other.returncode == 2 and "exists already" in other.stderr
    planned = mycli(*sweep, "--seed", "3", "--overwrite", "--dry-run")
    assert planned.returncode == 0 and re.search(r"gptq-int4-g64 .* s \|", planned.stdout)
    assert mycli(*sweep, "--max-kl", "1").returncode == 2 and mycli(*sweep, "--report", "none").returncode == 2


def test_the_best_that_fits_is_chosen_by_measured_loss(mycli: Mycli) -> None:
    first = json.loads(mycli("choose", "pico-draft", "--gpu", "24GiB", "--json").stdout)["candidates"][1]
    group = first["command"].rpartition(" ")[2]
    for bits in ("4", "2"):
        assert mycli(*SMALL, "--bits", bits, "--group", group).returncode == 0
    whole = json.loads(mycli("choose", "pico-draft", "--gpu", "24GiB", "--ctx", "256", "--json").stdout)
    assert whole["best"] == "pico-draft" and whole["commands"] == ["mycli chat pico-draft --ctx 256"]
    rows = {row["name"]: row for row in whole["candidates"]}
    four, two = (rows[f"pico-draft-gptq-int{bits}-g{group}"] for bits in (4, 2))
    assert four["measured"] and two["measured"] and 0 < four["kl"] < two["kl"]
    made, planned = (rows[f"pico-draft-gptq-int{bits}-g{group}"] for bits in (8, 3))
    assert not made["measured"] and made["command"] == f"mycli quantize pico-draft --bits 8 --group {group}"
    ordered = [rows["pico-draft"], made, four, planned, two]
    assert sorted(ordered, key=lambda row: -row["memory_bytes"]) == ordered

    def chosen(nbytes: int, *options: str) -> dict[str, object]:
        done = mycli("choose", "pico-draft", "--gpu", f"{int(nbytes * 1.03) + 2}B", "--ctx", "256", "--json", *options)
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    assert chosen(made["memory_bytes"])["commands"] == [made["command"], f"mycli chat {made['name']} --ctx 256"]
    assert chosen(four["memory_bytes"])["best"] == four["name"]
    assert chosen(two["memory_bytes"])["best"] == two["name"]
    assert chosen(four["memory_bytes"], "--max-kl", f"{four['kl'] * 1.01}")["best"] == four["name"]
    assert chosen(two["memory_bytes"], "--max-kl", "1e-9")["error"]["exit_code"] == 2  # type: ignore[index]  # an object
    assert chosen(two["memory_bytes"] // 2)["error"]["exit_code"] == 5  # type: ignore[index]  # as above


def test_the_plot_of_a_sweep_has_sizes_and_times_of_what_was_measured(tmp_path: Path) -> None:
    rows = [
        {"name": "a", "method": "gptq", "bytes": 3 << 20, "kl": 0.01, "seconds": 40.0},
        {"name": "b", "method": "rtn", "bytes": 2 << 20, "kl": 0.02, "seconds": None},
        {"name": "c", "method": "rtn", "bytes": 1 << 20, "kl": None, "seconds": 9.0},
    ]
    _plot(tmp_path / "a.svg", "m", rows)
    titles = re.findall(r"<title>(.*?)</title>", (tmp_path / "a.svg").read_text())
    assert titles == ["a: 0.01 at 3", "b: 0.02 at 2", "a: 0.01 at 40"]
    _plot(tmp_path / "a.svg", "m", rows[1:])
    assert "copies by time" not in (tmp_path / "a.svg").read_text()
    with pytest.raises(UsageError, match="nothing was measured"):
        _plot(tmp_path / "a.svg", "m", rows[2:])
