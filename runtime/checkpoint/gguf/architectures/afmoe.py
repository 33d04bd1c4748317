"""Trinity (Arcee AFM with experts): gated attention, norms around each part, sigmoid-routed experts."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.experts import (
    NORM_KEY,
    SIGMOID,
    dense_layers_key,
    expert_keys,
    expert_tensors,
    require_norm,
    scale_key,
    shared_count_key,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule


def _read_config(model: GgufModel, config: Config) -> Config:
    require_norm(model)
    return {
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "sliding_window": model.integer(WINDOW_KEY.name, low=1),
        "mup_enabled": True,  # llama.cpp scales the embedding always
    }


ARCHITECTURE = Architecture(
    name="afmoe",
    model_type="afmoe",
    written_types=("afmoe",),
    requires=(WHOLE_ROTATION,),
    layer_tensors={
        **LLAMA_TENSORS,
        **expert_tensors(router="router.gate", shared="shared_experts", bias="expert_bias"),
        "attn_gate": TensorRule("self_attn.gate_proj"),
        "post_attention_norm": TensorRule("post_attention_layernorm"),
        "ffn_norm": TensorRule("pre_mlp_layernorm"),
        "post_ffw_norm": TensorRule("post_mlp_layernorm"),
    },
    keys=(
        *expert_keys(),
        shared_count_key("num_shared_experts"),
        dense_layers_key("num_dense_layers"),
        scale_key("route_scale"),
        WINDOW_KEY,
    ),
    # Every fourth layer has neither window nor positions; llama.cpp reads no pattern for the latter.
    slides=lambda layer: (layer + 1) % 4 != 0,
    gating=(SIGMOID,),
    read_config=_read_config,
    write_keys=lambda config: {NORM_KEY.name: True, "expert_gating_func": SIGMOID},
)
