"""BERT, RoBERTa and XLM-RoBERTa encoders, read only; row 0 of their position tables is that of the first token."""

from collections.abc import Mapping

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule
from mycli.runtime.checkpoint.safetensors_header import damaged


def _rows(model: GgufModel, tables: Mapping[str, str]) -> Config:
    rows: Config = {}
    for field, name in tables.items():
        table = model.tensors.get(name)
        if table is None or len(table.shape) != 2:
            raise damaged(f"{name} is not a matrix of the file")
        rows[field] = table.shape[0]
    return rows


def encoder_config(model: GgufModel, activation: str, **tables: str) -> Config:
    """Return the config fields of an encoder; tables: fields that are the number of rows of a tensor, by its name."""
    return {"hidden_act": activation, "use_bidirectional_attention": True, **_rows(model, tables)}


def _read_config(model: GgufModel, config: Config) -> Config:
    tables = {"max_position_embeddings": "position_embd.weight", "type_vocab_size": "token_types.weight"}
    config = encoder_config(model, "gelu", **tables)
    head = model.tensors.get("cls.output.weight")
    if head is None:
        return config
    if "cls.weight" not in model.tensors:
        problem = "is a head without cls.weight: llama.cpp's converter leaves out the pooler of BERT, which it needs"
        raise model.metadata.fail("cls.output.weight", problem, "use the repository that holds safetensors files")
    labels = head.shape[0] if len(head.shape) > 1 else 1
    return {**config, "architectures": ["RobertaForSequenceClassification"], "num_labels": labels}


ARCHITECTURE = Architecture(
    name="bert",
    model_type="bert",
    layer_tensors={
        "attn_q": TensorRule("attention.self.query"),
        "attn_k": TensorRule("attention.self.key"),
        "attn_v": TensorRule("attention.self.value"),
        "attn_output": TensorRule("attention.output.dense"),
        "attn_output_norm": TensorRule("attention.output.LayerNorm"),
        "ffn_up": TensorRule("intermediate.dense"),
        "ffn_down": TensorRule("output.dense"),
        "layer_output_norm": TensorRule("output.LayerNorm"),
    },
    model_tensors={
        "token_embd": TensorRule("model.embed_tokens"),
        "token_embd_norm": TensorRule("model.embeddings.LayerNorm"),
        "position_embd": TensorRule("model.embeddings.position_embeddings"),
        "token_types": TensorRule("model.embeddings.token_type_embeddings"),
        "cls": TensorRule("classifier.dense"),
        "cls.output": TensorRule("classifier.out_proj"),
    },
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_eps",
    read_config=_read_config,
)
