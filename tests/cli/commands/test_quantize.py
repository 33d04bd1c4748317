"""Test `mycli quantize` and `mycli eval`: text and JSON output."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.command import Terminated
from mycli.cli.main import main
from mycli.cli.quantizing import to_gguf
from mycli.quant import pipeline, quality_report
from mycli.quant.calls import measure
from mycli.quant.calls.record import CallCounts
from mycli.quant.evaluate import activation_models
from mycli.quant.solvers import gptq
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ExitCode, ResourceError
from tests.support.calling_model import train
from tests.support.hub_server import hub_server
from tests.support.models import CPU, random_model, shorten_report
from tests.support.paths import DRAFT, ROOT

pytestmark = pytest.mark.usefixtures("short_calibration_text")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def parsed(text: str) -> dict[str, Any]:
    """Parse standard output under --json, which must be exactly one object."""
    value: dict[str, Any] = json.loads(text)
    assert value["schema_version"] == 1
    return value


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MYCLI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MYCLI_DEVICE", "cpu")
    shorten_report(monkeypatch, 1024)
    return tmp_path / "home"


def test_gguf_is_one_file_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("quantize", "pico", "--format", "gguf", "-o", str(tmp_path / "pico.gguf"), "--dry-run")
    code, out, _ = call(capsys, *command)
    assert code == 0 and "pico.gguf" in out
    code, _, err = call(capsys, *command, "--sweep", "bits=4,2")
    assert code == 2 and "--sweep excludes GGUF" in err


@pytest.mark.parametrize(("target", "name"), [("p.gguf", "./p.gguf"), ("my models/p.gguf", "'my models/p.gguf'")])
def test_the_command_for_a_new_file_can_be_typed_where_it_was_made(
    target: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my models").mkdir()
    monkeypatch.setattr(to_gguf, "carry_out_request", lambda *_: None)
    code, _, err = call(capsys, "quantize", "pico", "--bits", "q4_k_m", "-o", target)
    assert code == 0 and err.endswith(f"to chat with it: mycli chat {name}\n"), err


def test_default_name_card_and_round_trip(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "quantize", "pico", "--samples", "8", "--seq", "128")
    folder = data_dir / "models" / "pico-gptq-int4-g128"
    assert code == 0 and (folder / "model.safetensors").is_file()
    assert str(folder) in out
    for part in ("6.29 bits per weight", "4.126 bits", "same top token", "output error", "worst layers", "no BOS"):
        assert part in out
    assert "mycli chat pico-gptq-int4-g128" in err

    code, out, _ = call(capsys, "eval", "pico-gptq-int4-g128", "--ref", "pico", "--tokens", "2k", "--json")
    result = parsed(out)
    assert code == 0 and (result["windows"], result["context"]) == (4, 512)
    assert 0.01 < result["divergence"]["kl"]["value"] < 0.03
    assert 0.8 < result["divergence"]["same_top1"]["value"] < 0.95


def test_int8_keeps_the_top_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(
        capsys, "quantize", "pico", "--method", "rtn", "--bits", "8", "-o", str(tmp_path / "out"), "--json"
    )
    divergence = parsed(out)["card"]["divergence"]
    assert code == 0 and divergence["same_top1"]["value"] >= 0.985 and divergence["kl"]["value"] < 1e-3


def test_dry_run_tells_the_exact_size_and_writes_nothing(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("quantize", "pico", "--method", "rtn", "--bits", "3", "--group", "64")
    code, out, _ = call(capsys, *arguments, "--dry-run", "--json")
    promised = parsed(out)["size"]["bytes"]
    assert code == 0 and not data_dir.exists() and 0 < parsed(out)["seconds"] < 3600
    code, out, _ = call(capsys, *arguments, "--report", "none", "--json")
    result = parsed(out)
    assert code == 0 and result["card"] is None and result["size"]["bytes"] == promised
    header = int.from_bytes((Path(result["folder"]) / "model.safetensors").open("rb").read(8), "little")
    assert (Path(result["folder"]) / "model.safetensors").stat().st_size == promised + 8 + header


@pytest.mark.parametrize(
    ("text", "told"), [("10M", "10 MiB"), ("10MB", "9.54 MiB"), ("0.02G", "20.5 MiB"), ("10k", "10 KiB")]
)
def test_a_bound_is_told_as_it_was_given(text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "quantize", "pico", "--max-ram", text, "--dry-run")
    assert code == 5 and out == "" and f"error: a limit of {told} of main memory is too small" in err


@pytest.mark.parametrize("fault", ["E7-bound-too-small"])
def test_a_bound_that_cannot_be_kept_ends_with_5_and_tells_which_could(
    data_dir: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    code, out, err = call(capsys, "quantize", "pico", "--max-ram", "20MiB")
    assert code == 5 and out == "" and "20 MiB of main memory is too small" in err and not data_dir.exists()
    least = err.split("the minimum is --max-ram ")[1].split(";")[0]
    code, out, _ = call(capsys, "quantize", "pico", "--max-ram", least, "--dry-run", "--json")
    told = parsed(out)
    assert code == 0 and told["memory_bytes"] <= int(least.removesuffix("MiB")) << 20


def test_errors_are_drawn_by_both_who_know_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("quantize", "pico-draft", "--group", "64", "--samples", "8", "--seq", "64", "--report", "none")
    code, _, err = call(capsys, *arguments, "--plot", str(tmp_path / "a.png"))
    assert code == 2 and "written as .svg only" in err
    out = tmp_path / "out"
    assert call(capsys, *arguments, "-o", str(out), "--plot", str(tmp_path / "a.svg"))[0] == 0
    assert call(capsys, "show", str(out), "--plot", str(tmp_path / "b.svg"))[0] == 0
    first, second = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert first.count("<g>") == 14 and first.split("<g>")[1:] == second.split("<g>")[1:]
    code, _, err = call(capsys, "show", "pico", "--plot", str(tmp_path / "c.svg"))
    assert code == 2 and "no layer" in err


def test_a_breached_gate_ends_with_6_and_keeps_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "quantize",
        "pico-draft",
        "--group",
        "64",
        "--method",
        "rtn",
        "--bits",
        "2",
        "--max-kl",
        "0.1",
        "--overwrite",
        "-o",
        str(tmp_path / "out"),
    )
    code, out, err = call(capsys, *arguments)
    assert code == 6 and "above --max-kl 0.1" in err and "KL divergence" in out
    assert (tmp_path / "out" / "config.json").exists()
    code, out, _ = call(capsys, *arguments, "--json")
    answer = parsed(out)
    assert code == 6 and answer["card"]["divergence"]["kl"]["value"] > 0.1
    assert "above --max-kl 0.1" in answer["error"]["message"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Terminated])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_stopped_run_says_what_it_leaves(
    stop: type[BaseException],
    method: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise stop

    monkeypatch.setattr(pipeline, "measure_result", stopped)
    if method == "rtn":  # which stores no blocks: these are of another run
        (tmp_path / ".out.work").mkdir()
    arguments = ("quantize", "pico-draft", "--group", "64", "--method", method, "--samples", "8", "--seq", "64")
    code, _, err = call(capsys, *arguments, "-o", str(tmp_path / "out"))
    assert code == (130 if stop is KeyboardInterrupt else 143)
    work = f"finished blocks are stored in {tmp_path / '.out.work'}; to continue"
    left = work if method == "gptq" else "nothing was written; to start again"
    assert f"stopped; {left}: mycli" in err


@pytest.mark.parametrize("fault", ["E1-all-layers"])
def test_too_many_layers_merely_rounded_end_with_6(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(gptq, "factorize", lambda _: None)
    arguments = ("quantize", "pico-draft", "--samples", "4", "--seq", "64", "--report", "none", "--overwrite")
    code, out, err = call(capsys, *arguments, "-o", str(tmp_path / "out"))
    assert code == 6 and "14 of 14 layers were only rounded" in err and "worst layers" in out
    assert "14 of 14 layers were rounded to nearest: Hessian not positive definite" in err.replace("\n", " ")
    code, out, _ = call(capsys, *arguments, "-o", str(tmp_path / "out"), "--max-fallback", "1", "--json")
    assert code == 0 and len(parsed(out)["notes"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "5"], "5 bits are not supported\nhint: --bits takes: 8, 4, 3, 2"),
        (["--group", "100"], "group 100 is not supported\nhint: --group takes"),
        (["--group", "x"], "--group x"),
        (["--method", "magic"], "method 'magic' is unknown\nhint: --method takes"),
        (["--scales", "x"], "--scales x"),
        (["--head", "int2"], "--head int2"),
        (["--head", "int8"], "uses its embedding as head"),
        (["--report", "x"], "--report x"),
        (["--samples", "1", "--seq", "128"], "1 samples of 128 tokens"),
        (["--seq", "4k"], "the model takes 2 to 2048"),
        (["--calib", "none.txt", "--seq", "1"], "windows of 1 tokens are not"),
        (["--report", "none", "--max-kl", "1"], "--max-kl needs a quality measurement"),
        (
            ["-o", "p.gguf"],
            "-o p.gguf: a folder would be written, not a GGUF file\nhint: for a GGUF file: --bits q4_k_m",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_is_refused_before_any_work(
    data_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = call(capsys, "quantize", "pico", *arguments)
    assert code == 2 and message in err and out == ""
    assert not data_dir.exists()


def test_eval_reads_a_text_and_refuses_what_it_cannot_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little child named Anna. " * 30)
    code, out, _ = call(capsys, "eval", "pico", "--text", str(text), "--ctx", "32", "--dtype", "bf16")
    assert code == 0 and "windows of 32 tokens" in out and "bfloat16" in out
    code, _, err = call(capsys, "eval", "pico", "--text", str(text), "--ctx", "1k")
    assert code == 2 and "fewer than one window" in err
    code, _, err = call(capsys, "eval", "pico", "--text", str(tmp_path / "none.txt"))
    assert code == 4 and "none.txt" in err


def test_kv_sweep_compares_each_kind_of_cache_with_the_exact_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "eval", "pico", "--kv-sweep", "--tokens", "512", "--ctx", "64", "--json")
    assert code == ExitCode.OK, err
    exact, half, codes, fours = json.loads(out)["sweep"]
    assert [one["kv"] for one in (exact, half, codes, fours)] == ["float32", "bfloat16", "int8", "int4"]
    sizes = [one["bytes_per_token"] for one in (exact, half, codes, fours)]
    assert sizes == [6144, 3072, 1536 + 2 * 6 * 2 * 4, 768 + 2 * 6 * 2 * 4]
    assert exact["divergence"] is None
    assert 0 < half["divergence"]["kl"]["value"] < codes["divergence"]["kl"]["value"] < 0.001
    assert codes["divergence"]["kl"]["value"] < fours["divergence"]["kl"]["value"] < 0.03
    code, out, _ = call(capsys, "eval", "pico", "--kv", "int8", "--tokens", "512", "--ctx", "64", "--json")
    assert json.loads(out)["perplexity"] == codes["perplexity"]
    code, _, err = call(capsys, "eval", "pico", "--kv-sweep", "--ref", "pico")
    assert code == ExitCode.USAGE and "compares the model with itself" in err


def test_activations_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "out")
    code, out, err = call(capsys, "quantize", "pico", "--method", "rtn", "--bits", "3", "-o", folder, "--json")
    assert code == 0, err
    card = parsed(out)["card"]["activations"]
    if not activation_models(open_model_folder(Path(folder)), CPU):
        assert card is None
        pytest.skip("no native code here")
    assert 0.1 < card["16"] < 1 and abs(card["8"] / card["16"] - 1) < 0.03
    assert "8-bit activations  KL" in call(capsys, "show", folder)[1]
    short = "--tokens", "512", "--ctx", "64", "--json"
    code, out, err = call(capsys, "eval", folder, "--ref", "pico", "--activations-sweep", *short)
    assert code == 0, err
    assert (parsed(out)["model"], parsed(out)["reference"]) == (folder, "pico")
    sixteen, eight = parsed(out)["sweep"]
    assert (sixteen["activations"], eight["activations"]) == ("16", "8")
    assert 0.1 < sixteen["divergence"]["kl"]["value"] != eight["divergence"]["kl"]["value"]
    flags = "--dtype", "bf16", "--activations", "8"
    assert parsed(call(capsys, "eval", folder, *flags, *short)[1])["perplexity"] == eight["perplexity"]
    code, _, err = call(capsys, "eval", "pico", "--activations-sweep", "--tokens", "512", "--ctx", "64")
    assert code == ExitCode.USAGE and "no packed weights" in err
    code, _, err = call(capsys, "eval", "pico", "--activations-sweep", "--activations", "8")
    assert code == ExitCode.USAGE and "excludes" in err


def test_the_choice_of_the_head_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_report(monkeypatch, 512)
    source, target = str(random_model(tmp_path / "source")), str(tmp_path / "out")
    code, out, err = call(capsys, "quantize", source, "--method", "rtn", "--group", "32", "-o", target)
    assert code == 0, err
    row = next(line for line in out.splitlines() if "output head" in line)
    assert "KL" in row and "in 8 bits" in row
    assert row.split() == next(
        line.split() for line in call(capsys, "show", target)[1].splitlines() if "output head" in line
    )
    kept = str(tmp_path / "kept")
    _, _, err = call(capsys, "quantize", source, "--method", "rtn", "--group", "32", "--report", "none", "-o", kept)
    assert "the output head stays unquantized" in err and "--head int8 halves it" in err
    _, _, err = call(capsys, "quantize", source, "--method", "nf4", "--group", "64", "--report", "none", "--dry-run")
    assert "the output head stays unquantized" in err and "--head" not in err
    assert parsed(call(capsys, "estimate", kept, "--json")[1])["head"] == "bfloat16"


def test_calibration_from_a_dataset_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run downloads nothing; later runs work offline and produce the same bytes."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    rows = "".join(json.dumps({"text": f"Row {i} of some text about {i * i}."}) + "\n" for i in range(400))
    data = ["--samples", "4", "--seq", "128", "--calib", "hf:org/texts"]
    asked = ["quantize", "pico-draft", "--group", "64", "--report", "none", *data]
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address())
        commit = server.add("datasets/org/texts", {"train.jsonl": rows.encode()})
        assert call(capsys, *asked, "--dry-run")[0] == 0 and not server.log
        code, _, err = call(capsys, *asked, "-o", str(tmp_path / "first"))
        assert code == 0 and f"datasets/org/texts @ {commit[:12]}, train.jsonl" in err
    assert call(capsys, *asked, "-o", str(tmp_path / "second"), "--offline")[0] == 0
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    assert json.loads((tmp_path / "first" / "mycli.json").read_text())["calibration"]["mix"] == {"file": 4}
    code, _, err = call(capsys, "quantize", "pico", "--calib", "hf:org/none", "--offline")
    assert code == ExitCode.NOT_FOUND and "hf:org/none is not on this machine" in err


def tool_model(folder: Path) -> Path:
    """Write pico-draft with a template that knows tools; its replies have no calls."""
    shutil.copytree(DRAFT, folder)
    template = (ROOT / "tests" / "support" / "templates" / "tool_names.jinja").read_text()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder


def test_lost_calls_are_in_the_card_and_end_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, copy = str(tool_model(tmp_path / "tools")), str(tmp_path / "copy")
    counts = iter((CallCounts(20, 18), CallCounts(14, 9), CallCounts(20, 18), CallCounts(19, 18)))
    monkeypatch.setattr(quality_report, "count_calls", lambda *_: next(counts))
    rounding = ("quantize", model, "--method", "rtn", "--bits", "2", "--group", "64", "-o", copy, "--overwrite")
    code, out, err = call(capsys, *rounding, "--max-call-loss", "0.1")
    assert code == 6 and "valid calls fell by 25.0% of the prompts, more than --max-call-loss 0.1" in err
    assert "20 → 14 of 24 prompts; as expected 18 → 9" in out and "call tokens" in out and "punctuation" in out
    _, shown, _ = call(capsys, "show", copy)
    assert "20 → 14 of 24 prompts" in shown
    code, out, _ = call(capsys, *rounding, "--max-call-loss", "0.1", "--json")
    calls = parsed(out)["card"]["calls"]
    assert code == 0 and calls["after"] == {"valid": 19, "expected": 18} and calls["structure"]["kl"] > 0.1
    assert calls["structure"]["tokens"] == sum(kind["tokens"] for kind in calls["kinds"].values())


@pytest.mark.slow
def test_a_gate_on_calls_needs_calls_to_lose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_REPLY_TOKENS", 1)
    gated = ("--method", "rtn", "--group", "64", "--max-call-loss", "0", "-o", str(tmp_path / "copy"), "--overwrite")
    code, _, err = call(capsys, "quantize", "pico-draft", *gated)
    assert code == 6 and "chat template has no format for calls" in err
    model = str(tool_model(tmp_path / "tools"))
    code, _, err = call(capsys, "quantize", model, *gated)
    assert code == 6 and "the original itself replies with valid calls to 0 of 24 prompts" in err

    def too_large(*_: object) -> CallCounts:
        raise ResourceError("9 GiB needed")

    monkeypatch.setattr(quality_report, "count_calls", too_large)
    code, _, err = call(capsys, "quantize", model, *gated)
    assert code == 6 and "--max-call-loss: the original does not fit in memory: 9 GiB needed" in err
    assert "replies with calls were not measured" in err
    code, _, err = call(capsys, "quantize", "pico", "--report", "none", "--max-call-loss", "0")
    assert code == 2 and "--max-call-loss needs a quality measurement" in err


@pytest.mark.slow
def test_two_bits_lose_calls_and_four_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "calling")
    gated = ("quantize", str(tmp_path / "calling"), "--max-call-loss", "0.1", "-o", str(tmp_path / "out"))
    assert call(capsys, *gated, "--bits", "4", "--samples", "32")[0] == 0
    assert call(capsys, *gated, "--method", "rtn", "--bits", "2", "--overwrite")[0] == 6
