"""The text part of Qwen3-VL: Qwen3 with three positions a token, which are equal in a text."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.qwen2vl import read_image_positions, write_image_positions
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION

ARCHITECTURE = Architecture(
    name="qwen3vl",
    model_type="qwen3",
    multimodal_types=("qwen3_vl",),
    requires=(WHOLE_ROTATION,),
    read_config=lambda model, config: {
        **linear_biases(model, config),
        **read_image_positions(model, config, "qwen3_vl"),
    },
    write_multimodal=write_image_positions,
)
