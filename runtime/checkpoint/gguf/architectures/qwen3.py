"""Qwen3, dense: norms on queries and keys."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, linear_biases
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION

_ANSWERS = "cls.output.weight"  # of Qwen3-Reranker: the rows of the head for "yes" and "no"
_TIED_WIDTH = 2560  # of the largest Qwen 3 whose head is the embedding


def _read_config(model: GgufModel, config: Config) -> Config:
    if _ANSWERS in model.tensors and config["tie_word_embeddings"] and config["hidden_size"] > _TIED_WIDTH:
        problem = "is a head of two tokens, and the file has no output.weight"
        raise model.metadata.fail(_ANSWERS, problem, "use the repository that holds safetensors files")
    return linear_biases(model, config)


ARCHITECTURE = Architecture(
    name="qwen3",
    model_type="qwen3",
    written_types=("qwen3",),
    requires=(WHOLE_ROTATION,),
    ignored=(_ANSWERS,),
    read_config=_read_config,
)
