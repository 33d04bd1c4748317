"""Granite with sliding windows, dense or with experts: attention sinks, and no positions in some layers."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, Architecture, Config, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.architectures.granite import GRANITE_KEYS
from mycli.runtime.checkpoint.gguf.architectures.granitemoe import SHARED_KEY
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors, experts_spec, shared_size
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig

_ROTATES = "attention.rope_pattern"
_EXPERTS = (*expert_keys("num_local_experts", size=None), SHARED_KEY)


def _read_config(model: GgufModel, config: Config) -> Config:
    layers, theta = config["num_hidden_layers"], config["rope_parameters"]["rope_theta"]
    rotates = model.layer_values(_ROTATES, layers) if model.has(_ROTATES) else [1] * layers
    read: Config = {
        **linear_biases(model, config),
        "layer_rope_theta": [theta if rotated else 0 for rotated in rotates],
    }
    if not model.integer("expert_count", 0):
        return read
    return {**read, "model_type": "granitemoe_swa", **{key.field: model.integer(key.name, 0) for key in _EXPERTS}}


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {_ROTATES: [layer.attention.rope is not None for layer in config.layer_specs]}
    if config.model_type == "granite_swa":
        return keys
    mixture = experts_spec(config)
    counts = {"expert_count": len(mixture.experts), "expert_used_count": mixture.top_k}
    return {**keys, **counts, SHARED_KEY.name: shared_size(config)}


ARCHITECTURE = Architecture(
    name="granite_swa",
    model_type="granite_swa",
    written_types=("granite_swa", "granitemoe_swa"),
    requires=(WHOLE_ROTATION,),
    biases=ALL_BIASES,
    layer_tensors={
        **PAIRED_TENSORS,
        **expert_tensors("block_sparse_moe", router="router"),
        "attn_sinks": TensorRule("self_attn.sinks", suffixes={".weight": ""}),
        "ffn_up_shexp": TensorRule("shared_mlp.input_linear"),
        "ffn_down_shexp": TensorRule("shared_mlp.output_linear"),
    },
    keys=(*GRANITE_KEYS, WINDOW_KEY),
    pattern=True,
    slides=lambda layer: layer % 4 != 0,
    read_config=_read_config,
    write_keys=_write_keys,
)
