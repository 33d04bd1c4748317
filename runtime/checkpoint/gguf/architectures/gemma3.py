"""Gemma 3, its text model: five layers with a sliding window and a rope of their own, then one without; and Rnj-1."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY, full_attention
from mycli.runtime.checkpoint.gguf.architectures.gemma2 import (
    GEMMA_LAYER_TENSORS,
    GEMMA_MODEL_TENSORS,
    gemma_attention,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.models.config import ModelConfig

_SCALED_CONTEXT = 131072  # of the models with images, whose positions are scaled


def _read_config(model: GgufModel, config: Config) -> Config:
    theta, rope = model.number("rope.local.freq_base", 10000.0), dict(config["rope_parameters"])
    local = {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", theta)}
    if not model.has("rope.freq_base"):  # Ollama's converter leaves out what all models have
        rope["rope_theta"] = model.number("rope.global.freq_base", 1_000_000.0)
        if config["max_position_embeddings"] >= _SCALED_CONTEXT and not model.has("rope.scaling.type"):
            rope |= {"rope_type": "linear", "factor": 8.0}
    ropes = {"full_attention": rope, "sliding_attention": local}
    # Rnj-1 has no window; without one, llama.cpp rotates all layers alike.
    return {**gemma_attention(config, largest=62), "rope_parameters": ropes, **full_attention(model, config)}


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    ropes = [layer.attention.rope for layer in config.layer_specs if layer.attention.window is not None]
    keys = {"rope.freq_base_swa": float(ropes[0].theta)} if ropes and ropes[0] is not None else {}
    return keys if config.logit_softcap is None else {**keys, "final_logit_softcapping": float(config.logit_softcap)}


ARCHITECTURE = Architecture(
    name="gemma3",
    model_type="gemma3_text",
    written_types=("gemma3_text",),
    writes=lambda config: not config.bidirectional,  # EmbeddingGemma is another architecture
    biases=(),
    layer_tensors=GEMMA_LAYER_TENSORS,
    model_tensors=GEMMA_MODEL_TENSORS,
    keys=(
        WINDOW_KEY,
        GgufKey("final_logit_softcapping", "final_logit_softcapping", float),
    ),
    slides=lambda layer: (layer + 1) % 6 != 0,
    pattern=True,
    default_epsilon=1e-6,
    read_config=_read_config,
    write_keys=_write_keys,
)
