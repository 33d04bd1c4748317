"""Gemma 2: four norms a layer, capped logits, a sliding window in every second layer."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.tensor_rules import GAIN_PLUS_ONE, LLAMA_TENSORS, MODEL_TENSORS, TensorRule

GEMMA_MODEL_TENSORS = {**MODEL_TENSORS, "output_norm": TensorRule("model.norm", change=GAIN_PLUS_ONE)}
GEMMA_LAYER_TENSORS = {
    **LLAMA_TENSORS,
    "attn_norm": TensorRule("input_layernorm", change=GAIN_PLUS_ONE),
    "attn_q_norm": TensorRule("self_attn.q_norm", change=GAIN_PLUS_ONE),
    "attn_k_norm": TensorRule("self_attn.k_norm", change=GAIN_PLUS_ONE),
    "post_attention_norm": TensorRule("post_attention_layernorm", change=GAIN_PLUS_ONE),
    "ffn_norm": TensorRule("pre_feedforward_layernorm", change=GAIN_PLUS_ONE),
    "post_ffw_norm": TensorRule("post_feedforward_layernorm", change=GAIN_PLUS_ONE),
}


def gemma_attention(config: Config, largest: int) -> Config:
    """Return the config fields that Gemma files have no key for; `largest`: layers of the family's largest model."""
    # llama.cpp scales queries by 1 / sqrt(head_dim), except in the 27B models: there by 1 / sqrt(hidden / heads).
    share = config["hidden_size"] // config["num_attention_heads"]
    scalar = share if config["num_hidden_layers"] == largest else config["head_dim"]
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _read_config(model: GgufModel, config: Config) -> Config:
    return gemma_attention(config, largest=46)


ARCHITECTURE = Architecture(
    name="gemma2",
    model_type="gemma2",
    written_types=("gemma2",),
    biases=(),
    layer_tensors=GEMMA_LAYER_TENSORS,
    model_tensors=GEMMA_MODEL_TENSORS,
    keys=(
        WINDOW_KEY,
        GgufKey(
            "attn_logit_softcapping",
            "attn_logit_softcapping",
            float,
            default=50.0,
            write=lambda config: float(config.attention_softcap or 0.0),
        ),
        GgufKey(
            "final_logit_softcapping",
            "final_logit_softcapping",
            float,
            default=30.0,
            write=lambda config: float(config.logit_softcap or 0.0),
        ),
    ),
    slides=lambda layer: layer % 2 == 0,
    read_config=_read_config,
)
