"""BitNet b1.58: Llama with norms before the output projection of attention and before `down`."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures.command_r import TIED_TENSORS
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

ARCHITECTURE = Architecture(
    name="bitnet",
    model_type="bitnet",
    written_types=("bitnet",),
    requires=(
        HIDDEN_WIDE_HEADS,
        # The 2B-4T model has relu2, and files of an architecture that llama.cpp does not read.
        Requirement("hidden_act = silu", lambda config: config.activation == "silu"),
    ),
    biases=(),
    layer_tensors={
        **LLAMA_TENSORS,
        "attn_sub_norm": TensorRule("self_attn.attn_sub_norm"),
        "ffn_sub_norm": TensorRule("mlp.ffn_sub_norm"),
    },
    model_tensors=TIED_TENSORS,
)
