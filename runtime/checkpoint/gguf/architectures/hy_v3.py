"""Hy 3: Qwen 3's attention; sigmoid-routed experts with a correction bias and a shared expert."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.experts import (
    SIGMOID,
    expert_keys,
    expert_tensors,
    layer_kinds,
    require_norm,
    scale_key,
    shared_size,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule


def _read_config(model: GgufModel, config: Config) -> Config:
    require_norm(model)
    return {
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "num_shared_experts": model.integer("expert_shared_feed_forward_length", low=1)
        // model.integer("expert_feed_forward_length", low=1),
        "mlp_layer_types": layer_kinds(model, config),
    }


ARCHITECTURE = Architecture(
    name="hy_v3",
    model_type="hy_v3",
    written_types=("hy_v3",),
    requires=(WHOLE_ROTATION,),
    has_mtp_blocks=True,
    layer_tensors={
        **LLAMA_TENSORS,
        **expert_tensors(router="router.gate", shared="shared_mlp"),
        "exp_probs_b": TensorRule("mlp.expert_bias", suffixes={"": ""}),
    },
    keys=(*expert_keys(), scale_key("router_scaling_factor")),
    gating=(SIGMOID,),
    read_config=_read_config,
    write_keys=lambda config: {
        "expert_shared_feed_forward_length": shared_size(config),
        "expert_weights_norm": True,
        "expert_gating_func": SIGMOID,
    },
)
