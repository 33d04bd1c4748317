"""ModernBERT encoders, for embeddings (GTE, Nomic, Granite) and reranking: windows in most layers, gated MLPs."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import layer_type_ropes
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import ActivationName, ClassifierSpec, LinearSpec
from mycli.runtime.utils.json_fields import Fields

_ACTIVATIONS: dict[str, ActivationName] = {"gelu": "gelu", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Of files of the class without a head, and the embedding's name.
_PREFIXES = (
    ("model.embeddings.tok_embeddings.", "model.embed_tokens."),
    ("embeddings.tok_embeddings.", "model.embed_tokens."),
    ("embeddings.", "model.embeddings."),
    ("layers.", "model.layers."),
    ("final_norm.", "model.final_norm."),
)
_HEAD = ("head.", "decoder.")  # of training


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, name, hidden = llama_layer(config, index), f"model.layers.{index}", config.hidden_size
    inner = config.intermediate_size
    attention = replace(
        llama.attention,
        # The first layer has none: the norm of the embeddings is in its place, and its output is what is added to.
        norm=config.norm_spec(f"{name}.attn_norm" if index else "model.embeddings.norm"),
        normed_residual=index == 0,
        qkv=(LinearSpec(f"{name}.attn.Wqkv", 3 * hidden, hidden, config.qkv_bias),),
        o=replace(llama.attention.o, name=f"{name}.attn.Wo"),
    )
    mlp = replace(
        llama.dense_mlp,
        norm=config.norm_spec(f"{name}.mlp_norm"),
        gate_up=(LinearSpec(f"{name}.mlp.Wi", 2 * inner, hidden, config.mlp_bias),),
        down=replace(llama.dense_mlp.down, name=f"{name}.mlp.Wo"),
    )
    unread = _HEAD if config.classifier is None else ()
    return replace(llama, mixer=attention, mlp=mlp, ignored_prefixes=unread)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.renamed(
        Fields({name: value for name, value in raw.values.items() if name != "layer_norm_eps"}, raw.source),
        {"norm_eps": "rms_norm_eps"},
    )
    dtype = raw.text("torch_dtype", "float32")
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, hidden_activation="gelu", dtype=dtype)
    layers = raw.integer("num_hidden_layers")
    raw = _with_ropes(raw)
    handled = ("use_bidirectional_attention", "rope_parameters")
    fields = hf_config.common(raw, handled=handled, activations=_ACTIVATIONS)
    every = raw.integer("global_attn_every_n_layers", 3)
    sliding = hf_config.layers_of_type(raw, layers, lambda index: index % every != 0)
    # As many tokens before a token as after it.
    window = raw.integer("local_attention", 128) // 2 + 1
    biases = hf_config.attention_biases(raw)
    config = ModelConfig(
        **{**fields, "tie_embeddings": True},  # has no head
        **biases,
        mlp_bias=raw.boolean("mlp_bias", False),
        layer_norm=True,
        norm_bias=raw.boolean("norm_bias", False),
        windows=tuple(window if slides else None for slides in sliding) if any(sliding) else (),
        layer_ropes=layer_type_ropes(raw, fields["head_dim"], sliding),
        final_norm="model.final_norm",
        stored_prefixes=_PREFIXES,
        build_layer=layer,
        bidirectional=True,
    )
    return replace(config, classifier=_classifier(raw, config))


def _with_ropes(raw: Fields) -> Fields:
    # Published files have a theta for each kind of layer; transformers 5 writes a section for each.
    section = raw.object("rope_parameters").values
    thetas = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}
    scaling = raw.object("rope_scaling").values
    ropes = {}
    for kind, (key, default) in thetas.items():
        stored = section.get(kind) if isinstance(section.get(kind), dict) else None
        ropes[kind] = {"rope_type": "default", "rope_theta": raw.number(key, default), **scaling, **(stored or {})}
    values = {name: value for name, value in raw.values.items() if name != "rope_scaling"}
    return Fields({**values, "rope_parameters": ropes}, raw.source)


def _classifier(raw: Fields, config: ModelConfig) -> ClassifierSpec | None:
    if hf_config.reranker_class(raw) is None:
        return None
    hf_config.require(raw, classifier_activation="gelu")
    pooling, hidden = raw.text("classifier_pooling", "cls"), config.hidden_size
    if pooling not in ("cls", "mean"):
        raise raw.fail("classifier_pooling", f"= {pooling!r:.40} is not supported, only 'cls' and 'mean'")
    return ClassifierSpec(
        LinearSpec("head.dense", hidden, hidden, bias=raw.boolean("classifier_bias", False)),
        LinearSpec("classifier", 1, hidden, bias=True),
        activation="gelu",
        norm=config.norm_spec("head.norm"),
        mean=pooling == "mean",
    )
