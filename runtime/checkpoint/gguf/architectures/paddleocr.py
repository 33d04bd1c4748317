"""The text part of PaddleOCR-VL: Llama with rows in Hugging Face's order. The three positions of a token are equal."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures.qwen2vl import read_image_positions
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION

ARCHITECTURE = Architecture(
    name="paddleocr",
    model_type="llama",
    requires=(WHOLE_ROTATION,),
    read_config=lambda model, config: read_image_positions(model, config, "paddleocr_vl"),
)
