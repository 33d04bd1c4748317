"""Test a GGUF file of solved blocks: other readers, interruption, record, and verification with planted faults."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from mycli.quant import readers
from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.ggml import linear_solver
from mycli.quant.ggml.pipeline import quantize_gguf
from mycli.quant.ggml.plan import plan_gguf
from mycli.quant.ggml.recipe import GgufRecipe
from mycli.quant.ggml.sensitivity import KindChoice, choose_kinds, spend
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.planning.target import OutputTarget
from mycli.quant.progress import silent
from mycli.quant.verification import Verified, tokens_to_score, verify_reading
from mycli.runtime.checkpoint.gguf.files import GgufFiles
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.integrity import files_to_verify, verify_files
from mycli.runtime.hub.resolve import Source
from tests.support.families import CASES, make
from tests.support.gguf_exports import make_exported
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.quantizing import UNMEASURED

RECIPE = GgufRecipe("q4_k_m", samples=8, seq=64)
NAME = "blk.1.attn_q.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("source") / "small"
    changes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    make(
        folder,
        "llama",
        {**changes, "head_dim": 64, "vocab_size": 4096, "tie_word_embeddings": False, "num_hidden_layers": 2},
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, folder / file)
    return Source("small", folder)


@pytest.fixture(scope="module")
def made(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("made") / "small.gguf"
    quantize_gguf(plan_gguf(source, RECIPE, UNMEASURED), OutputTarget(target), CPU)
    return target


def test_the_file_and_its_record(source: Source, made: Path) -> None:
    work = plan_gguf(source, RECIPE, UNMEASURED)
    tensors = gguf.GGUFReader(made).tensors
    kinds = {tensor.name: tensor.tensor_type.name for tensor in tensors}
    assert kinds[NAME] == "Q4_K" and kinds["output.weight"] == "Q6_K" and kinds["token_embd.weight"] == "Q4_K"
    blocks = [tensor for tensor in tensors if kinds[tensor.name] in ("Q4_K", "Q6_K")]
    bits = 8 * sum(tensor.n_bytes for tensor in blocks) / sum(tensor.n_elements for tensor in blocks)
    assert work.size.quantized_bits_per_weight == pytest.approx(bits)
    assert work.size.bits_per_weight == pytest.approx(
        8 * work.layout.nbytes / sum(tensor.n_elements for tensor in tensors)
    )
    assert work.layout.nbytes == made.stat().st_size
    record = json.loads(made.with_suffix(".mycli.json").read_text())
    assert record["recipe"]["mix"] == "q4_k_m" and record["size"]["bytes"] == work.size.bytes
    assert all(layer["output_error"] < layer["rounding_output_error"] for layer in record["layers"] if layer["refit"])
    solved = [layer for layer in record["layers"] if layer["output_error"] is not None]
    assert solved and all(layer["damping"] > 0 and layer["fallback"] is None for layer in solved)
    stored = Source("small", made)
    assert [file.state for file in verify_files(stored, files_to_verify(stored), lambda count: None)] == ["ok"]
    assert sorted(path.name for path in made.parent.iterdir()) == ["small.gguf", "small.mycli.json"]


def test_windows_are_bounded_by_the_context_and_by_the_recipe(source: Source, tmp_path: Path) -> None:
    context = open_model_folder(source.folder).config.max_context
    assert plan_gguf(source, GgufRecipe("q4_k_m"), UNMEASURED).seq == context
    long = shutil.copytree(source.folder, tmp_path / "long")
    raw = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 8192 * context}))
    needs = [plan_gguf(Source("small", folder), RECIPE, PlanSettings("full")).need for folder in (source.folder, long)]
    assert needs[0] == needs[1], "memory follows the windows, not the context"


def test_an_interrupted_run_gives_the_same_bytes(
    source: Source, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve, target, solved = linear_solver.BlockTypeSolver.solve, tmp_path / "again.gguf", []

    def failing(self: linear_solver.BlockTypeSolver, *arguments: object) -> object:
        solved.append(arguments)
        if len(solved) == 6:  # four products a block
            raise KeyboardInterrupt
        return solve(self, *arguments)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(linear_solver.BlockTypeSolver, "solve", failing)
    with pytest.raises(KeyboardInterrupt):
        quantize_gguf(plan_gguf(source, RECIPE, UNMEASURED), OutputTarget(target), CPU)
    assert not target.exists()
    quantize_gguf(plan_gguf(source, RECIPE, UNMEASURED), OutputTarget(target), CPU)
    assert target.read_bytes() == made.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        quantize_gguf(plan_gguf(source, RECIPE, UNMEASURED), OutputTarget(target), CPU)


@pytest.mark.slow
def test_a_table_of_per_layer_inputs_is_rounded(tmp_path: Path) -> None:
    """Its rows are the only ones that the file repeats, for tokens of images and sounds."""
    make_exported(tmp_path / "hf", "gemma4-ple-shared-kv-double", intermediate_size=96)
    original = open_model_folder(tmp_path / "hf")
    target, table = tmp_path / "small.gguf", f"{original.config.per_layer_table().name}.weight"
    quantize_gguf(plan_gguf(Source("hf", tmp_path / "hf"), RECIPE, UNMEASURED), OutputTarget(target), CPU)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors}
    assert kinds["per_layer_token_embd.weight"] == "Q8_0"  # 192 values in a row: no super-blocks
    stored, values = (folder.checkpoint().read(table).float() for folder in (open_model_folder(target), original))
    assert len(stored) == original.config.vocab_size > len(values)
    torch.testing.assert_close(stored[: len(values)], values, rtol=0, atol=float(values.abs().max()) / 127)
    assert torch.equal(stored[len(values) :], stored[:1].expand(len(stored) - len(values), -1))
    record = json.loads(target.with_suffix(".mycli.json").read_text())
    assert any(layer["name"] == table.removesuffix(".weight") for layer in record["layers"])


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"target_size": 2_000_000}, marks=pytest.mark.slow)], ids=["mix", "size"]
)
def test_halves_of_latent_attention_stay_floats(sizes: dict[str, int], tmp_path: Path) -> None:
    make_exported(tmp_path / "hf", "youtu-tied", hidden_size=256, intermediate_size=256)
    target, source = tmp_path / "small.gguf", Source("hf", tmp_path / "hf")
    work = plan_gguf(source, replace(RECIPE, **sizes), UNMEASURED)
    if sizes:
        work = plan_gguf(source, choose_kinds(work, target, CPU), UNMEASURED)
    quantize_gguf(work, OutputTarget(target), CPU)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors}
    assert all(kinds[f"blk.0.{part}.weight"] == "F32" for part in ("attn_k_b", "attn_v_b"))
    stored, original = (open_model_folder(path).checkpoint() for path in (target, source.folder))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert torch.equal(stored.read(name).float(), original.read(name).float())


def test_a_family_that_needs_experts_is_refused_without_them(tmp_path: Path) -> None:
    make_exported(tmp_path / "hf", "llama4-without-experts-tied")
    with pytest.raises(ModelError, match="config.json: .* experts"):
        plan_gguf(Source("hf", tmp_path / "hf"), RECIPE, UNMEASURED)


def _verify(reader: str, model: Path, reference: Path | None = None) -> Verified:
    folder = open_model_folder(model)
    tokens, module = tokens_to_score(folder.config.vocab_size), readers.load(reader)
    original = folder if reference is None else open_model_folder(reference)
    return verify_reading(
        module.read(readers.Task(model, tokens, None)), module.WEIGHT_NAMES, original, folder, tokens, CPU, silent
    )


def test_gguf_py_reads_the_same_weights(made: Path) -> None:
    verified = _verify("gguf-py", made)
    assert not verified.faults and verified.weights == len(gguf.GGUFReader(made).tensors) and verified.logits is None


def _flip_scale(data: bytearray, columns: int, width: int) -> None:
    data[0] ^= 1


def _swap_rows(data: bytearray, columns: int, width: int) -> None:
    data[:width], data[width : 2 * width] = data[width : 2 * width], data[:width]


@pytest.mark.parametrize(
    ("plant", "problem"), [(_flip_scale, "other values in 1 of"), (_swap_rows, "another order in 2")]
)
def test_a_planted_fault_is_named(made: Path, tmp_path: Path, plant: object, problem: str) -> None:
    damaged = tmp_path / "damaged.gguf"
    opened = GgufFiles.open(made)
    entry = opened.header.tensors[NAME]
    data = bytearray(made.read_bytes())
    part = data[entry.offset : entry.offset + entry.nbytes]
    plant(part, entry.shape[1], entry.nbytes // entry.shape[0])  # type: ignore[operator]  # one of the two above
    data[entry.offset : entry.offset + entry.nbytes] = part
    damaged.write_bytes(data)
    verified = _verify("gguf-py", damaged, made)
    assert [fault.weight for fault in verified.faults] == [NAME] and problem in verified.faults[0].problem


def test_a_transposed_expert_is_named(tmp_path: Path) -> None:
    model_type, changes = CASES["qwen3_moe-8top2"]
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "vocab_size": 4096, "norm_topk_prob": True}
    make(tmp_path / "hf", model_type, {**changes, **sizes})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, tmp_path / "hf" / file)
    original = open_model_folder(tmp_path / "hf")
    module, _ = find_export_target("gguf:f32")
    request = ExportRequest(Source("hf", tmp_path / "hf"), original, tmp_path / "a.gguf", "f32", requantize=True)
    file = module.export(request, silent).path
    assert not _verify("gguf-py", file, tmp_path / "hf").faults
    name = "blk.0.ffn_up_exps.weight"
    entry = GgufFiles.open(file).header.tensors[name]
    count, rows, columns = entry.shape
    assert rows == columns == 32
    data = bytearray(file.read_bytes())
    start = entry.offset + entry.nbytes // count
    expert = torch.frombuffer(data[start : start + 4 * rows * columns], dtype=torch.float32).view(rows, columns)
    data[start : start + 4 * rows * columns] = expert.T.contiguous().numpy().tobytes()
    file.write_bytes(data)
    fault = _verify("gguf-py", file, tmp_path / "hf").faults[0]
    assert fault.weight == name and fault.row == rows


@pytest.mark.slow
def test_transformers_reads_a_folder() -> None:
    verified = _verify("transformers", PICO)
    assert not verified.faults and not verified.logits_fail and verified.logits is not None


@pytest.mark.parametrize("reader", ["gguf-py", "llama.cpp"])
def test_a_missing_program_says_how_to_install_it(reader: str, made: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as error:
        readers.load(reader).read(readers.Task(made, (1,), tmp_path / "none"))
    assert error.value.hint


def test_rows_that_fill_no_super_block_have_a_choice_of_types(tmp_path: Path) -> None:
    """The hidden size of Qwen2.5-0.5B is 896: its file of a given size must not be all Q8_0."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    make(tmp_path / "hf", "llama", {**sizes, "head_dim": 24, "vocab_size": 4096, "num_hidden_layers": 2})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, tmp_path / "hf" / file)
    source, smallest = Source("small", tmp_path / "hf"), {}
    for mix in ("iq2_xxs", "q8_0"):
        smallest[mix] = plan_gguf(source, GgufRecipe(mix), UNMEASURED).layout.nbytes
    target = sum(smallest.values()) // 2
    work = plan_gguf(source, replace(RECIPE, target_size=target), UNMEASURED)
    recipe = choose_kinds(work, tmp_path / "small.gguf", CPU)
    kinds = dict(recipe.kinds)
    narrow = {kind for name, kind in kinds.items() if "down_proj" not in name}
    assert narrow <= {"IQ4_NL", "Q5_0", "Q5_1", "Q8_0"} and "IQ4_NL" in narrow
    assert plan_gguf(source, recipe, UNMEASURED).layout.nbytes <= target


