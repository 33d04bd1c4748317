"""Memory is planned before it is taken."""

import io
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mycli.cli.main import main
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine import loader as load
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import ExitCode, ModelError, ResourceError
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.estimate import MemoryPlan, estimate
from tests.support.models import CPU
from tests.support.paths import PICO

FOLDER = ModelFolder.open(PICO)


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


@pytest.mark.parametrize("free", [needed(1024)], indirect=True)
def test_a_wish_is_kept_or_refused(free: int) -> None:
    assert load.plan_memory(FOLDER, CPU, EngineConfig(context=1024)).context == 1024
    with pytest.raises(ResourceError, match=r"main memory: .* needed .* free"):
        load.plan_memory(FOLDER, CPU, EngineConfig(context=1040))
    with pytest.raises(ResourceError, match="needed"):
        load.plan_memory(FOLDER, CPU, EngineConfig(context=1024, sequences=2))


@pytest.mark.parametrize("free", [1 << 20], indirect=True)
def test_no_memory_at_all_is_an_error_not_a_tiny_context(free: int) -> None:
    with pytest.raises(ResourceError):
        load.plan_memory(FOLDER, CPU, EngineConfig())


@pytest.mark.parametrize("fault", ["F10-load"])
@pytest.mark.parametrize("free", [needed(1024)], indirect=True)
def test_memory_that_runs_out_all_the_same_is_told_with_numbers(
    free: int, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process took it, or a GPU's allocator wants more than the sum: needed, free, what to do, exit 5."""

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
    assert "and it ran out" in load.out_of_memory(FOLDER, CPU, EngineConfig(context=1024)).message


def test_of_several_damaged_tensors_the_first_is_named(tmp_path: Path) -> None:
    """Layers are read at once, and what is said does not depend on which is done first."""
    tensors = load_file(PICO / "model.safetensors")
    for layer in (5, 2, 3):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(PICO / "config.json", tmp_path)
    for _ in range(5):
        with pytest.raises(ModelError, match=r"layers\.2\.mlp\.down_proj\.weight: 1 of"):
            load.load_model(ModelFolder.open(tmp_path), CPU)
