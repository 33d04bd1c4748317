"""Check that every family that is exported to GGUF is read back as the same model."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.gguf.architectures import architectures
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.resolve import Source
from tests.support.engines import whole
from tests.support.families import CASES, make
from tests.support.models import CPU
from tests.support.paths import PICO

WRITTEN = {family: known for known in architectures() for family in known.written_types}
# A case of each family without loss. The quick ones cover every way in which GGUF differs.
QUICK = (
    *("llama-rope-llama3", "olmo3-window7", "gemma4-told-lent-double", "ministral3-beyond", "granite-multipliers"),
    *("cohere2-window7-tied", "gpt_oss-window7-gqa4:2", "ernie4_5_moe-8top3-tied", "qwen3_5-odd-heads-tied"),
    *("qwen3_next-8top3", "lfm2_moe-8top3-tied", "granitemoehybrid-8top3", "nemotron_h-every-kind"),
    "deepseek_v2-groups-odd-sizes-biases-tied",
)
NAMES = [
    "llama-rope-llama3",
    "mistral-no-window-hd24",
    "qwen2-biases",
    "qwen3-tied-biases-yarn",
    "olmo2-mha-tied-biases",
    "olmo3-window7",
    "phi3-mha-tied-window16",
    "gemma4-told-lent-double",
    "gemma4-8top2",
    "smollm3-tied",
    "ministral3-beyond",
    "granite-multipliers",
    "glm4-half-turned",
    "glm-tied-hd24-no-bias",
    "seed_oss-tied-out-bias",
    "exaone4-window7",
    "cohere2-window7-tied",
    "cohere-mha-tied",
    "hunyuan-tied-biases",
    "ernie4_5-untied-biases",
    "arcee-yarn",
    "qwen3_moe-8top2",
    "mixtral-4top2",
    "olmoe-16top4",
    "gpt_oss-window7-gqa4:2",
    "qwen2_moe-shared",
    "granitemoe-8top2",
    "glm4_moe-groups-norms-two-shared-tied",
    "solar_open-8top2",
    "ernie4_5_moe-8top3-tied",
    "hunyuan_v1_moe-8top2",
    "minimax_m2-8top2-half-turned",
    "dots1-8top2",
    "qwen3_5-odd-heads-tied",
    "qwen3_5_moe-odd-heads-top1-tied",
    "qwen3_next-8top3",
    "lfm2-untied-biases",
    "lfm2_moe-8top3-tied",
    "granitemoehybrid-8top3",
    "granitemoehybrid-dense-odd-sizes-rope-biases-tied",
    "nemotron_h-no-experts",
    "nemotron_h-every-kind",
    "falcon_h1-normed-after-gate-multipliers-biases",
    "mamba2-2-groups",
    "deepseek_v2-groups-odd-sizes-biases-tied",
    "deepseek_v3-groups-yarn",
    "glm4_moe_lite-8top3",
    "kimi_k2-ungrouped",
    "youtu-tied",
]
# Properties that llama.cpp assumes for a family.
FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe-8top2": {"norm_topk_prob": True},
    "granitemoehybrid-dense-odd-sizes-rope-biases-tied": {"time_step_limit": None},
    "nemotron_h-every-kind": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "falcon_h1-normed-after-gate-multipliers-biases": {
        **{f"{part}_{side}_multiplier": 1.0 for part in ("attention", "ssm") for side in ("in", "out")},
        **{f"{part}_multiplier": 1.0 for part in ("embedding", "lm_head", "key")},
        **{"mlp_multipliers": None, "ssm_multipliers": None},
    },
}


def _request(name: str, folder: Path, variant: str) -> ExportRequest:
    model_type, changes = CASES[name]
    make(folder / "hf", model_type, {**changes, "vocab_size": 4096, **FIXED.get(name, {})})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, folder / "hf" / file)
    original = open_model_folder(folder / "hf")
    return ExportRequest(Source("hf", folder / "hf"), original, folder / "a.gguf", variant, requantize=True)


def test_every_written_family_has_a_case() -> None:
    assert {CASES[name][0] for name in NAMES} == set(WRITTEN)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_export_is_read_back(name: str, tmp_path: Path) -> None:
    """Logits are equal, and llama.cpp knows the name of every tensor."""
    packed = CASES[name][0] == "gpt_oss"
    request = _request(name, tmp_path, "" if packed else "f32")
    module, _ = find_export_target("gguf:f32")
    written = open_model_folder(module.export(request, silent).path)
    tokens = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    expected = whole(load_model(request.folder, CPU).model, tokens)
    actual = whole(load_model(written, CPU).model, tokens)
    assert (actual - expected).abs().max() <= (2e-2 if packed else 1e-4) * expected.abs().max()
    reader = gguf.GGUFReader(written.path)
    architecture = reader.fields["general.architecture"].contents()
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    layers = written.config.layers
    known = {
        gguf.TENSOR_NAMES[tensor].format(bid=layer) for tensor in gguf.MODEL_TENSORS[number] for layer in range(layers)
    }
    for tensor in reader.tensors:
        assert tensor.name in known or tensor.name.rpartition(".")[0] in known, tensor.name


LOSSES = {
    "llama-rope-dynamic-beyond": "dynamic",
    "qwen2-tied-window-upper": "window",
    "smollm3-untied-window": "window",
    "ernie4_5_moe-every-other-none-shared-untied": "size",
    "qwen3_next-odd-heads-every-other-unnormalized-tied": "mlp|size|routing",
    "olmoe-clip-normalized-gqa-tied": "clip",
    "dots1-window7-tied-biases": "window",
    "cohere-gqa-untied-biases": "no tensor",
    "deepseek_v3-odd-sizes-half-split-biases-tied": "rope",
    "falcon_h1-multipliers": "embedding_scale",
    "nemotron_h-groups-latent-experts-odd-sizes-biases-unnormalized": "no tensor for it",
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_gguf_has_no_key_for_is_refused(name: str, tmp_path: Path) -> None:
    request = _request(name, tmp_path, "f32")
    module, _ = find_export_target("gguf:f32")
    with pytest.raises(ModelError, match=LOSSES[name]):
        module.export(request, silent)
    assert not request.target.exists()
