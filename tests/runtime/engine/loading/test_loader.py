"""Test that memory is planned before it is allocated."""

import io
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from mycli.cli.main import main
from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine import model_runner
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.loading import loader as load
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import Declined, ExitCode, ModelError, ResourceError, UsageError
from mycli.runtime.kernels import registry
from mycli.runtime.kernels.triton.product.kernel import TritonKernel
from mycli.runtime.layers import transformer
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.resident import slot_bytes
from mycli.runtime.quantization.packed_weight import dequantize
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.sampling.sampler import DeviceSampling
from mycli.runtime.utils.json_fields import Fields
from tests.support.families import make
from tests.support.models import CPU
from tests.support.packed_folder import write_packed
from tests.support.paths import PICO
from tests.support.random_tensors import weight

FOLDER = open_model_folder(PICO)


def needed(context: int, batch: int = 1) -> int:
    return estimate(MemoryPlan(FOLDER.config, context=context, batch=batch, dtype="float32")).needed


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    amount: int = request.param
    monkeypatch.setattr(load, "free_memory", lambda device: amount)
    return amount


@pytest.mark.parametrize("free, context", [(1 << 40, 2048), (needed(512), 512)], indirect=["free"])
def test_without_a_wish_the_models_context_or_what_fits(free: int, context: int) -> None:
    assert load.plan_memory(FOLDER, CPU, EngineConfig()).context == context


@pytest.mark.parametrize(
    "free, rest, context", [(1 << 40, 512, 512), (needed(512), 1024, 512)], indirect=["free"], ids=["limit", "free"]
)
def test_a_memory_limit_counts_the_whole_process(free: int, rest: int, context: int) -> None:
    """The memory of Python and torch is in use already, so it is no part of what is free."""
    runtime = estimate(MemoryPlan(FOLDER.config)).runtime
    assert runtime > 0
    plan = load.plan_memory(FOLDER, CPU, EngineConfig(memory_limit=needed(rest) + runtime))
    assert plan.context == context


@pytest.mark.parametrize("free", [needed(1024)], indirect=True)
def test_a_wish_is_kept_or_refused(free: int) -> None:
    assert load.plan_memory(FOLDER, CPU, EngineConfig(context=1024)).context == 1024
    with pytest.raises(ResourceError, match=r"main memory: .* needed .* free"):
        load.plan_memory(FOLDER, CPU, EngineConfig(context=1040))
    with pytest.raises(ResourceError, match="needed"):
        load.plan_memory(FOLDER, CPU, EngineConfig(context=1024, sequences=2))


MIXTURE_FIELDS = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 960,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
MIXTURE = ModelFolder.from_config(Fields(MIXTURE_FIELDS, "a mixture"))
PLAN = MemoryPlan(MIXTURE.config, dtype="float32")
FEW = estimate(MemoryPlan(MIXTURE.config, context=1024, dtype="float32", expert_slots=2)).needed


@pytest.mark.parametrize("free", [FEW], indirect=True)
def test_of_experts_that_do_not_fit_as_many_are_kept_as_do(free: int) -> None:
    plan = load.plan_memory(MIXTURE, CPU, EngineConfig())
    assert (plan.expert_slots, plan.context) == (2, 1024)
    with pytest.raises(ResourceError, match=r"needed .* free"):
        load.plan_memory(MIXTURE, CPU, EngineConfig(context=1024, sequences=2))


@pytest.mark.parametrize("free", [1 << 40], indirect=True)
def test_experts_take_no_more_than_they_are_allowed(free: int) -> None:
    assert load.plan_memory(MIXTURE, CPU, EngineConfig()).expert_slots is None
    assert load.plan_memory(MIXTURE, CPU, EngineConfig(expert_bytes=5 * slot_bytes(PLAN))).expert_slots == 5
    with pytest.raises(UsageError, match="expert memory limit applies only"):
        load.plan_memory(FOLDER, CPU, EngineConfig(expert_bytes=1 << 30))


@pytest.mark.parametrize("free", [1 << 20], indirect=True)
def test_no_memory_at_all_is_an_error_not_a_tiny_context(free: int) -> None:
    with pytest.raises(ResourceError):
        load.plan_memory(FOLDER, CPU, EngineConfig())


