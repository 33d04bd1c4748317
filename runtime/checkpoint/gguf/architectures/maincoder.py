"""Maincoder: interleaved rotation as in its checkpoints, norms of queries and keys after it."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

ARCHITECTURE = Architecture(
    name="maincoder",
    model_type="maincoder",
    written_types=("maincoder",),
    requires=(
        WHOLE_ROTATION,
        Requirement(
            "norms of queries and keys", lambda config: all(layer.attention.q_norm for layer in config.layer_specs)
        ),
    ),
    biases=(),
    layer_tensors={
        **LLAMA_TENSORS,
        "ffn_gate": TensorRule("feed_forward.gate_proj"),
        "ffn_up": TensorRule("feed_forward.up_proj"),
        "ffn_down": TensorRule("feed_forward.down_proj"),
    },
    read_config=lambda model, config: {"use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors},
)
