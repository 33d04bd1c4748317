"""Test that verification with another program passes on exports, and names a scale, a row or an expert at fault."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mycli.cli.commands import verify
from mycli.quant import readers
from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.quant.readers import Reading, _transformers_child
from mycli.quant.recipe import Recipe
from mycli.quant.verification import MISSING, Fault, Verified, _difference, tokens_to_score, verify_reading
from mycli.runtime.checkpoint.gguf.files import GgufFiles
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import GateError, ModelError, NotFoundError
from mycli.runtime.hub.resolve import Source
from tests.support.command_line import Mycli
from tests.support.engines import whole
from tests.support.gguf_exports import make_exported
from tests.support.gguf_files import rewrite
from tests.support.grids import chosen
from tests.support.models import CPU, random_model
from tests.support.paths import PICO
from tests.support.quantizing import make

EXACT = dataclasses.replace(CPU, dtype=torch.float32) if dataclasses.is_dataclass(CPU) else CPU


def _export(folder: Path, name: str, variant: str) -> Path:
    make_exported(folder / "hf", name)
    module, kind = find_export_target("gguf" + variant)
    original = open_model_folder(folder / "hf")
    request = ExportRequest(Source("hf", folder / "hf"), original, folder / "a.gguf", kind, requantize=True)
    return module.export(request, silent).path


def _reading(model: Path, reader: str) -> tuple[Reading, readers.Names]:
    tokens = tokens_to_score(open_model_folder(model).config.vocab_size)
    module = readers.load(reader)
    return module.read(readers.Task(model, tokens, None)), module.WEIGHT_NAMES


def _verify(model: Path, reader: str, reference: Path | None = None) -> Verified:
    reading, names = _reading(model, reader)
    opened = open_model_folder(model)
    expected = opened if reference is None else open_model_folder(reference)
    return verify_reading(reading, names, expected, opened, tokens_to_score(opened.config.vocab_size), EXACT)


@pytest.mark.parametrize(
    ("name", "variant"),
    chosen(
        [
            ("llama-rope-llama3", ":f32"),
            ("qwen3_moe-8top2", ":f32"),
            ("gemma4-ple-shared-kv-double", ":f32"),  # its table has more rows in the file
            ("olmo3-yarn-tied", ":f16"),
            ("qwen2-biases", ":q8_0"),
            ("qwen3_5-odd-heads-tied", ":f32"),  # one of its linears has other columns in the file
        ],
        quick=[
            ("gemma4-ple-shared-kv-double", ":f32"),
            ("olmo3-yarn-tied", ":f16"),
            ("qwen2-biases", ":q8_0"),
            ("qwen3_5-odd-heads-tied", ":f32"),
        ],
    ),
)
def test_exports_pass(name: str, variant: str, tmp_path: Path) -> None:
    path = _export(tmp_path, name, variant)
    assert not _verify(path, "gguf-py").faults
    if variant == ":f32":
        assert not _verify(path, "gguf-py", tmp_path / "hf").faults


def _change(path: Path, tensor: str, change: Callable[[bytearray], None]) -> None:
    entry = GgufFiles.open(path).header.tensors[tensor]
    data = bytearray(path.read_bytes())
    part = data[entry.offset : entry.offset + entry.nbytes]
    change(part)
    data[entry.offset : entry.offset + entry.nbytes] = part
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "by_reference"),
    chosen(
        product(["llama-biases", "qwen3_moe-8top2"], [False, True]),
        quick=[("llama-biases", True), ("qwen3_moe-8top2", False)],
    ),
)
def test_tensors_that_a_converter_joined_pass(name: str, by_reference: bool, tmp_path: Path) -> None:
    """llama.cpp's converter joins them with --fuse-qkv and --fuse-gate-up-exps."""

    def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = dict(tensors)
        for first, others, joined in (
            ("attn_q.", ("attn_k.", "attn_v."), "attn_qkv."),
            ("ffn_gate_exps.", ("ffn_up_exps.",), "ffn_gate_up_exps."),
        ):
            for stored in [stored for stored in tensors if first in stored]:
                parts = [result.pop(stored.replace(first, part)) for part in (first, *others)]
                result[stored.replace(first, joined)] = torch.cat(parts, dim=1 if "exps" in first else 0)
        return result

    path = rewrite(_export(tmp_path, name, ":f32"), fused)
    verified = _verify(path, "gguf-py", tmp_path / "hf" if by_reference else None)
    assert verified.faults == () and verified.weights == len(GgufFiles.open(path).header.tensors)


