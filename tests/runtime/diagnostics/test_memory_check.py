"""Test the memory estimate against what a real process allocates, on pico."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mycli.runtime.checkpoint.formats.compressed_tensors import write_quantization
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement, torch_dtype
from mycli.runtime.diagnostics.memory_check import MemoryPart, check_parts, measure_memory
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import Declined, ExitCode, GateError
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.models.config import KvDtype
from mycli.runtime.quantization.packed_weight import pack
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import Dtype, PromptCopy
from tests.support.families import CASES, make
from tests.support.grids import chosen
from tests.support.models import CPU
from tests.support.paths import PICO

FOLDER = PICO
EXACT = ("weights", "embeddings and head", "cache")


def plan(**changes: object) -> MemoryPlan:
    opened = open_model_folder(FOLDER)
    config, packings = opened.config, opened.packings
    return replace(MemoryPlan(config, packings, context=1024), **changes)  # type: ignore[arg-type]  # names of Plan's fields


MEASURED = [
    ("bfloat16", 1, "auto"),
    ("float32", 2, "auto"),
    ("bfloat16", 2, "int8"),
    ("float32", 1, "bf16"),
    ("bfloat16", 1, "int4"),
]


@pytest.mark.parametrize("dtype, batch, kv", chosen(MEASURED, MEASURED[1:3]))
def test_weights_and_cache_are_what_was_predicted(dtype: Dtype, batch: int, kv: KvDtype) -> None:
    placement = Placement(torch.device("cpu"), torch_dtype(dtype), kv=kv)
    parts = measure_memory(open_model_folder(FOLDER), plan(dtype=dtype, batch=batch, kv=kv), placement)
    assert [part.name for part in parts] == ["runtime", *EXACT, "workspace", "total"]
    for part in parts:
        if part.name in EXACT:
            assert abs(part.error) <= 0.001, part
    assert parts[0].actual > 0  # the workspace may be zero in a process that can reuse freed memory
    total = parts[-1]
    assert total.actual >= sum(part.actual for part in parts[:-1]), "loading may take more"


def test_a_table_of_positions_counts_as_an_embedding(tmp_path: Path) -> None:
    make(tmp_path, *CASES["gpt2-tied"])
    opened = open_model_folder(tmp_path)
    parts = measure_memory(opened, MemoryPlan(opened.config, context=48), CPU)
    assert [part.error for part in parts if part.name in EXACT] == [0, 0, 0]


@pytest.mark.parametrize("running", [None, 1])
def test_recurrent_states_count_as_cache(running: int | None, tmp_path: Path) -> None:
    make(tmp_path, *CASES["mamba2-2-groups"])
    opened = open_model_folder(tmp_path)
    parts = measure_memory(opened, MemoryPlan(opened.config, context=48, batch=2, running=running), CPU)
    assert [part.error for part in parts if part.name in EXACT] == [0, 0, 0]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    config = replace(
        open_model_folder(FOLDER).config, tie_embeddings=False, layers=2, hidden_size=512, intermediate_size=1024
    )
    packings = PackingScheme(Packing(4, 128), Packing(8, 128)).packings(config)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in config.tensors():
        packing = packings.get(name.removesuffix(".weight"))
        if packing is None:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        codes = torch.randint(0, 1 << packing.bits, shape).to(torch.uint8)
        tensors[f"{name}_packed"] = pack(codes, packing.bits)
        tensors[f"{name}_scale"] = torch.full((shape[0], packing.groups(shape[1])), 0.01, dtype=torch.bfloat16)
        tensors[f"{name}_shape"] = torch.tensor(shape)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((FOLDER / "config.json").read_text())
    raw |= {"tie_word_embeddings": False, "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024}
    (folder / "config.json").write_text(
        json.dumps({**raw, "quantization_config": write_quantization(packings, [], "bfloat16")})
    )
    return folder


PACKED: list[tuple[Dtype, PromptCopy]] = [
    ("bfloat16", "16bit"),
    ("bfloat16", "fp8"),
    ("float32", "none"),
    ("bfloat16", "none"),
]


@pytest.mark.parametrize("dtype, copy", chosen(PACKED, PACKED[:2]))
def test_packed_weights_take_what_the_format_says(packed: Path, dtype: Dtype, copy: PromptCopy) -> None:
    opened = open_model_folder(packed)
    config, packings = opened.config, opened.packings
    assert len(packings) == 2 * 7 + 1
    placement = Placement(torch.device("cpu"), torch_dtype(dtype), prompt_copy=copy)
    parts = measure_memory(opened, MemoryPlan(config, packings, context=512, dtype=dtype, prompt_copy=copy), placement)
    check_parts([part for part in parts if part.exact], 0.001)
    linears = (math.prod(shape) for name, shape in config.tensors() if name.removesuffix(".weight") in packings)
    least = {"none": 0, "fp8": 1, "16bit": 2}[copy] * (sum(linears) - 512 * config.vocab_size)
    assert parts[1].actual > least


def test_a_shadow_is_used_for_prompts_alone(packed: Path) -> None:
    placement = Placement(torch.device("cpu"), torch.bfloat16, prompt_copy="16bit")
    model = load_model(open_model_folder(packed), placement).model
    linear = next(model.layers()).products["gate_up"]
    assert linear.prompt_copy is not None and model.head.prompt_copy is None
    copy = linear.prompt_copy.dequantize()
    x = torch.randn(65, 512).bfloat16()
    matmul = linear.matmul
    assert matmul is not None
    few, many = linear(x[:64]), linear(x)
    assert torch.equal(few, matmul(x[:64]))
    expected = x.double() @ matmul.dequantize().double().T
    assert torch.equal(copy, matmul.dequantize()) and (many - expected).norm() / expected.norm() < 5e-3
    copy.zero_()
    assert not linear(x).any() and torch.equal(linear(x[:64]), few)


def test_products_without_a_copy_for_prompts_are_reported(packed: Path) -> None:
    copied = Placement(torch.device("cpu"), torch.bfloat16, prompt_copy="fp8")
    reported: list[str | Declined] = []
    load_model(open_model_folder(packed), copied, warn=reported.append)
    assert reported == []
    load_model(open_model_folder(FOLDER), copied, warn=reported.append)
    layers = open_model_folder(FOLDER).config.layers
    assert reported == [Declined("no-prompt-copy", {"count": 4 * layers, "kind": "fp8"})], "nothing is packed there"


def test_a_wrong_prediction_is_caught() -> None:
    parts = measure_memory(
        open_model_folder(FOLDER), plan(dtype="float32"), Placement(torch.device("cpu"), torch.bfloat16)
    )
    with pytest.raises(GateError, match=r"weights -50.0%.*cache -50.0%") as caught:
        check_parts(parts, 0.03)
    assert caught.value.exit_code == ExitCode.GATE


@pytest.mark.parametrize(
    "part, passes",
    [
        (MemoryPart("cache", 100, 102, True), True),
        (MemoryPart("cache", 100, 104, True), False),
        (MemoryPart("cache", 100, 96, True), False),
        (MemoryPart("total", 100, 98, False), True),
        (MemoryPart("total", 100, 50, False), False),  # an overestimate is an error too
        (MemoryPart("total", 100, 104, False), False),
        (MemoryPart("workspace", 100, 300, False), True),  # only as part of the total
        (MemoryPart("cache", 0, 1, True), False),
        (MemoryPart("cache", 0, 0, True), True),
    ],
)
def test_gate(part: MemoryPart, passes: bool) -> None:
    if passes:
        check_parts([part], 0.03)
    else:
        with pytest.raises(GateError, match=part.name):
            check_parts([part], 0.03)
