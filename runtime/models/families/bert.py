"""BERT encoders, for embeddings (BGE, E5, GTE, MiniLM, mxbai, Snowflake Arctic) and reranking; norms follow sums."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import ActivationName, ClassifierSpec, LinearSpec, PositionSpec
from mycli.runtime.utils.json_fields import Fields

_GELU: dict[str, ActivationName] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
# Of the class without a head, which sentence-transformers saves; `root` is before them in files of other classes.
_PREFIXES = (
    ("embeddings.word_embeddings.", "model.embed_tokens."),
    ("embeddings.", "model.embeddings."),
    ("encoder.layer.", "model.layers."),
)
# Heads of training, and the positions 0, 1, 2, ... that older versions stored.
_UNREAD = ("cls.", "lm_head.", "model.embeddings.position_ids")
_POOLERS = ("pooler.", "bert.pooler.", "roberta.pooler.")


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, name = llama_layer(config, index), f"model.layers.{index}"
    # A norm after a sum is the norm of the next part, which adds to its output.
    before = f"model.layers.{index - 1}.output" if index else "model.embeddings"
    attention = replace(
        llama.attention,
        norm=config.norm_spec(f"{before}.LayerNorm"),
        qkv=tuple(
            replace(linear, name=f"{name}.attention.self.{part}")
            for linear, part in zip(llama.attention.qkv, ("query", "key", "value"), strict=True)
        ),
        o=replace(llama.attention.o, name=f"{name}.attention.output.dense"),
        normed_residual=True,
    )
    mlp = replace(
        llama.dense_mlp,
        norm=config.norm_spec(f"{name}.attention.output.LayerNorm"),
        gate_up=(replace(llama.dense_mlp.gate_up[0], name=f"{name}.intermediate.dense"),),
        down=replace(llama.dense_mlp.down, name=f"{name}.output.dense"),
        normed_residual=True,
    )
    read = "" if config.classifier is None else config.classifier.dense.name
    unread = (*_UNREAD, *(prefix for prefix in _POOLERS if not read.startswith(prefix)))
    return replace(llama, mixer=attention, mlp=mlp, ignored_prefixes=unread)


def read(raw: Fields) -> ModelConfig:
    return read_bert(raw, "bert")


def read_bert(raw: Fields, root: str, first_position: int = 0) -> ModelConfig:
    """Read the config of an encoder whose files may name tensors `root`.*; first_position: row of the first token."""
    raw = hf_config.renamed(raw, {"layer_norm_eps": "rms_norm_eps"})
    # Files without a dtype are in fp32, in which transformers writes by default.
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-12, dtype=raw.text("torch_dtype", "float32"))
    hf_config.require(raw, position_embedding_type="absolute", is_decoder=False)
    fields = hf_config.common(raw, handled=("use_bidirectional_attention",), activations=_GELU)
    hidden, rows = fields["hidden_size"], fields["max_context"]
    if rows <= first_position:
        raise raw.fail("max_position_embeddings", f"= {rows} leaves no position after {first_position - 1}")
    table = LinearSpec("model.embeddings.position_embeddings", rows, hidden)
    types = LinearSpec("model.embeddings.token_type_embeddings", raw.integer("type_vocab_size", 2), hidden)
    return ModelConfig(
        **{**fields, "max_context": rows - first_position, "tie_embeddings": True},  # has no head
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        mlp_gate=False,
        layer_norm=True,
        norm_bias=True,
        layer_ropes=(None,) * fields["layers"],
        positions=PositionSpec(table, types, first_position),
        final_norm=f"model.layers.{fields['layers'] - 1}.output.LayerNorm",
        stored_prefixes=(*_PREFIXES, *((f"{root}.{stored}", name) for stored, name in _PREFIXES)),
        build_layer=layer,
        bidirectional=True,
        classifier=_classifier(raw, hidden),
    )


def _classifier(raw: Fields, hidden: int) -> ClassifierSpec | None:
    name = hf_config.reranker_class(raw)
    if name is None:
        return None
    dense, out = ("bert.pooler.dense", "classifier")
    if name.endswith(("RobertaForSequenceClassification", "MPNetForSequenceClassification")):
        dense, out = ("classifier.dense", "classifier.out_proj")
    return ClassifierSpec(LinearSpec(dense, hidden, hidden, bias=True), LinearSpec(out, 1, hidden, bias=True))
