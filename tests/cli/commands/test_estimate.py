"""Test `mycli estimate` as text and as JSON."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.commands.estimate import EXAMPLES, _parse_share
from mycli.cli.main import main
from mycli.runtime.checkpoint.formats.compressed_tensors import write_quantization
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device import probe
from mycli.runtime.device.bandwidth import record_bandwidth
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.device.system import Memory
from mycli.runtime.errors import ExitCode, UsageError
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.units import human_bytes
from tests.support.embedding_models import encoder
from tests.support.hub_server import HubServer, hub_server
from tests.support.published import PUBLISHED


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "state" / "mycli"


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a folder that contains only the config.json of Llama-3.1-8B, on a machine that has room for it."""
    monkeypatch.setattr(probe, "memory", lambda: Memory(32 << 30, 32 << 30, "machine"))
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED["Llama-3.1-8B"]["config"]))
    return str(folder)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["estimate", *arguments])
    return int(stop.value.code or 0)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert call(*arguments, "--json") == ExitCode.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1
    return found


def test_a_model_of_embeddings_has_no_speed_of_decoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(encoder(tmp_path / "bert"))
    assert answer(capsys, folder, "--bandwidth", "100")["ceiling_tokens_per_second"] == []
    assert call(folder, "--bandwidth", "100") == ExitCode.OK
    assert "ceiling" not in capsys.readouterr().out


def test_a_config_is_enough(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, llama)
    assert found["parameters"] == 8_030_261_248
    assert found["bytes"]["weights"] + found["bytes"]["embeddings_and_head"] == 2 * 8_030_261_248
    parts = [found["bytes"][key] for key in found["bytes"] if key not in ("total", "free")]
    assert found["bytes"]["total"] == sum(parts)
    assert found["context"] == 8192 and found["device"] == "cpu"


