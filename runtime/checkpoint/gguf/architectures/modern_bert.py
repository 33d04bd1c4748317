"""ModernBERT encoders, read only: most layers have a window to both sides and a rope of their own."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.rope import sliding_rope_parameters
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule

_MEAN, _CLS = 1, 2  # classifier.pooling_type; of a file that does not say, llama.cpp takes the mean


def _read_config(model: GgufModel, config: Config) -> Config:
    fields: Config = {
        "hidden_activation": model.text("hidden_activation", "gelu"),
        "use_bidirectional_attention": True,
        "rope_parameters": sliding_rope_parameters(model, config["rope_parameters"]),
    }
    if not model.integer("attention.sliding_window", 0):
        fields["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    head = model.tensors.get("cls.output.weight")
    if head is None:
        return fields
    pooling = model.integer("classifier.pooling_type", _MEAN)
    if pooling not in (_MEAN, _CLS):
        raise model.metadata.fail(model.key("classifier.pooling_type"), f"= {pooling} is not supported")
    return {
        **fields,
        "architectures": ["ModernBertForSequenceClassification"],
        "num_labels": head.shape[0] if len(head.shape) > 1 else 1,
        "classifier_pooling": "mean" if pooling == _MEAN else "cls",
        "classifier_bias": "cls.bias" in model.tensors,
    }


ARCHITECTURE = Architecture(
    name="modern-bert",
    model_type="modernbert",
    layer_tensors={
        "attn_norm": TensorRule("attn_norm"),
        "attn_qkv": TensorRule("attn.Wqkv"),
        "attn_output": TensorRule("attn.Wo"),
        "ffn_norm": TensorRule("mlp_norm"),
        "ffn_up": TensorRule("mlp.Wi"),
        "ffn_down": TensorRule("mlp.Wo"),
    },
    model_tensors={
        "token_embd": TensorRule("model.embed_tokens"),
        "token_embd_norm": TensorRule("model.embeddings.norm"),
        "output_norm": TensorRule("model.final_norm"),
        "cls": TensorRule("head.dense"),
        "cls.norm": TensorRule("head.norm"),
        "cls.output": TensorRule("classifier"),
    },
    keys=(GgufKey("attention.sliding_window", "local_attention"),),
    slides=lambda layer: layer % 3 != 0,
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="norm_eps",
    read_config=_read_config,
)
