"""StableLM 3B and StableLM 2: Llama with LayerNorms, a part of each head rotated, and optional parallel parts."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, NORM_BIASES, QKV_BIASES, Architecture
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

_HEAD_NORM = "self_attn.{}_layernorm.norms.{{expert}}"
ARCHITECTURE = Architecture(
    name="stablelm",
    model_type="stablelm",
    written_types=("stablelm",),
    requires=(HIDDEN_WIDE_HEADS,),
    biases=(*QKV_BIASES, *NORM_BIASES),
    own_head=True,
    layer_tensors={
        **LLAMA_TENSORS,
        "attn_q_norm": TensorRule(_HEAD_NORM.format("q"), count_key="attention.head_count"),
        "attn_k_norm": TensorRule(_HEAD_NORM.format("k"), count_key="attention.head_count_kv"),
    },
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_eps",
    read_config=lambda model, config: {
        "use_qkv_bias": "blk.0.attn_q.bias" in model.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in model.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in model.tensors,
    },
    write_keys=lambda config: {"use_parallel_residual": config.layer_specs[0].parallel},
)