@pytest.mark.parametrize("fault", ["F10-load"])
@pytest.mark.parametrize("free", [needed(1024)], indirect=True)
def test_memory_that_runs_out_all_the_same_is_told_with_numbers(
    free: int, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The out-of-memory error reports needed and free bytes and a remedy, with exit code 5."""

    def full(*_: object) -> None:
        monkeypatch.setattr(load, "free_memory", lambda device: needed(512))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Transformer, "load", full)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as stop:
        main(["run", "pico", "Hi", "--ctx", "1024", "--dtype", "fp32"])
    assert stop.value.code == ExitCode.RESOURCES
    error, hint = capsys.readouterr().err.strip().splitlines()[-2:]
    assert "needed" in error and "cache of 1024 tokens" in error and "free" in error
    assert hint == "hint: use --ctx 512"
    monkeypatch.setattr(load, "free_memory", lambda device: 1 << 40)
    assert "but memory ran out" in load.out_of_memory(FOLDER, CPU, EngineConfig(context=1024)).message


def test_of_several_damaged_tensors_the_first_is_named(tmp_path: Path) -> None:
    """The error does not depend on which of the concurrently loading layers finishes first."""
    tensors = load_file(PICO / "model.safetensors")
    for layer in (5, 2, 3):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(PICO / "config.json", tmp_path)
    for _ in range(5):
        with pytest.raises(ModelError, match=r"layers\.2\.mlp\.down_proj\.weight: 1 of"):
            load.load_model(open_model_folder(tmp_path), CPU)


def test_an_old_gpu_has_room_counted_for_unpacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader reports why weights are unpacked; if they do not fit, the model is refused."""
    reason = "kernels for packed weights need compute capability 8.0, this device has 7.5"
    old = replace(CPU, unpacked=reason)
    packings = {linear.name: Packing(4, 128) for linear in FOLDER.config.linears()}
    packed = cast(ModelFolder, SimpleNamespace(config=FOLDER.config, packings=packings, unmerged_values=0))
    plans = [load._requested(packed, one, EngineConfig(), None) for one in (CPU, old)]
    assert plans[1] == load._requested(FOLDER, CPU, EngineConfig(), None), "as a dense model"
    assert estimate(plans[1]).weights > 2 * estimate(plans[0]).weights
    monkeypatch.setattr(
        load, "free_memory", lambda device: (estimate(plans[0]).needed + estimate(plans[1]).needed) // 2
    )
    load.plan_memory(packed, CPU, EngineConfig(context=plans[0].context))
    with pytest.raises(ResourceError, match="needed"):
        load.plan_memory(packed, old, EngineConfig(context=plans[0].context))


def test_an_old_gpu_unpacks_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    kernel = registry.select_kernel(Packing(4, 128), 64, 128, device, torch.float16)
    assert kernel.name == "unpacked"
    stored = weight(Packing(4, 64), 32, 128, 0)
    product, x = kernel.prepare(stored, torch.float16), torch.randn(3, 128).half()
    expected = x.double() @ dequantize(stored).double().t()
    assert float((product(x).double() - expected).norm() / expected.norm()) < 2e-3
    assert product.nbytes == 32 * 128 * 2 and product.dequantize().dtype == torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(TritonKernel, "decline", lambda *_: Declined("untested-on-amd"))
    chosen, declined = registry.find_kernel(Packing(4, 128), 64, 128, device, torch.float16)
    assert chosen is not None and chosen.name == "dequantize"
    assert declined["triton"] == Declined("untested-on-amd"), "why is not forgotten because another accepts"


def test_why_weights_are_decoded_is_told_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    packings = dict.fromkeys((linear.name for linear in FOLDER.config.linears()), Packing(4, 128))
    packed = cast(ModelFolder, SimpleNamespace(config=FOLDER.config, packings=packings))
    placement = replace(CPU, device=torch.device("cuda", 0), dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(TritonKernel, "decline", lambda *_: Declined("untested-on-amd"))
    values = {"packing": "int4-g128", "kernel": "triton", "reason": Declined("untested-on-amd")}
    assert load._unpacked_every_pass(packed, placement) == [Declined("weights-decoded-every-pass", values)]


def test_threads_that_load_layers_are_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is per thread, and kernels are first launched while layers load."""
    current, log = threading.local(), dict[str, object]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))

    def note(self: object, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            log[threading.current_thread().name] = getattr(current, "device", "device 0")

    for kind in (Block, RMSNorm, Linear):
        monkeypatch.setattr(kind, "load", note)
    monkeypatch.setattr(transformer.formats, "read_dense", lambda *_: torch.zeros(1).to("meta"))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    device = torch.device("cuda", 1)
    Transformer(FOLDER.config).load(CheckpointWeights(cast(Checkpoint, None), {}, device, torch.float16))
    assert log and set(log.values()) == {device}


def test_a_pass_is_launched_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server runs passes on another thread than the one that loaded the model."""
    log: list[tuple[str, object]] = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda one: log.append((threading.current_thread().name, one)))

    def no_batch(*_: object, **__: object) -> None:
        raise LookupError  # as far as testable without a GPU

    monkeypatch.setattr(model_runner, "PassInput", no_batch)
    runner = ModelRunner(cast(Transformer, SimpleNamespace(device=device)))
    monkeypatch.setattr(runner, "rope", lambda positions: None)
    cache = cast(KVCache, SimpleNamespace(block_size=8))

    def passes() -> None:
        with pytest.raises(LookupError):
            runner.run([Chunk([1], 0, (0,), 1)], cache)
        with pytest.raises(LookupError):
            runner.tokens([Chunk([1], 0, (0,), 1)], cast(DeviceSampling, "choice"), cache, 4, [frozenset()])

    thread = threading.Thread(target=passes, name="engine")
    thread.start()
    thread.join()
    assert log == [("engine", device)] * 2


def test_suppressed_ids_of_rows_that_pad_the_head_are_dropped(tmp_path: Path) -> None:
    make(tmp_path, "llama", {"vocab_size": 4160})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, tmp_path / file)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [9, 4100]}')
    assert load.LoadedModel.load(open_model_folder(tmp_path), CPU).defaults.suppressed == (9,)


def test_on_a_gpu_queries_keys_and_values_of_two_widths_are_one_product(tmp_path: Path) -> None:
    """The fused pass takes one product; the CPU multiplies each packing as stored."""
    folder = open_model_folder(write_packed(tmp_path / "m", MIXTURE_FIELDS, {"v_proj": 8, "": 4}))
    count: dict[str, int] = {}
    for device in ("cpu", "meta"):
        model = load.load_model(folder, Placement(torch.device(device), torch.bfloat16)).model
        count[device] = len(next(model.layers()).products["qkv"].matmuls)
    assert count == {"cpu": 2, "meta": 1}
