"""GTE encoders, which compute embeddings (Arctic Embed 2 M): BERT with rotary embedding and a gated GELU MLP."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import ActivationName, ClassifierSpec, LinearSpec, PositionSpec, RopeScaling
from mycli.runtime.utils.json_fields import Fields

_ACTIVATIONS: dict[str, ActivationName] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_PREFIXES = (
    ("embeddings.word_embeddings.", "model.embed_tokens."),
    ("embeddings.", "model.embeddings."),
    ("encoder.layer.", "model.layers."),
)
_ROOTS = ("", "new.", "gte.")  # of the class without a head, and of the others
_NEUTRAL = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
}


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, name = llama_layer(config, index), f"model.layers.{index}"
    attention, mlp, hidden = llama.attention, llama.dense_mlp, config.hidden_size
    # A norm after a sum is the norm of the next part, which adds to its output.
    before = f"model.layers.{index - 1}.mlp_ln" if index else "model.embeddings.LayerNorm"
    pooler = [] if config.classifier is None else [config.classifier.dense.name]
    heads = ("classifier.",) if config.classifier is None else ()
    poolers = (f"{root}pooler." for root in _ROOTS if f"{root}pooler.dense" not in pooler)
    return replace(
        llama,
        mixer=replace(
            attention,
            norm=config.norm_spec(before),
            qkv=(LinearSpec(f"{name}.attention.qkv_proj", 3 * hidden, hidden, bias=True),),
            o=replace(attention.o, name=f"{name}.attention.o_proj"),
            normed_residual=True,
        ),
        mlp=replace(
            mlp,
            norm=config.norm_spec(f"{name}.attn_ln"),
            down=replace(mlp.down, bias=True),
            normed_residual=True,
        ),
        ignored_prefixes=("lm_head.", *heads, *poolers),
    )


def read(raw: Fields) -> ModelConfig:
    return read_gte(raw, theta=160000.0)


def read_gte(raw: Fields, theta: float) -> ModelConfig:
    """Read the config of a GTE encoder; theta: the default of rope_theta."""
    raw = hf_config.renamed(raw, {"layer_norm_eps": "rms_norm_eps"})
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-12, dtype=raw.text("torch_dtype", "float32"))
    if not raw.has("rope_parameters"):
        raw = hf_config.with_defaults(raw, rope_theta=theta)
    hf_config.require(raw, **_NEUTRAL)
    ntk = _ntk(raw)
    raw = raw if ntk is None else Fields({**raw.values, "rope_scaling": None}, raw.source)
    fields = hf_config.common(raw, handled=("use_bidirectional_attention",), activations=_ACTIVATIONS)
    fields |= {} if ntk is None else {"rope_scaling": ntk}
    hidden, types = fields["hidden_size"], raw.integer("type_vocab_size", 1, low=0)
    table = LinearSpec("model.embeddings.token_type_embeddings", types, hidden)
    return ModelConfig(
        **{**fields, "tie_embeddings": True},  # has no head
        output_bias=True,
        layer_norm=True,
        norm_bias=True,
        positions=PositionSpec(None, table) if types else None,
        final_norm=f"model.layers.{fields['layers'] - 1}.mlp_ln",
        stored_prefixes=tuple((f"{root}{stored}", name) for root in _ROOTS for stored, name in _PREFIXES),
        build_layer=layer,
        bidirectional=True,
        classifier=_classifier(raw, hidden),
    )


def _ntk(raw: Fields) -> RopeScaling | None:
    # NTK scaling of GTE's own code, in which it is not dynamic.
    section = raw.object("rope_scaling")
    if section.text("rope_type", section.text("type", "")) != "ntk":
        return None
    if section.has("mixed_b"):
        raise section.fail("mixed_b", "is not supported", "run it with transformers or vLLM")
    return RopeScaling("ntk", section.number("factor", low=1.0, high=1e6))


def _classifier(raw: Fields, hidden: int) -> ClassifierSpec | None:
    name = hf_config.reranker_class(raw)
    if name is None:
        return None
    root = "new" if name.startswith("New") else "gte"
    dense = LinearSpec(f"{root}.pooler.dense", hidden, hidden, bias=True)
    return ClassifierSpec(dense, LinearSpec("classifier", 1, hidden, bias=True))
