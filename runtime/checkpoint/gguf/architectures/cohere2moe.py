"""Command A with experts: Command R7B's parallel parts, with experts and maybe shared ones."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.command_r import LOGIT_SCALE
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.experts import (
    NORM_KEY,
    SIGMOID,
    SOFTMAX,
    dense_layers_key,
    expert_keys,
    expert_tensors,
    experts_spec,
    require_norm,
    shared_count_key,
    shared_size,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import MlpSpec

_RMS_EPSILON = "attention.layer_norm_rms_epsilon"


def _read_config(model: GgufModel, config: Config) -> Config:
    sigmoid = model.integer("expert_gating_func", SIGMOID) == SIGMOID
    if not sigmoid:
        require_norm(model)
    return {
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "expert_selection_fn": "sigmoid" if sigmoid else "softmax",
        "norm_topk_prob": model.boolean(NORM_KEY.name),
        "sliding_window": model.integer(WINDOW_KEY.name, low=1),
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "intermediate_size": model.integer("expert_feed_forward_length", low=1),
        "layer_norm_eps": config["rms_norm_eps"],
        # Which of the two keys a file has decides the kind of norm.
        "rms_norm_eps": model.number(_RMS_EPSILON) if model.has(_RMS_EPSILON) else None,
    }


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    mixture = experts_spec(config)
    dense = [layer.mlp.size for layer in config.layer_specs if isinstance(layer.mlp, MlpSpec)]
    return {
        "feed_forward_length": dense[0] if dense else mixture.size,
        "expert_feed_forward_length": mixture.size,
        "expert_shared_feed_forward_length": shared_size(config),
        "expert_gating_func": SIGMOID if mixture.routing.scoring == "sigmoid" else SOFTMAX,
        **({} if config.layer_norm else {_RMS_EPSILON: float(config.rms_norm_eps)}),
    }


ARCHITECTURE = Architecture(
    name="cohere2moe",
    model_type="cohere2_moe",
    written_types=("cohere2_moe",),
    requires=(WHOLE_ROTATION,),
    has_mtp_blocks=True,
    layer_tensors={**LLAMA_TENSORS, **expert_tensors(shared="shared_experts")},
    keys=(
        *expert_keys(size=None),
        shared_count_key("num_shared_experts"),
        dense_layers_key("first_k_dense_replace"),
        NORM_KEY,
        LOGIT_SCALE,
        WINDOW_KEY,
    ),
    epsilon=LAYER_NORM_EPSILON,
    optional=("feed_forward_length",),  # of the layers without experts
    slides=lambda layer: layer % 4 != 0,
    pattern=True,
    gating=(SIGMOID, SOFTMAX),
    read_config=_read_config,
    write_keys=_write_keys,
)
