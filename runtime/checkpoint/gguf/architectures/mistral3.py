"""Ministral 3: Llama with yarn, and queries scaled by the position."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS
from mycli.runtime.models.config import ModelConfig


def _read_config(model: GgufModel, config: Config) -> Config:
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        rope["llama_4_scaling_beta"] = model.number("attention.temperature_scale", 0.0)
        if model.number("rope.scaling.yarn_log_multiplier", 0.0):  # magnitudes of rotation and scores cancel
            rope["attention_factor"] = 1.0
    return {"rope_parameters": rope}


def _write_keys(config: ModelConfig) -> dict[str, float]:
    keys = {"attention.temperature_scale": float(config.rope_scaling.query_beta)}
    if config.rope_scaling.kind == "yarn" and config.rope_scaling.attention_factor == 1.0:
        keys["rope.scaling.yarn_log_multiplier"] = 1.0
    return keys


ARCHITECTURE = Architecture(
    name="mistral3",
    model_type="ministral3",
    written_types=("ministral3",),
    requires=(WHOLE_ROTATION,),
    biases=ALL_BIASES,
    layer_tensors=PAIRED_TENSORS,
    read_config=_read_config,
    write_keys=_write_keys,
)