def test_what_a_person_reads(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(llama, "--quant", "gptq-int4-g128", "--ctx", "4k", "--gpu", "24GiB", "--bandwidth", "1008") == 0
    text = capsys.readouterr().out
    for line in (
        "int4-g128 · 8,030,261,248 parameters",
        "weights              3.35 GiB",
        "embeddings and head  1.96 GiB",
        "KV cache             512 MiB  (4096 tokens x 1, 128.0 KiB per token)",
        "CUDA context         832 MiB",
        "free                 24.00 GiB",
        "fits, ",
        "217 tok/s empty, 194 tok/s at 4096 tokens  (1008 GB/s, as given)",
    ):
        assert line in text, line


def test_too_large_says_by_how_much_and_what_to_do(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(llama, "--gpu", "12GiB") == ExitCode.RESOURCES
    captured = capsys.readouterr()
    assert "does not fit: 5.21 GiB too much" in captured.out and "weights" in captured.out
    assert f"hint: quantize it: mycli quantize {llama} --bits 8" in captured.err
    assert call(llama, "--gpu", "12GiB", "--json") == ExitCode.RESOURCES
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False and told["error"]["exit_code"] == 5


def test_draft_batch_and_dtype_count(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--gpu", "200GiB")
    plain = answer(capsys, llama, *given)["bytes"]
    larger = answer(capsys, llama, *given, "--batch", "4", "--dtype", "fp32", "--draft", "pico", "--ctx", "2k")["bytes"]
    assert larger["cache"] == 2 * plain["cache"]  # 4 sequences, twice the bytes, a quarter of the context
    assert larger["weights"] == 2 * plain["weights"]
    assert larger["draft"] == 4 * 5_770_496 + 4 * 2048 * 6 * 2 * 2 * 64 * 4, "a draft has the dtype of its target"


def test_a_bandwidth_is_a_finite_number(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("inf", "nan", "0"):
        assert call("pico", "--bandwidth", wrong) == ExitCode.USAGE
        assert "--bandwidth must be" in capsys.readouterr().err


def test_a_measured_bandwidth_is_used(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "pico")["ceiling_tokens_per_second"] == []
    record_bandwidth(state_dir, cpu_name(), 20)
    found = answer(capsys, "pico")
    assert (found["bandwidth_gb_per_second"], found["bandwidth_source"]) == (20, "best measured here")
    assert [speed["depth"] for speed in found["ceiling_tokens_per_second"]] == [0, 2048]
    assert found["ceiling_tokens_per_second"][0]["rate"] == pytest.approx(20e9 / (2 * 5_770_496))


def test_a_size_in_the_config_file_needs_a_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config" / "mycli").mkdir(parents=True)
    (tmp_path / "config" / "mycli" / "config.toml").write_text("gpu = 24\n")
    assert call("pico") == ExitCode.USAGE
    captured = capsys.readouterr()
    assert "config.toml: gpu: " in captured.err and "has no unit: write 24GiB or 24MiB" in captured.err
    assert not captured.out


def test_packed_tensors_are_read_from_the_config(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    dense = answer(capsys, llama, "--quant", "int4-g128")
    path = Path(llama) / "config.json"
    config = open_model_folder(Path(llama)).config
    names = [spec.name for layer in range(32) for group in config.layer(layer).products().values() for spec in group]
    section = write_quantization({name: Packing(4, 128) for name in names}, ["lm_head"], "bfloat16")
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))
    packed = answer(capsys, llama)
    assert packed["bytes"] == {**dense["bytes"], "free": packed["bytes"]["free"]}
    assert packed["scheme"] == "int4-g128"
    assert call(llama, "--quant", "int8") == ExitCode.USAGE
    assert "already quantized" in capsys.readouterr().err
    fitted = answer(capsys, llama, "--fit", "--gpu", "12GiB")
    assert fitted["commands"] == [f"mycli chat {llama} --ctx {fitted['context']}"] and fitted["context"] > 8192
    rows = answer(capsys, llama, "--table")["table"]
    assert {row["scheme"] for row in rows} == {"int4-g128"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address())
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "MYCLI_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield running


def test_a_model_of_the_hub_is_estimated_from_its_config_alone(
    server: HubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = json.dumps(PUBLISHED["Llama-3.2-1B"]["config"]).encode()
    server.add("org/model", {"config.json": config, "model.safetensors": b"x" * 2000})
    assert answer(capsys, "org/model")["parameters"] == 1_235_814_400
    assert answer(capsys, "pico", "--draft", "org/model@main")["bytes"]["draft"] > 2 * 1_235_814_400
    assert not server.requests("model.safetensors") and not (tmp_path / "hf").exists()
    assert call("org/model", "--offline") == ExitCode.NOT_FOUND
    assert call("org/other") == ExitCode.NOT_FOUND
    assert call("org/model", "--verify") == ExitCode.NOT_FOUND
    assert "mycli pull org/model" in capsys.readouterr().err


def test_a_model_of_modelopt_up_to_0_29_is_estimated_as_quantized(
    server: HubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its weights are described outside of config.json; one without the description is dense."""
    config = json.dumps(PUBLISHED["Llama-3.2-1B"]["config"]).encode()
    record = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    files = {"config.json": config, "hf_quant_config.json": json.dumps(record).encode()}
    server.add("org/fp8", files)
    server.add("org/dense", {"config.json": config})
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    remote, dense = answer(capsys, "org/fp8"), answer(capsys, "org/dense")
    assert remote["bytes"]["weights"] == answer(capsys, str(tmp_path))["bytes"]["weights"]
    assert 2 * remote["bytes"]["weights"] == pytest.approx(dense["bytes"]["weights"], rel=0.02)


def test_a_bad_config_of_the_hub_is_named(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.add("org/bad", {"config.json": b'{"model_type": "rwkv"}'})
    server.add("org/huge", {"config.json": b" " * (2 << 20)})
    assert call("org/bad") == ExitCode.MODEL
    assert "org/bad: config.json: model_type 'rwkv'" in capsys.readouterr().err
    assert call("org/huge") == ExitCode.MODEL


@pytest.mark.parametrize(
    ("limit", "contexts"),
    [(1024, [1024]), (40960, [2048, 8192, 32768, 40960]), (1 << 18, [2048, 8192, 32768, 131072])],
)
def test_a_table_has_no_context_beyond_the_models_limit(
    limit: int, contexts: list[int], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**PUBLISHED["Llama-3.1-8B"]["config"], "max_position_embeddings": limit}
    (Path(llama) / "config.json").write_text(json.dumps(config))
    table = answer(capsys, llama, "--table", "--gpu", "24GiB", "--ctx", "1k")["table"]
    assert sorted({row["context"] for row in table} - {1024}) == [count for count in contexts if count != 1024]
    least = min(row["total_bytes"] for row in table)
    for free, fits in ((least, True), (least - 1, False)):
        table = answer(capsys, llama, "--table", "--gpu", f"{free}B", "--ctx", "1k")["table"]
        assert any(row["fits"] for row in table) is fits


def test_table_is_schemes_by_contexts(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, llama, "--table", "--gpu", "8GiB", "--ctx", "4k")["table"]
    assert [row["context"] for row in found[:5]] == [2048, 4096, 8192, 32768, 131072]
    assert len(found) == 25
    assert {(row["scheme"], row["context"]) for row in found if row["fits"]} == {
        ("int4-g128", 2048),
        ("int4-g128", 4096),
        ("int4-g128", 8192),
        ("int3-g128", 2048),
        ("int3-g128", 4096),
        ("int3-g128", 8192),
        ("int2-g128", 2048),
        ("int2-g128", 4096),
        ("int2-g128", 8192),
    }
    assert call(llama, "--table", "--gpu", "8GiB") == ExitCode.OK
    captured = capsys.readouterr()
    dense = [cell.strip() for cell in captured.out.splitlines()[2].split("|")]
    assert dense[1] == "bfloat16" and all(cell.endswith(" GiB !") for cell in dense[2:-1])
    assert "8.00 GiB free" in captured.err
    largest = max(row["total_bytes"] for row in found)
    assert call(llama, "--table", "--gpu", f"{largest}B", "--ctx", "4k") == ExitCode.OK
    captured = capsys.readouterr()
    assert not captured.err and "!" not in captured.out, "a mark without a cell that has it is not explained"


def test_fit_prints_commands_that_lead_there(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    llama = str(Path(llama).rename(Path(llama).with_name("a llama")))
    found = answer(capsys, llama, "--fit", "--gpu", "9GiB")
    name = f"{Path(llama).name}-int4-g128"
    assert found["fits"] and found["scheme"] == "int4-g128"
    assert found["commands"] == [
        f"mycli quantize {shlex.quote(llama)} --bits 4 --group 128 -o {shlex.quote(name)}",
        f"mycli chat {shlex.quote(name)} --ctx {found['context']}",
    ]
    assert call(llama, "--fit", "--gpu", "9GiB") == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[-2:] == found["commands"]
    asked = answer(capsys, llama, "--fit", "--gpu", "24GiB", "--quant", "int8-channel", "--ctx", "16k")
    assert shlex.split(found["commands"][0])[2] == llama
    assert "--bits 8 --group channel" in asked["commands"][0] and asked["context"] == 16384
    for head, scheme in (("int8", "int4-g64+int8-g64"), ("int4", "int4-g64")):
        small = answer(capsys, llama, "--quant", "int4-g64", "--head", head, "--fit", "--gpu", "8GiB")
        assert f"--bits 4 --group 64 --head {head} -o" in small["commands"][0] and small["scheme"] == scheme


def test_a_fit_that_fails_names_what_the_smallest_scheme_needs(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    smallest = answer(capsys, llama, "--quant", "int2-g128", "--ctx", "256", "--gpu", "24GiB")["bytes"]["total"]
    assert call(llama, "--fit", "--gpu", "2GiB") == ExitCode.RESOURCES
    error = capsys.readouterr().err
    assert f"into 2.00 GiB with 3% to spare: int2-g128 with 256 tokens needs {human_bytes(smallest)}\n" in error
    assert f"free {human_bytes(smallest - int((2 << 30) / 1.03))} more" in error
    assert call(llama, "--fit", "--gpu", "2GiB", "--quant", "int4-g64", "--ctx", "8k") == ExitCode.RESOURCES
    assert "spare: int4-g64 with 8192 tokens needs" in capsys.readouterr().err


def test_what_fits_leaves_the_margin_that_verify_tolerates(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, llama, "--fit", "--gpu", "9GiB")
    assert found["bytes"]["total"] * 1.03 <= 9 << 30
    wider = answer(capsys, llama, "--fit", "--gpu", "9GiB", "--tol", "20%")
    assert wider["bytes"]["total"] * 1.2 <= 9 << 30 and wider["context"] < found["context"]


def test_a_total_that_is_off_fails_whatever_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """The total never matches to the byte, because it includes Python and torch."""
    arguments = ("pico", "--verify", "--device", "cpu", "--ctx", "512", "--tol", "0.0000001%")
    assert call(*arguments) == ExitCode.GATE
    assert "total" in capsys.readouterr().err


@pytest.mark.parametrize("ranks, possible", [(2, True), (3, False)])
def test_tensor_parallel(llama: str, capsys: pytest.CaptureFixture[str], ranks: int, possible: bool) -> None:
    found = answer(capsys, llama, "--quant", "int4-g128", "--tp", str(ranks))["tensor_parallel"]
    assert (found["ranks"], found["possible"]) == (ranks, possible)
    assert call(llama, "--quant", "int4-g128", "--tp", str(ranks)) == ExitCode.OK
    text = capsys.readouterr().out
    assert ("per GPU" in text) is possible
    assert ("32 heads cannot be divided by 3" in text) is not possible
    assert f"over {ranks} GPUs (vLLM, SGLang with Marlin): {'yes' if possible else 'no'}" in text


def test_a_model_that_fits_only_in_parts_needs_a_split_that_is_possible(capsys: pytest.CaptureFixture[str]) -> None:
    """Two GPUs each hold their part, to the byte; the heads cannot be divided among three."""
    parts = {ranks: answer(capsys, "pico", "--gpu", "24GiB", "--tp", str(ranks)) for ranks in (2, 3)}
    each = {ranks: found["tensor_parallel"]["bytes_each"] for ranks, found in parts.items()}
    total = parts[2]["bytes"]["total"]
    assert max(each.values()) < total - 1
    for memory, options, code in (
        (total, (), ExitCode.OK),
        (total - 1, (), ExitCode.RESOURCES),
        (each[2], ("--tp", "2"), ExitCode.OK),
        (each[2] - 1, ("--tp", "2"), ExitCode.RESOURCES),
        (total, ("--tp", "3"), ExitCode.OK),
        (total - 1, ("--tp", "3"), ExitCode.RESOURCES),
    ):
        assert call("pico", "--gpu", f"{memory}B", *options) == code, (memory, options)


def test_tensor_parallel_splits_a_draft_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The draft has two heads, one of them for keys and values, and 2.75 MiB of weights and cache."""
    plain, drafted = (
        answer(capsys, "pico", "--device", "cpu", "--tp", "2", *draft)["tensor_parallel"]
        for draft in ((), ("--draft", "pico-draft"))
    )
    assert drafted["possible"] and 1 << 20 < drafted["bytes_each"] - plain["bytes_each"] < 3 << 20
    found = answer(capsys, "pico", "--draft", "pico-draft", "--tp", "4")["tensor_parallel"]
    assert found["obstacles"] == ["draft: num_attention_heads: 2 heads cannot be divided by 4"]


def test_verify_compares_with_a_real_process() -> None:
    """The example of the help page; `test_examples` runs the others."""
    # For a model this small, Python and torch take most of the memory, and they differ by some MiB between machines.
    (example,) = (line for line in EXAMPLES if "--verify" in line)
    command = [sys.executable, "-m", "mycli.cli", *shlex.split(example)[1:], "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    errors = {part["part"]: part["error"] for part in json.loads(done.stdout)["parts"]}
    assert all(abs(errors[part]) <= 0.03 for part in ("weights", "embeddings and head", "cache"))
    assert abs(errors["total"]) <= 0.1


def test_verify_fails_its_gate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from mycli.runtime.diagnostics import memory_check as footprint

    monkeypatch.setattr(footprint, "cache_positions", lambda context: context + 512)
    assert call("pico", "--verify", "--device", "cpu", "--ctx", "1k", "--json") == ExitCode.GATE
    answer = json.loads(capsys.readouterr().out)
    assert answer["parts"] and "cache +50.0%" in answer["error"]["message"] and answer["error"]["exit_code"] == 6


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--ctx", "1M"], ExitCode.USAGE),
        (["--quant", "int5-g128"], ExitCode.USAGE),
        (["--quant", "int4-g100"], ExitCode.USAGE),
        (["--device", "tpu"], ExitCode.USAGE),
        (["--device", "cuda"], ExitCode.RESOURCES),
        (["--batch", "0"], ExitCode.USAGE),
        (["--tol", "much"], ExitCode.USAGE),
        (["--tol", "nan%"], ExitCode.USAGE),
        (["--dtype", "fp8"], ExitCode.USAGE),
        (["--head", "int8"], ExitCode.USAGE),
        (["--quant", "int4", "--head", "int3"], ExitCode.USAGE),
        (["--quant", "int4", "--head", "int8"], ExitCode.USAGE),  # tied embeddings
        (["--fit", "--table"], ExitCode.USAGE),
        (["--table", "--verify"], ExitCode.USAGE),
        (["--verify", "--gpu", "1GiB"], ExitCode.USAGE),
        (["--verify", "--quant", "int4"], ExitCode.USAGE),
        (["--verify", "--draft", "pico-draft"], ExitCode.USAGE),
        (["--draft", "/nowhere"], ExitCode.NOT_FOUND),
        (["--draft", "mtp"], ExitCode.MODEL),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.name,
)
def test_what_cannot_be_answered(arguments: list[str], code: ExitCode, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pico", *arguments) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err


def test_where_one_gpu_ends_is_said_with_the_command_for_more(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command for several GPUs is suggested for the requested or the longest context, split as needed."""
    more = answer(capsys, llama, "--gpu", "24GiB")["more_gpus"]
    assert more["context"] == 131072 and more["gpus"] == 2
    assert more["command"] == f"mycli serve {llama} --engine vllm --tensor-parallel-size 2 --ctx 131072"
    assert call(llama, "--gpu", "12GiB", "--ctx", "4k") == ExitCode.RESOURCES
    said = capsys.readouterr().out
    assert "beyond one GPU       4096 tokens need 2 such GPUs: mycli serve" in said
    assert call(llama, "--gpu", "2GiB") == ExitCode.RESOURCES
    assert (
        "8192 tokens need more than 8 such GPUs: also use an engine that splits the sequence" in capsys.readouterr().out
    )
    assert "more_gpus" not in answer(capsys, llama, "--gpu", "80GiB")
    assert "more_gpus" not in answer(capsys, "pico", "--gpu", "24GiB") and "more_gpus" not in answer(capsys, "pico")


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), ("100%", 1), ("1", 1), ("0.03", 0.03)])
def test_a_tolerance_is_a_share_or_a_percentage(text: str, share: float) -> None:
    assert _parse_share(text) == pytest.approx(share)
    for wrong in ("0", "0%", "-1%", "101%", "1.01", "x"):
        with pytest.raises(UsageError, match="not a percentage"):
            _parse_share(wrong)
