"""Arcee AFM: Llama with a squared-ReLU MLP without a gate."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS

ARCHITECTURE = Architecture(
    name="arcee",
    model_type="arcee",
    written_types=("arcee",),
    requires=(WHOLE_ROTATION,),
    layer_tensors=PAIRED_TENSORS,
    read_config=lambda model, config: {**linear_biases(model, config), "hidden_act": "relu2"},
)
