"""Test that a model with portable bits has the same logits on every instruction set, or is refused."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.device.system import cpu
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.loading.portable import decline_model, differing_parts
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.kernels.cpu.library import isa
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype
from tests.support.families import CASES
from tests.support.grids import chosen
from tests.support.native_code import VARIANTS, instruction_set
from tests.support.native_parts import need_native_code
from tests.support.paths import PICO, ROOT
from tests.support.portable_models import PACKED, write_family

CPU = torch.device("cpu")
TOKENS = 100
# Dense and packed weights, a softcap, latent attention, experts, states; a cache of each kind.
MODELS: dict[str, KvDtype] = {
    "llama-biases": "int4",
    PACKED: "int8",
    "gemma2-mqa-low-caps-untied": "bf16",
    "deepseek_v3-groups-yarn": "int8",
    "qwen3_moe-8top2": "bf16",
    "bamba-2-groups": "bf16",
    "jamba-8top3": "int8",
}
SETS = tuple(name for name in VARIANTS if name not in ("native", "plain"))


@pytest.fixture(autouse=True)
def compiled() -> None:
    need_native_code()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(path: Path, kv: KvDtype = "bf16", portable: bool = True) -> ModelRunner:
    return load_model(open_model_folder(path), Placement(CPU, torch.bfloat16, kv=kv, portable=portable))


def logits(runner: ModelRunner, *ends: int) -> Tensor:
    """Return the logits of `TOKENS` tokens in passes that end at `ends`."""
    cache, rows = runner.make_cache(CacheShape.contiguous(TOKENS)), []
    tokens = [(7 * index + index * index) % runner.config.vocab_size for index in range(TOKENS)]
    for first, last in zip((0, *ends), ends, strict=False):
        rows.append(runner.run([Chunk(tokens[first:last], first, (0,), last - first)], cache))
    return torch.cat(rows)


@cache
def _model(folders: Path, case: str) -> tuple[Path, Tensor]:
    path = write_family(folders / case, case)
    return path, logits(load(path, MODELS[case]), 70, 71, 72, TOKENS)


@pytest.mark.parametrize("variant", chosen(SETS, ["avx2"]))
@pytest.mark.parametrize("case", MODELS)
def test_logits_have_the_bits_of_this_machine(
    case: str, variant: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = _model(folders, case)
    assert expected.isfinite().all()
    instruction_set(variant, monkeypatch)
    assert torch.equal(logits(load(path, MODELS[case]), 70, 71, 72, TOKENS), expected)


@pytest.mark.parametrize("case", MODELS)
def test_logits_do_not_depend_on_how_a_prompt_is_cut(case: str, folders: Path) -> None:
    path, expected = _model(folders, case)
    runner = load(path, MODELS[case])
    assert torch.equal(logits(runner, TOKENS), expected)
    assert torch.equal(logits(runner, 1, 8, 72, TOKENS), expected)


def test_without_the_option_nothing_is_portable(folders: Path) -> None:
    path, _ = _model(folders, "llama-biases")
    runner = load(path, portable=False)
    assert not runner.model.portable and not any(linear.portable for linear in _linears(runner))
    assert decline_model(runner.model, runner.passes, embeds=False) is None
    assert decline_model(runner.model, runner.passes, embeds=True) == Declined("computes-embeddings")
    assert "lm_head" in differing_parts(runner.model)
    packed, _ = _model(folders, PACKED)
    assert differing_parts(load(packed, portable=False).model) == ["lm_head"]


def _linears(runner: ModelRunner) -> list[object]:
    return [linear for block in runner.model.layers() for linear in block.products.values()]


@pytest.mark.parametrize(
    ("case", "code"), [("apertus-llama3", "activation"), ("diffllama-gqa4:2", "differential-attention")]
)
def test_a_part_that_torch_computes_is_refused(case: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no portable bits") as error:
        load(write_family(tmp_path / "model", case))
    declined = error.value.data["declined"]
    assert isinstance(declined, Declined) and declined.code == code
    assert load(tmp_path / "model", portable=False).model.portable is False


def test_fp32_is_refused() -> None:
    with pytest.raises(ModelError, match="no portable bits"):
        load_model(open_model_folder(PICO), Placement(CPU, torch.float32, portable=True))


@pytest.mark.slow
def test_every_family_has_the_same_logits_with_every_set(folders: Path) -> None:
    """The functions of torch that the host calls are limited to each set too. Some families are refused."""
    paths = []
    for case in CASES:
        try:
            paths.append(str(write_family(folders / case.replace(":", "-"), case)))
        except (RuntimeError, ValueError):  # a shape that transformers refuses at this size
            continue
    command = [sys.executable, "-m", "tests.benchmarks.logits_hash", *paths, "--portable-bits"]
    command += ["--sequences", "1", "--replies", "5"]
    sets = [name for name, instructions in isa.SETS.items() if instructions.on(cpu().flags)]
    found = {}
    for name, capability in [*((name, "") for name in sets), ("avx2", "avx2"), ("avx2", "default")]:
        environment = {**os.environ, isa.VARIABLE: name, "PYTHONPATH": str(ROOT / ".links"), "OMP_NUM_THREADS": "1"}
        environment |= {"ATEN_CPU_CAPABILITY": capability} if capability else {}
        output = subprocess.check_output(command, env=environment, cwd=ROOT, text=True)
        found[name, capability] = output.splitlines()
    first = found[sets[0], ""]
    assert len(first) == len(paths) and sum("sha256" in line for line in first) > len(paths) // 2
    for key, lines in found.items():
        assert lines == first, key
