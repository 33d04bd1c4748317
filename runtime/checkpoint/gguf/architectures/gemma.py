"""Gemma 1: Llama with gains stored as offsets from one, a GELU gate, and scaled embeddings."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures.gemma2 import GEMMA_MODEL_TENSORS
from mycli.runtime.checkpoint.gguf.tensor_rules import GAIN_PLUS_ONE, LLAMA_TENSORS, TensorRule

ARCHITECTURE = Architecture(
    name="gemma",
    model_type="gemma",
    written_types=("gemma",),
    biases=(),
    layer_tensors={
        **LLAMA_TENSORS,
        "attn_norm": TensorRule("input_layernorm", change=GAIN_PLUS_ONE),
        "ffn_norm": TensorRule("post_attention_layernorm", change=GAIN_PLUS_ONE),
    },
    # llama.cpp takes the embedding as the head.
    model_tensors={name: rule for name, rule in GEMMA_MODEL_TENSORS.items() if name != "output"},
    read_config=lambda model, config: {"hidden_act": "gelu_pytorch_tanh"},
)
