"""Baichuan 1 and 2, 7B: Llama under another name, with the head as the file has it; read only."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS
from mycli.runtime.errors import ModelError

_ALIBI_LAYERS = 40  # by which llama.cpp tells the 13B models


def _read_config(model: GgufModel, config: Config) -> Config:
    if config["num_hidden_layers"] == _ALIBI_LAYERS:
        message = "'baichuan' of 13B is not supported: its attention biases by distance (ALiBi) are not implemented"
        raise ModelError(f"general.architecture: {message}", "run it with llama.cpp")
    return {}


ARCHITECTURE = Architecture(
    name="baichuan",
    model_type="llama",
    requires=(WHOLE_ROTATION,),
    layer_tensors=PAIRED_TENSORS,
    read_config=_read_config,
)