def test_one_scale_of_the_wrong_sign_is_found(tmp_path: Path) -> None:
    path = _export(tmp_path, "qwen2-biases", ":q8_0")
    whole = path.with_name("whole.gguf")
    whole.write_bytes(path.read_bytes())
    width = 2 * 34  # hidden 64: two blocks of 34 bytes a row, the scale first

    def flip(data: bytearray) -> None:
        data[5 * width + 1] ^= 0x80

    _change(path, "blk.1.attn_q.weight", flip)
    (fault,) = _verify(path, "gguf-py", whole).faults
    assert (fault.weight, fault.row) == ("blk.1.attn_q.weight", 5) and "other values in 1 of 64 rows" in fault.problem


def test_two_rows_in_each_others_place_are_found(tmp_path: Path) -> None:
    path = _export(tmp_path, "llama-rope-llama3", ":f32")

    def swap(data: bytearray) -> None:
        row = 64 * 4
        data[3 * row : 4 * row], data[7 * row : 8 * row] = data[7 * row : 8 * row], data[3 * row : 4 * row]

    _change(path, "blk.0.attn_k.weight", swap)
    (fault,) = _verify(path, "gguf-py", tmp_path / "hf").faults
    assert (fault.weight, fault.row) == ("blk.0.attn_k.weight", 3) and "rows in another order in 2 of" in fault.problem


def test_an_expert_that_is_transposed_is_found(tmp_path: Path) -> None:
    """An expert of as many rows as columns has the same shape transposed, so only its values show it."""
    path = _export(tmp_path, "qwen3_moe-8top2", ":f32")
    reading, names = _reading(path, "gguf-py")
    entry = GgufFiles.open(path).header.tensors["blk.1.ffn_down_exps.weight"]
    experts, rows, columns = entry.shape

    def transpose(data: bytearray) -> None:
        size = rows * columns * 4
        expert = torch.frombuffer(data[3 * size : 4 * size], dtype=torch.float32).view(rows, columns)
        data[3 * size : 4 * size] = expert.T.contiguous().numpy().tobytes()

    _change(path, "blk.1.ffn_down_exps.weight", transpose)
    (fault,) = _verify(path, "gguf-py", tmp_path / "hf").faults
    assert (fault.weight, fault.row) == ("blk.1.ffn_down_exps.weight", 3 * rows)
    assert f"in {rows} of {experts * rows} rows" in fault.problem
    other = dataclasses.replace(reading.weights[entry.name], shape=(experts, columns, rows))
    reading = dataclasses.replace(reading, weights={**reading.weights, entry.name: other})
    original = open_model_folder(tmp_path / "hf")
    tokens = tokens_to_score(original.config.vocab_size)
    (fault,) = verify_reading(reading, names, original, open_model_folder(path), tokens, EXACT).faults
    assert fault.row is None and "transposed" in fault.problem


def test_a_joined_tensor_that_is_transposed_is_named(tmp_path: Path) -> None:
    path = _export(tmp_path, "gpt_neox-parallel", ":f32")
    reading, names = _reading(path, "gguf-py")
    whole = reading.weights["blk.0.attn_qkv.weight"]
    other = dataclasses.replace(whole, shape=whole.shape[::-1])
    reading = dataclasses.replace(reading, weights={**reading.weights, "blk.0.attn_qkv.weight": other})
    opened = open_model_folder(path)
    (fault,) = verify_reading(reading, names, opened, opened, tokens_to_score(opened.config.vocab_size), EXACT).faults
    assert fault.weight == "blk.0.attn_qkv.weight" and "transposed" in fault.problem


def test_a_weight_that_the_program_lacks_is_found(tmp_path: Path) -> None:
    path = _export(tmp_path, "olmo3-yarn-tied", ":f32")
    reading, names = _reading(path, "gguf-py")
    fewer = {name: weight for name, weight in reading.weights.items() if name != "output.weight"}
    original = open_model_folder(tmp_path / "hf")
    tokens = tokens_to_score(original.config.vocab_size)
    read = dataclasses.replace(reading, weights=fewer)
    (fault,) = verify_reading(read, names, original, open_model_folder(path), tokens, EXACT).faults
    assert fault.weight == "output.weight"  # which llama.cpp requires although the model is tied


def test_the_command_ends_with_6_and_names_the_tensor(tmp_path: Path, mycli: Mycli) -> None:
    path = _export(tmp_path, "qwen2-biases", ":q8_0")
    assert mycli("verify", str(path), "--as", "gguf-py").returncode == 0

    def flip(data: bytearray) -> None:
        data[1] ^= 0x80

    whole = path.with_name("whole.gguf")
    whole.write_bytes(path.read_bytes())
    _change(path, "blk.0.ffn_up.weight", flip)
    done = mycli("verify", str(path), "--as", "gguf-py", "--ref", str(whole), "--json")
    assert done.returncode == 6
    answer = json.loads(done.stdout)
    assert not answer["ok"] and answer["faults"] == [
        {"weight": "blk.0.ffn_up.weight", "row": 0, "problem": "other values in 1 of 88 rows, first in row 0"}
    ]


