"""Apertus: norms of queries and keys by head, and an MLP without a gate; the parameters of xIELU are metadata."""

from mycli.runtime.checkpoint.gguf.architecture import QKV_BIASES, Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

ARCHITECTURE = Architecture(
    name="apertus",
    model_type="apertus",
    written_types=("apertus",),
    requires=(WHOLE_ROTATION,),
    biases=(*QKV_BIASES, "attn_output"),
    own_head=True,
    layer_tensors={
        **LLAMA_TENSORS,
        "attn_norm": TensorRule("attention_layernorm"),
        "ffn_norm": TensorRule("feedforward_layernorm"),
    },
    key_tensors={f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")},
    read_config=lambda model, config: {**linear_biases(model, config), "hidden_act": "xielu"},
)
