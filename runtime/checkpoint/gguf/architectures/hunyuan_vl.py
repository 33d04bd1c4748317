"""The text part of Hunyuan VL and OCR: Hunyuan with three positions a token, which are equal in a text; read only."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.hunyuan_dense import HUNYUAN_TENSORS
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION


def _read_config(model: GgufModel, config: Config) -> Config:
    rope = dict(config["rope_parameters"])
    # The converter leaves theta as it was, where that of hunyuan-dense is multiplied already.
    if (alpha := model.number("rope.scaling.alpha", 0.0)) > 0:
        rope |= {"rope_type": "dynamic", "factor": 1.0, "alpha": alpha}
    return {**linear_biases(model, config), "rope_parameters": rope}


ARCHITECTURE = Architecture(
    name="hunyuan_vl",
    model_type="hunyuan_v1_dense",
    requires=(WHOLE_ROTATION,),
    layer_tensors=HUNYUAN_TENSORS,
    read_config=_read_config,
)