def test_a_weight_that_the_program_does_not_read_is_no_fault_of_the_file() -> None:
    """transformers draws the experts of a GPTQ folder at random; writing it again would not help."""
    fault = Fault("model.layers.0.mlp.experts.0.gate_proj.weight", None, MISSING)
    with pytest.raises(GateError) as caught:
        verify._require_equal(Verified("transformers 5.23.0", 102, (fault,), None, 0.1), "mixture")
    assert "gptqmodel" in str(caught.value.hint) and "again" not in str(caught.value.hint)


@pytest.mark.parametrize("to", ["gptq", "awq"])
def test_the_experts_of_a_mixture_are_packed_one_by_one(to: str, tmp_path: Path, mycli: Mycli) -> None:
    """The names that vLLM and GPTQModel expect; the export says that transformers does not read them."""
    make_exported(tmp_path / "m", "qwen3_moe-8top2")
    recipe = Recipe(method="rtn", bits=4, group=32)
    source = Source("m", tmp_path / "m")
    packed = make(source, tmp_path / "int4", recipe)
    done = mycli("export", str(packed.folder), "--to", to, "--requantize", "-o", str(tmp_path / "out"))
    assert done.returncode == 0 and f"transformers does not load the experts of a mixture as {to}" in done.stderr
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    parts = {"qweight", "qzeros", "scales", *(("g_idx",) if to == "gptq" else ())}
    for expert in range(8):
        for linear in ("gate_proj", "up_proj", "down_proj"):
            stem = f"model.layers.0.mlp.experts.{expert}.{linear}"
            assert {f"{stem}.{part}" for part in parts} <= names and f"{stem}.weight" not in names


def test_gptqmodel_reads_only_its_own_formats(tmp_path: Path) -> None:
    model = random_model(tmp_path / "dense", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    with pytest.raises(ModelError, match="GPTQModel reads GPTQ and AWQ folders only"):
        readers.load("gptqmodel").read(readers.Task(model, (1, 2), None))


@pytest.mark.parametrize(("reader", "title"), [("vllm", "vLLM"), ("gptqmodel", "GPTQModel")])
def test_a_reader_runs_in_the_python_that_is_named_else_in_this_one(
    reader: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    for name in ("here", "named"):
        _program(tmp_path / name, "raise SystemExit(1)")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "here"))
    for program, python in ((None, "here"), (tmp_path / "named", "named")):
        with pytest.raises(NotFoundError) as caught:
            readers.load(reader).read(readers.Task(tmp_path, (1,), program))
        assert caught.value.message == f"{title} is not installed for {tmp_path / python}"


def test_vllm_reads_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match="vLLM reads folders only"):
        readers.load("vllm").read(readers.Task(tmp_path / "a.gguf", (1,), None))


@pytest.mark.slow
def test_transformers_reads_packed_experts_and_finds_a_scale(tmp_path: Path) -> None:
    """The way back of transformers from its joined experts fails for packed ones, which the reader has to avoid.

    The folder with a changed scale is read once: it has no fault itself, and this one beside the folder it was.
    """
    make_exported(tmp_path / "mixture", "qwen3_moe-8top2")
    recipe = Recipe(method="rtn", bits=4, group=32)
    make(Source("m", tmp_path / "mixture"), tmp_path / "q", recipe)
    tensors = load_file(tmp_path / "q/model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight_scale"))
    changed = tmp_path / "changed"
    shutil.copytree(tmp_path / "q", changed)
    scales = tensors[name].clone()
    scales[9, 0] = -scales[9, 0]
    save_file({**tensors, name: scales}, changed / "model.safetensors", {"format": "pt"})
    reading, names = _reading(changed, "transformers")
    opened = open_model_folder(changed)
    tokens = tokens_to_score(opened.config.vocab_size)
    verified = verify_reading(reading, names, opened, opened, tokens, EXACT)
    assert verified.weights == 102 and not verified.faults and not verified.logits_fail
    (fault,) = verify_reading(reading, names, open_model_folder(tmp_path / "q"), opened, tokens, EXACT).faults
    assert fault.row == 9 and fault.weight.endswith("q_proj.weight")


