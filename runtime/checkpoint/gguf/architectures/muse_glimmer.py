"""Muse Glimmer: norms of queries and keys whose gains hold the scale of queries, a gate, a window."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.architectures.gemma2 import GEMMA_LAYER_TENSORS
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS, TensorRule
from mycli.runtime.models.families.muse_glimmer_text import QK_NORM_GAINS

_PATTERN = "attention.sliding_window_pattern"


def _read_config(model: GgufModel, config: Config) -> Config:
    fields: Config = {QK_NORM_GAINS: True, "attention_bias": "blk.0.attn_q.bias" in model.tensors}
    if model.has(_PATTERN) and not isinstance(model.metadata.values[model.key(_PATTERN)], int):
        # As in llama.cpp, the layers with a window rotate.
        fields["layer_rope_theta"] = list(model.layer_values(_PATTERN, config["num_hidden_layers"]))
    return fields


ARCHITECTURE = Architecture(
    name="muse-glimmer",
    model_type="muse_glimmer_text",
    layer_tensors={
        **GEMMA_LAYER_TENSORS,
        **{name: PAIRED_TENSORS[name] for name in ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm")},
        "attn_gate": TensorRule("self_attn.gate_proj"),
    },
    keys=(
        WINDOW_KEY,
        GgufKey("logit_scale", "output_multiplier", float, required=True),
        GgufKey("final_logit_softcapping", "final_logit_softcapping", float),
    ),
    slides=lambda layer: (layer + 1) % 4 != 0,
    pattern=True,
    read_config=_read_config,
)
