"""K-EXAONE (236B-A23B): sigmoid-routed experts with a correction bias and a shared expert, EXAONE 4's windows."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import (
    EXPERT_KEYS,
    ExpertNames,
    MoeLayers,
    read_dense_layers,
    read_expert_counts,
    read_routing,
)
from mycli.runtime.models.families import exaone4, glm4_moe
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None, correction_bias="e_score_correction_bias")


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, sliding_window=4096, rms_norm_eps=1e-5, routed_scaling_factor=2.5)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "num_experts", fields["layers"], default=(64, 8))
    size = raw.integer("moe_intermediate_size", 1024)
    # Checkpoints contain an MTP head, which is not used.
    mixture = MoeLayers(
        count,
        read_routing(raw, count, top_k),
        size,
        _NAMES,
        dense=read_dense_layers(raw, fields["layers"], first=1),
        shared=size * raw.integer("num_shared_experts", 1, high=count),
        base=glm4_moe.layer,
    )
    return ModelConfig(**fields, **exaone4.windows_and_ropes(raw, fields), qk_norm=True, build_layer=mixture)
