"""Jina Embeddings 3, an encoder which computes embeddings: XLM-RoBERTa with rotary embedding.

The adapters of its tasks are files of their own, and are not read with it.
"""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import ActivationName, LinearSpec, PositionSpec
from mycli.runtime.utils.json_fields import Fields

_GELU: dict[str, ActivationName] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_PREFIXES = (
    ("embeddings.word_embeddings.", "model.embed_tokens."),
    ("embeddings.", "model.embeddings."),
    ("emb_ln.", "model.emb_ln."),
    ("encoder.layers.", "model.layers."),
)


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, name, hidden = llama_layer(config, index), f"model.layers.{index}", config.hidden_size
    attention, mlp = llama.attention, llama.dense_mlp
    # A norm after a sum is the norm of the next part, which adds to its output.
    before = f"model.layers.{index - 1}.norm2" if index else "model.emb_ln"
    return replace(
        llama,
        mixer=replace(
            attention,
            norm=config.norm_spec(before),
            qkv=(LinearSpec(f"{name}.mixer.Wqkv", 3 * hidden, hidden, bias=True),),
            o=replace(attention.o, name=f"{name}.mixer.out_proj"),
            normed_residual=True,
        ),
        mlp=replace(
            mlp,
            norm=config.norm_spec(f"{name}.norm1"),
            gate_up=(replace(mlp.gate_up[0], name=f"{name}.mlp.fc1"),),
            down=replace(mlp.down, name=f"{name}.mlp.fc2"),
            normed_residual=True,
        ),
        ignored_prefixes=("lm_head.", "pooler.", "roberta.pooler."),
    )


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.renamed(raw, {"layer_norm_eps": "rms_norm_eps"})
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, dtype=raw.text("torch_dtype", "float32"))
    raw = hf_config.with_defaults(raw, rope_theta=20000.0)
    if hf_config.reranker_class(raw) is not None:
        raise raw.fail("architectures", "a classifier of this family is not supported", "run it with transformers")
    fields = hf_config.common(raw, handled=("use_bidirectional_attention",), activations=_GELU)
    types, hidden = raw.integer("type_vocab_size", 1), fields["hidden_size"]
    return ModelConfig(
        **{**fields, "tie_embeddings": True},  # has no head
        output_bias=True,
        mlp_bias=True,
        mlp_gate=False,
        layer_norm=True,
        norm_bias=True,
        positions=PositionSpec(None, LinearSpec("model.embeddings.token_type_embeddings", types, hidden)),
        final_norm=f"model.layers.{fields['layers'] - 1}.norm2",
        stored_prefixes=tuple((f"{root}{stored}", name) for root in ("", "roberta.") for stored, name in _PREFIXES),
        build_layer=layer,
        bidirectional=True,
    )
