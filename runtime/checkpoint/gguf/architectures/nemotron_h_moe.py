"""Nemotron 3: Nemotron-H with sigmoid-routed experts instead of MLPs, maybe behind a projection."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import QKV_BIASES, Architecture, GgufKey
from mycli.runtime.checkpoint.gguf.architectures.nemotron_h import (
    BY_LAYER,
    NEMOTRON_MODEL_TENSORS,
    NEMOTRON_TENSORS,
    has_experts,
    read_layers,
    write_layers,
)
from mycli.runtime.checkpoint.gguf.experts import (
    NORM_KEY,
    SCALE_KEY,
    SIGMOID,
    expert_keys,
    expert_tensors,
    experts_spec,
    shared_size_key,
)
from mycli.runtime.checkpoint.gguf.mamba import CONVOLUTION_BIAS
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule
from mycli.runtime.models.config import ModelConfig

_ROUTED = expert_tensors("mixer", shared="shared_experts", bias="gate.e_score_correction_bias")


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    enter = experts_spec(config).enter
    latent = {} if enter is None else {"moe_latent_size": enter.out_features}
    return {**write_layers(config), **latent, "expert_gating_func": SIGMOID, "expert_shared_count": 1}


ARCHITECTURE = Architecture(
    name="nemotron_h_moe",
    model_type="nemotron_h",
    written_types=("nemotron_h",),
    requires=(CONVOLUTION_BIAS,),
    biases=(*QKV_BIASES, "attn_output", "ssm_conv1d"),
    writes=has_experts,
    has_mtp_blocks=True,
    layer_tensors={
        **{name: rule for name, rule in NEMOTRON_TENSORS.items() if name not in ("ffn_up", "ffn_down")},
        **{name: rule for name, rule in _ROUTED.items() if "gate_exps" not in name and "gate_up" not in name},
        "ffn_latent_down": TensorRule("mixer.fc1_latent_proj"),
        "ffn_latent_up": TensorRule("mixer.fc2_latent_proj"),
    },
    model_tensors=NEMOTRON_MODEL_TENSORS,
    keys=(
        *expert_keys("n_routed_experts"),
        shared_size_key("moe_shared_expert_intermediate_size"),
        GgufKey("expert_group_count", "n_group", write=lambda config: experts_spec(config).routing.groups),
        GgufKey("moe_latent_size", "moe_latent_size"),
        SCALE_KEY,
        NORM_KEY,
    ),
    by_layer=BY_LAYER,
    gating=(SIGMOID,),
    epsilon_field="layer_norm_epsilon",
    read_config=lambda model, config: read_layers(model, config, "moe"),
    write_keys=_write_keys,
)
