"""The text part of Qwen2-VL and Qwen2.5-VL: Qwen2 with three positions a token, which are equal in a text."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.rope import position_sections
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.multimodal import MULTIMODAL
from mycli.runtime.utils.json_fields import Fields


def read_image_positions(model: GgufModel, config: Config, outer_type: str) -> Config:
    """Return the config field of what only images need, so that a copy of the file has it."""
    images: Config = {"model_type": outer_type}
    if model.has("rope.dimension_sections"):
        images["mrope_section"] = list(model.layer_values("rope.dimension_sections")[:3])
    if model.has("n_deepstack_layers"):
        images["deepstack_layers"] = model.integer("n_deepstack_layers")
    return {MULTIMODAL: images}


def write_image_positions(config: ModelConfig, images: Fields) -> dict[str, Any]:
    """Return the keys that llama.cpp reads next to a file of the image model."""
    keys: dict[str, Any] = {"rope.dimension_sections": position_sections(config, images)}
    if images.has("deepstack_layers"):
        keys["n_deepstack_layers"] = images.integer("deepstack_layers", low=0, high=config.layers)
    return keys


ARCHITECTURE = Architecture(
    name="qwen2vl",
    model_type="qwen2",
    multimodal_types=("qwen2_vl", "qwen2_5_vl"),
    requires=(HIDDEN_WIDE_HEADS, WHOLE_ROTATION),
    read_config=lambda model, config: read_image_positions(model, config, "qwen2_5_vl"),
    write_multimodal=write_image_positions,
)
