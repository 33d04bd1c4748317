"""ERNIE 4.5, dense: Llama with neighbouring pairs rotated, in the rows of Hugging Face."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION


def _read_config(model: GgufModel, config: Config) -> Config:
    return {"use_bias": "blk.0.attn_q.bias" in model.tensors}


ARCHITECTURE = Architecture(
    name="ernie4_5",
    model_type="ernie4_5",
    written_types=("ernie4_5",),
    requires=(WHOLE_ROTATION,),
    read_config=_read_config,
)
