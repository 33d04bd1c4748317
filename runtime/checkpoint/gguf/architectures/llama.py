"""Llama, InternLM 3, IQuest-Coder, Mistral and Mixtral; window and experts tell the last two apart."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, Architecture, Config, GgufKey, linear_biases
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors, experts_spec
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS
from mycli.runtime.models.config import ModelConfig


def _read_config(model: GgufModel, config: Config) -> Config:
    if model.integer("expert_count", 0):
        return {"model_type": "mixtral", **{key.field: model.integer(key.name, low=1) for key in _EXPERTS}}
    if model.integer("attention.sliding_window", 0):
        return {"model_type": "mistral"}
    return linear_biases(model, config)


def _write_keys(config: ModelConfig) -> dict[str, int]:
    if config.model_type != "mixtral":
        return {}
    return {"expert_count": len(experts_spec(config).experts), "expert_used_count": experts_spec(config).top_k}


_EXPERTS = expert_keys("num_local_experts", size=None)
ARCHITECTURE = Architecture(
    name="llama",
    model_type="llama",
    written_types=("llama", "mistral", "mixtral", "internlm3", "iquestcoder"),
    requires=(WHOLE_ROTATION,),
    biases=ALL_BIASES,
    layer_tensors={**PAIRED_TENSORS, **expert_tensors("block_sparse_moe", gate="w1", up="w3", down="w2")},
    # Not written: llama.cpp attends to the whole context in this architecture.
    keys=(
        GgufKey("attention.sliding_window", "sliding_window"),
        GgufKey("expert_count", "num_local_experts", applies=lambda config: config["model_type"] == "mixtral"),
    ),
    read_config=_read_config,
    write_keys=_write_keys,
)