@pytest.mark.slow
def test_a_file_of_experts_fits_its_size(tmp_path: Path) -> None:
    """A tensor holds one linear of all experts, so all experts get one type for it."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 64, "vocab_size": 4096}
    make(tmp_path / "hf", "mixtral", sizes)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, tmp_path / "hf" / file)
    source, bounds = Source("experts", tmp_path / "hf"), []
    for mix in ("iq2_xxs", "q8_0"):
        bounds.append(plan_gguf(source, GgufRecipe(mix), UNMEASURED).layout.nbytes)
    work = plan_gguf(source, replace(RECIPE, target_size=sum(bounds) // 2), UNMEASURED)
    recipe = choose_kinds(work, tmp_path / "out.gguf", CPU)
    kinds = dict(recipe.kinds)
    assert len(set(kinds.values())) > 1
    for layer in range(work.config.layers):
        experts = f"model.layers.{layer}.block_sparse_moe.experts"
        for linear in ("w1", "w2", "w3"):
            assert len({kinds[f"{experts}.{expert}.{linear}.weight"] for expert in range(4)}) == 1
    planned = plan_gguf(source, recipe, UNMEASURED)
    assert planned.layout.nbytes <= sum(bounds) // 2


def test_the_budget_goes_where_it_gains_most() -> None:
    choices = [
        KindChoice(("a",), {"Q2_K": 10, "Q4_K": 20}, {"Q2_K": 1.0, "Q4_K": 0.1}),
        KindChoice(("b",), {"Q2_K": 10, "Q4_K": 20}, {"Q2_K": 5.0, "Q4_K": 0.5}),
    ]
    assert spend(choices, 0) == ["Q2_K", "Q2_K"] and spend(choices, 19) == ["Q2_K", "Q4_K"]
    assert spend(choices, 20) == ["Q4_K", "Q4_K"]
    with pytest.raises(UsageError, match="3 bytes more"):
        spend(choices, -3)
