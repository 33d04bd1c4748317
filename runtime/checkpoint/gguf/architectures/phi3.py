"""Phi-3, 3.5 and 4-mini: q, k and v in one tensor, gate and up in another; longrope in the larger contexts."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, GgufKey
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

PHI3_KEYS = (
    GgufKey(
        "attention.sliding_window",
        "sliding_window",
        write=lambda config: next(iter(config.windows), None) or 0,
    ),
    GgufKey(
        "rope.scaling.original_context_length",
        "original_max_position_embeddings",
        required=True,
        applies=lambda config: config["rope_parameters"]["rope_type"] == "longrope",
        write=lambda config: config.rope_scaling.original_context or config.max_context,
    ),
)
ARCHITECTURE = Architecture(
    name="phi3",
    model_type="phi3",
    written_types=("phi3",),
    requires=(
        HIDDEN_WIDE_HEADS,
        # It reads the key and ignores it.
        Requirement(
            "a sliding window of at least the whole context",
            lambda config: all(window is None or window >= config.max_context for window in config.windows),
        ),
    ),
    layer_tensors={
        **LLAMA_TENSORS,
        "attn_qkv": TensorRule("self_attn.qkv_proj"),
        "ffn_up": TensorRule("mlp.gate_up_proj"),
    },
    keys=PHI3_KEYS,
)
