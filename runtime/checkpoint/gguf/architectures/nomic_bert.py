"""Nomic Embed 1 and 1.5: an encoder with rotary embedding and a gated MLP; read only."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, Architecture
from mycli.runtime.checkpoint.gguf.architectures.bert import encoder_config
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule

ARCHITECTURE = Architecture(
    name="nomic-bert",
    model_type="nomic_bert",
    layer_tensors={
        "attn_qkv": TensorRule("attn.Wqkv"),
        "attn_output": TensorRule("attn.out_proj"),
        "attn_output_norm": TensorRule("norm1"),
        "ffn_gate": TensorRule("mlp.fc12"),
        "ffn_up": TensorRule("mlp.fc11"),
        "ffn_down": TensorRule("mlp.fc2"),
        "layer_output_norm": TensorRule("norm2"),
    },
    model_tensors={
        "token_embd": TensorRule("model.embed_tokens"),
        "token_embd_norm": TensorRule("emb_ln"),
        "token_types": TensorRule("embeddings.token_type_embeddings"),
    },
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_eps",
    read_config=lambda model, config: encoder_config(model, "silu", type_vocab_size="token_types.weight"),
)
