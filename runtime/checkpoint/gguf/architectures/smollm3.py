"""SmolLM3: Llama without rotation in every fourth layer."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS

ARCHITECTURE = Architecture(
    name="smollm3",
    model_type="smollm3",
    written_types=("smollm3",),
    requires=(WHOLE_ROTATION,),
    layer_tensors=PAIRED_TENSORS,
    read_config=linear_biases,
)
