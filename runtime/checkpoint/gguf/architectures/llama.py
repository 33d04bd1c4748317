"""Llama, and Mistral, whose files carry the same name; a sliding window tells them apart."""

from mycli.runtime.checkpoint.gguf.architecture import PAIRED_TENSORS, Architecture, Config, GgufKey, linear_biases
from mycli.runtime.checkpoint.gguf.header import GgufModel


def _read_config(model: GgufModel, config: Config) -> Config:
    if model.integer("attention.sliding_window", 0):
        return {"model_type": "mistral"}
    return linear_biases(model, config)


ARCHITECTURE = Architecture(
    name="llama",
    model_type="llama",
    written_types=("llama", "mistral"),
    layer_tensors=PAIRED_TENSORS,
    # Not written: llama.cpp attends to the whole context in this architecture.
    keys=(GgufKey("attention.sliding_window", "sliding_window"),),
    read_config=_read_config,
)
