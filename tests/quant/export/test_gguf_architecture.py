"""Check that a GGUF architecture is one file, which is enough to export a family and read it back."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import CONFIG_MAPPING

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.ggml.file import require_loadable
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.gguf import architectures
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.resolve import Source
from tests.support.engines import whole
from tests.support.families import make
from tests.support.family_parts import MULTIPLIERS
from tests.support.gguf_exports import make_exported
from tests.support.models import CPU
from tests.support.paths import PICO

# Interleaved rows, scales as keys, a stored exponential, a tensor name without a suffix.
DENSE = """
from mycli.runtime.checkpoint.gguf.architecture import Architecture, GgufKey
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS, PAIRED_TENSORS, TensorRule, ValueChange

ARCHITECTURE = Architecture(
    name="toy-dense",
    model_type="granite",
    written_types=("granite",),
    layer_tensors={
        **PAIRED_TENSORS,
        "ffn_norm": TensorRule(
            "post_attention_layernorm",
            change=ValueChange(store=lambda gain: gain.exp(), load=lambda stored: stored.log()),
            suffixes={"": ".weight"},
        ),
    },
    keys=(
        GgufKey("embedding_scale", "embedding_multiplier", float, write=lambda config: float(config.embedding_scale)),
        GgufKey("residual_scale", "residual_multiplier", float, write=lambda config: float(config.residual_scale)),
        GgufKey("attention.scale", "attention_multiplier", float, write=lambda config: float(config.attention_scale)),
        GgufKey("logit_scale", "logits_scaling", float, write=lambda config: float(1 / config.logit_scale)),
    ),
)
"""
# Experts stacked in tensors of three dimensions.
EXPERTS = """
from mycli.runtime.checkpoint.gguf.architecture import Architecture, GgufKey
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule


def ffn(config):
    return config.layer_specs[0].mlp


ARCHITECTURE = Architecture(
    name="toy_experts",
    model_type="qwen3_moe",
    written_types=("qwen3_moe",),
    layer_tensors={
        **LLAMA_TENSORS,
        "ffn_gate_inp": TensorRule("mlp.gate"),
        "ffn_gate_exps": TensorRule("mlp.experts.{expert}.gate_proj"),
        "ffn_up_exps": TensorRule("mlp.experts.{expert}.up_proj"),
        "ffn_down_exps": TensorRule("mlp.experts.{expert}.down_proj"),
    },
    keys=(
        GgufKey("expert_count", "num_experts", write=lambda config: len(ffn(config).experts)),
        GgufKey("expert_used_count", "num_experts_per_tok", write=lambda config: ffn(config).top_k),
        GgufKey("expert_feed_forward_length", "moe_intermediate_size", write=lambda c: ffn(c).experts[0].size),
    ),
    read_config=lambda model, config: {"norm_topk_prob": True},
)
"""
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "toy_dense": (DENSE, "granite", {**MULTIPLIERS, "residual_multiplier": 0.25}),
    "toy_experts": (EXPERTS, "qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}),
}


@pytest.mark.parametrize("file", CASES)
@pytest.mark.parametrize("variant", ["f32", "q8_0"])
def test_one_file_is_enough_to_write_and_to_read(
    file: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model_type, changes = CASES[file]
    (tmp_path / "architectures").mkdir()
    (tmp_path / "architectures" / f"{file}.py").write_text(source)
    make(tmp_path / "hf", model_type, {**changes, "vocab_size": 4096, "rms_norm_eps": 2.0**-20})  # a key is fp32
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, tmp_path / "hf" / name)
    original = open_model_folder(tmp_path / "hf")
    module, kind = find_export_target(f"gguf:{variant}")
    request = ExportRequest(Source("hf", tmp_path / "hf"), original, tmp_path / "a.gguf", kind, requantize=True)
    monkeypatch.setattr(architectures, "__path__", [])
    with pytest.raises(ModelError, match=model_type):
        module.export(request, silent)
    monkeypatch.setattr(architectures, "__path__", [str(tmp_path / "architectures")])
    written = open_model_folder(module.export(request, silent).path)
    config = written.config
    assert config.layer_specs == original.config.layer_specs
    for field in ("embedding_scale", "logit_scale", "max_context", "vocab_size", "tie_embeddings"):
        assert getattr(config, field) == getattr(original.config, field), field
    before, after = original.checkpoint(), written.checkpoint()
    for name, _ in original.config.tensors():
        bound = 1e-6 if variant == "f32" else 0.01
        assert (before.read(name) - after.read(name).float()).abs().max() <= bound * before.read(name).abs().max(), name
    tokens = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    if variant == "f32":
        expected = whole(load_model(original, CPU).model, tokens)
        assert (whole(load_model(written, CPU).model, tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()
    shapes = {tensor.name: list(tensor.shape) for tensor in gguf.GGUFReader(written.path).tensors}
    assert "blk.0.ffn_norm" in shapes if file == "toy_dense" else shapes["blk.0.ffn_up_exps.weight"][2] == 8


def test_the_epsilon_has_the_name_of_transformers_class() -> None:
    # A class ignores another name, and takes its default.
    for architecture in architectures.architectures():
        if architecture.model_type in {*CONFIG_MAPPING} - {"olmo"}:  # fixed in OLMo
            config = CONFIG_MAPPING[architecture.model_type]()
            assert hasattr(config, architecture.epsilon_field), architecture.name


@pytest.mark.parametrize(
    "changes",
    [{"sliding_window_size": 7}, {"rope_layout": [1] * 5}, {"sliding_window_layout": [1, 1, 1, 1, 0]}],
    ids=str,
)
def test_layouts_of_smallthinker_are_those_of_llama_cpp(changes: dict[str, Any], tmp_path: Path) -> None:
    """It knows from the presence of a window alone which layers have it and which rotate."""
    make_exported(tmp_path / "hf", "smallthinker-layouts-softmax-tied", **changes)
    config = open_model_folder(tmp_path / "hf").config
    with pytest.raises(ModelError, match="window of 4096"):
        require_loadable(config, written_architecture(config), [])
