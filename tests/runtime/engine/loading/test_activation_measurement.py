"""Test how a GGUF file, which has no card, gets 8-bit activations: measured at its first load, recorded, bounded."""

import json
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.activation_measurement import MEASURED_TOKENS
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import Declined
from mycli.runtime.hub.activation_record import record_kl, recorded_kl
from mycli.runtime.hub.store import state_dir
from mycli.runtime.kernels.cpu.library.build import native
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.quantization.activations import MAX_MOVED_KL, Activations
from tests.support import gguf_files
from tests.support.paths import PICO

LIBRARY = native()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, Declined) or LIBRARY.isa == "amx", reason="8 bits are not chosen")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pico") / "pico.gguf"
    config = json.loads((PICO / "config.json").read_bytes())
    gguf_files.write_model(PICO, path, "llama", "Q4_0", config, gguf_files.published_tokenizer(PICO, "smollm"))
    return path


@pytest.fixture(autouse=True)
def _no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def load(file: Path, kind: Activations = "auto", dtype: torch.dtype = torch.bfloat16) -> ModelRunner:
    return load_model(open_model_folder(file), Placement(torch.device("cpu"), dtype, activations=kind))


def logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    cache = runner.make_cache(CacheShape.contiguous(len(tokens)))
    return runner.run([Chunk(tokens, 0, (0,), len(tokens))], cache)


def choice(runner: ModelRunner) -> tuple[int, str]:
    assert runner.activations is not None
    return runner.activations.bits, runner.activations.reason.code


def test_the_first_load_measures_and_later_loads_read_the_record(file: Path) -> None:
    text = (resources.files("mycli.runtime") / "pico" / "held-out.txt").read_text()
    encode = open_model_folder(file).tokenizer().encode
    tokens = encode(text[: 16 * MEASURED_TOKENS], add_special=True)[:MEASURED_TOKENS]
    first = load(file)
    moved = recorded_kl(file)
    assert choice(first) == (8, "activations-move") and moved is not None and 0 < moved < MAX_MOVED_KL
    eight, sixteen = (logits(load(file, kind), tokens) for kind in ("8", "16"))
    kl = functional.kl_div(eight.log_softmax(1), sixteen.log_softmax(1), reduction="batchmean", log_target=True)
    assert moved == pytest.approx(float(kl), rel=1e-3)
    assert torch.equal(logits(first, tokens), eight)
    [record] = (state_dir() / "activations").iterdir()
    written = record.stat().st_mtime_ns
    again = load(file)
    assert choice(again) == choice(first) and record.stat().st_mtime_ns == written
    assert torch.equal(logits(again, tokens[:70]), eight[:70])


def test_a_file_beyond_the_limit_keeps_16_bits(file: Path) -> None:
    record_kl(file, MAX_MOVED_KL)
    runner = load(file)
    assert choice(runner) == (16, "activations-move")
    assert torch.equal(logits(runner, [1, 2, 3]), logits(load(file, "16"), [1, 2, 3]))


def test_measuring_leaves_a_rejected_model_at_16_bits(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycli.runtime.quantization.activations.MAX_MOVED_KL", 0.0)
    runner = load(file)
    assert choice(runner) == (16, "activations-move") and recorded_kl(file)
    assert torch.equal(logits(runner, [1, 2, 3]), logits(load(file, "16"), [1, 2, 3]))


def test_nothing_is_measured_on_request_and_in_fp32(file: Path) -> None:
    assert choice(load(file, "16")) == (16, "activations-requested")
    assert load(file, dtype=torch.float32).activations is None
    assert recorded_kl(file) is None
