"""Gemma 3, its text model: five layers with a sliding window and a rope of their own, then one without."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.architectures.gemma2 import (
    GEMMA_LAYER_TENSORS,
    GEMMA_MODEL_TENSORS,
    gemma_attention,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel


def _read_config(model: GgufModel, config: Config) -> Config:
    local = {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return {**gemma_attention(config, largest=62), "rope_parameters": ropes}


ARCHITECTURE = Architecture(
    name="gemma3",
    model_type="gemma3_text",
    layer_tensors=GEMMA_LAYER_TENSORS,
    model_tensors=GEMMA_MODEL_TENSORS,
    keys=(
        GgufKey("attention.sliding_window", "sliding_window"),
        GgufKey("final_logit_softcapping", "final_logit_softcapping", float),
    ),
    slides=lambda layer: (layer + 1) % 6 != 0,
    read_config=_read_config,
)
