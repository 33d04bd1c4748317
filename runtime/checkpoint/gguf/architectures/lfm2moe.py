"""LFM2 with experts: sigmoid-routed with a correction bias, behind some layers with an MLP."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.lfm2 import (
    CONV_KEY,
    LFM2_MODEL_TENSORS,
    LFM2_TENSORS,
    read_layer_types,
    write_layer_types,
)
from mycli.runtime.checkpoint.gguf.experts import (
    SIGMOID,
    dense_layers_key,
    expert_keys,
    expert_tensors,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS


def _read_config(model: GgufModel, config: Config) -> Config:
    # llama.cpp divides weights by their sum, adds the bias and has no factor; it has no keys for these.
    return {**read_layer_types(model, config), "norm_topk_prob": True, "routed_scaling_factor": 1.0}


ARCHITECTURE = Architecture(
    name="lfm2moe",
    model_type="lfm2_moe",
    written_types=("lfm2_moe",),
    requires=(HIDDEN_WIDE_HEADS,),
    layer_tensors={
        **LFM2_TENSORS,
        **expert_tensors("feed_forward", gate="w1", up="w3", down="w2", bias="expert_bias"),
    },
    model_tensors=LFM2_MODEL_TENSORS,
    keys=(CONV_KEY, *expert_keys(), dense_layers_key("num_dense_layers")),
    by_layer=("attention.head_count_kv",),
    gating=(SIGMOID,),
    epsilon_field="norm_eps",
    read_config=_read_config,
    write_keys=lambda config: {**write_layer_types(config), "expert_gating_func": SIGMOID},
)
