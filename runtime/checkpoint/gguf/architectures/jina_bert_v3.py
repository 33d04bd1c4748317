"""Jina Embeddings 3: an encoder with rotary embedding, without the adapters of its tasks; read only."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, Architecture
from mycli.runtime.checkpoint.gguf.architectures.bert import encoder_config
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule

ARCHITECTURE = Architecture(
    name="jina-bert-v3",
    model_type="jina_embeddings_v3",
    layer_tensors={
        "attn_qkv": TensorRule("mixer.Wqkv"),
        "attn_output": TensorRule("mixer.out_proj"),
        "attn_output_norm": TensorRule("norm1"),
        "ffn_up": TensorRule("mlp.fc1"),
        "ffn_down": TensorRule("mlp.fc2"),
        "layer_output_norm": TensorRule("norm2"),
    },
    model_tensors={
        "token_embd": TensorRule("model.embed_tokens"),
        "token_embd_norm": TensorRule("model.emb_ln"),
        "token_types": TensorRule("model.embeddings.token_type_embeddings"),
    },
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_eps",
    read_config=lambda model, config: encoder_config(model, "gelu", type_vocab_size="token_types.weight"),
)
