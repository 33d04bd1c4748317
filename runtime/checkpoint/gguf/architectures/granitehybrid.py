"""Granite 4 H with experts: Mamba-2 in the layers without key-value heads, and a shared MLP."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.architectures.granite import FINETUNED, GRANITE_KEYS
from mycli.runtime.checkpoint.gguf.experts import expert_tensors, joined_shared_expert
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.mamba import (
    CONVOLUTION_BIAS,
    EXPANSION_OF_TWO,
    mamba_tensors,
    read_hybrid_fields,
    write_granitehybrid_keys,
)
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec


def shared_mlp_size(config: ModelConfig) -> int:
    mlp = config.layer_specs[0].mlp
    if isinstance(mlp, ExpertsSpec):
        return 0 if mlp.shared is None else mlp.shared.mlp.size
    return config.layer_specs[0].dense_mlp.size


def _experts(config: ModelConfig) -> tuple[int, int]:
    mlp = config.layer_specs[0].mlp
    return (len(mlp.experts), mlp.top_k) if isinstance(mlp, ExpertsSpec) else (0, 0)


SHARED_LENGTH = "expert_shared_feed_forward_length"
TENSORS = {
    **{name: rule for name, rule in PAIRED_TENSORS.items() if name not in ("ffn_gate", "ffn_up", "ffn_down")},
    **mamba_tensors("mamba"),
}


def _read_config(model: GgufModel, config: Config) -> Config:
    heads = model.layer_values("attention.head_count_kv", config["num_hidden_layers"])
    return {
        **read_hybrid_fields(model),
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "position_embedding_type": "rope" if model.boolean(FINETUNED, True) else "nope",
    }


ARCHITECTURE = Architecture(
    name="granitehybrid",
    model_type="granitemoehybrid",
    written_types=("granitemoehybrid",),
    requires=(CONVOLUTION_BIAS, EXPANSION_OF_TWO),
    biases=(*ALL_BIASES, "ssm_conv1d"),
    layer_tensors={
        **TENSORS,
        **expert_tensors("block_sparse_moe", router="router.layer"),
        **joined_shared_expert(size=shared_mlp_size),
    },
    reads=lambda header, experts: experts,
    writes=lambda config: any(isinstance(spec.mlp, ExpertsSpec) for spec in config.layer_specs),
    keys=(
        *GRANITE_KEYS,
        GgufKey(
            "expert_count", "num_local_experts", default=0, required=True, write=lambda config: _experts(config)[0]
        ),
        GgufKey("expert_used_count", "num_experts_per_tok", write=lambda config: _experts(config)[1]),
        GgufKey(SHARED_LENGTH, "shared_intermediate_size", required=True, write=shared_mlp_size),
    ),
    by_layer=("attention.head_count_kv",),
    read_config=_read_config,
    write_keys=write_granitehybrid_keys,
)