class _Packed(torch.nn.Module):
    """A layer as GPTQModel keeps it, which unpacks to [inputs, outputs]."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(1, 3, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(1, 3))
        self.register_buffer("bias", torch.ones(3))

    def dequantize_weight(self) -> torch.Tensor:
        return torch.arange(24.0).view(8, 3)


def test_layers_of_gptqmodel_are_unpacked_with_its_own_function() -> None:
    model = torch.nn.ModuleDict({"up": _Packed(), "norm": torch.nn.LayerNorm(3, bias=False)})
    model.config, model._weight_conversions = None, []  # type: ignore[assignment]  # as transformers sets them
    stored = _transformers_child._stored(model, _transformers_child._packed(model), dequantized=False)
    assert set(stored) == {"up.weight", "up.bias", "norm.weight"}
    assert torch.equal(stored["up.weight"], torch.arange(24.0).view(8, 3).T)


def test_a_missing_package_is_named_with_its_installation(tmp_path: Path) -> None:
    task = readers.Task(tmp_path, (1,), None)
    with pytest.raises(NotFoundError) as caught:
        readers.run_child(task, sys.executable, "_gguf_child.py", ("json", "no_such_package"), "the program")
    assert caught.value.message == f"the program is not installed for {sys.executable}: it lacks no_such_package"
    assert caught.value.hint == f"{sys.executable} -m pip install no_such_package"


@pytest.mark.slow
def test_pico_passes() -> None:
    assert not _verify(PICO, "transformers").faults


_SERVER = """
import http.server, json, sys
if "--version" in sys.argv:
    sys.exit("version: 7 (x)")
options = dict(zip(sys.argv[1:-1], sys.argv[2:]))
exact = "f32" == options.get("--cache-type-k") == options.get("--cache-type-v") and options["--flash-attn"] == "off"
value = -1.0 if exact and options["-m"].endswith("dense.gguf") else -2.0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.do_POST({})
    def do_POST(self, answer=None):
        top = [{"id": token, "logprob": value} for token in range(10)]
        data = json.dumps(answer or {"completion_probabilities": [{"top_logprobs": top}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)


def test_llama_cpp_computes_logits_of_decoded_weights_and_of_the_file(tmp_path: Path) -> None:
    path = _export(tmp_path, "qwen2-biases", ":f32")
    _program(tmp_path / "llama-quantize", "import shutil, sys; shutil.copy(*sys.argv[2:4])")
    _program(tmp_path / "llama-server", _SERVER)
    reading = readers.load("llama.cpp").read(readers.Task(path, (1, 2), tmp_path))
    assert reading.program == "llama.cpp 7" and "blk.0.attn_q.weight" in reading.weights
    assert reading.logits == dict.fromkeys(range(10), -1.0)
    assert reading.rounded == dict.fromkeys(range(10), -2.0)


def test_a_rounding_program_may_differ_more(tmp_path: Path) -> None:
    path = _export(tmp_path, "qwen2-biases", ":q8_0")
    # Quantized embeddings are exact here, too.
    opened, (reading, names) = open_model_folder(path), _reading(path, "gguf-py")
    tokens = tokens_to_score(opened.config.vocab_size)
    likeliest = dict(enumerate(whole(load_model(opened, CPU).model, torch.tensor([tokens]))[0, -1].tolist()))
    for apart, fails in ((0.3, False), (0.7, True)):
        rounded = {**likeliest, 5: likeliest[5] + apart}
        read = dataclasses.replace(reading, logits=likeliest, tolerance=0.01, rounded=rounded, rounded_tolerance=0.5)
        verified = verify_reading(read, names, opened, opened, tokens, EXACT)
        assert verified.logits is not None and verified.logits < 1e-4
        assert verified.rounded == pytest.approx(apart, abs=0.01) and verified.logits_fail == fails
        if fails:
            with pytest.raises(GateError, match=r"0\.\d+ nats, more than 0\.5"):
                verify._require_equal(verified, "m")


def test_likeliest_tokens_are_compared_where_both_have_them() -> None:
    ours = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    shared = {3: float(ours[3]) + 0.25, 2: float(ours[2]) - 0.5}
    assert _difference(ours, shared, True) == (pytest.approx(0.5), 1.0)
    assert _difference(ours, {3: float(ours[3]) + 0.25, 0: 9.0}, True) == (pytest.approx(0.25), 0.5)
    assert _difference(ours, {0: 0.0, 1: 0.0}, True) == (float("inf"), 0.0)
    logits = {index: float(value) + 3 for index, value in enumerate(ours)}
    assert _difference(ours, logits, False) == (pytest.approx(0, abs=1e-6), None)
