"""Falcon (7B, 11B, 40B, 180B): attention and a GELU MLP in parallel after one LayerNorm or one each, q, k, v joined.

Falcon-RW and the other models with attention biases by distance (ALiBi) are refused.
"""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.utils.json_fields import Fields

_KEYS = {
    "activation": "hidden_act",
    "ffn_hidden_size": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "n_layer": "num_hidden_layers",
}


@dataclass(frozen=True)
class FalconDecoderLayers:
    """Builds the layers. large: as in all but 7B, keys have groups, whose rows `restored_weights` takes apart."""

    large: bool
    norms: int

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        llama, prefix, hidden = llama_layer(config, index), f"model.layers.{index}", config.hidden_size
        attention, mlp, name = llama.attention, llama.dense_mlp, f"{prefix}.self_attention"
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        qkv: tuple[LinearSpec, ...] = (LinearSpec(f"{name}.query_key_value", rows, hidden, config.qkv_bias),)
        if self.large:
            parts = zip(attention.qkv, "qkv", strict=True)
            qkv = tuple(replace(linear, name=f"{name}.{part}_proj") for linear, part in parts)
        norm, mlp_norm = attention.norm, None
        if self.norms == 2:
            norm, mlp_norm = (config.norm_spec(f"{prefix}.ln_{part}") for part in ("attn", "mlp"))
        up = replace(mlp.gate_up[0], name=f"{prefix}.mlp.dense_h_to_4h")
        down = replace(mlp.down, name=f"{prefix}.mlp.dense_4h_to_h")
        return replace(
            llama,
            mixer=replace(attention, norm=norm, qkv=qkv, o=replace(attention.o, name=f"{name}.dense")),
            mlp=replace(mlp, norm=mlp_norm, gate_up=(up,), down=down),
            parallel=True,
        )


def read(raw: Fields) -> ModelConfig:
    # The size of the MLP has another name; transformers reads none of this one.
    read_keys = {key: value for key, value in raw.values.items() if key != "intermediate_size"}
    raw = hf_config.renamed(Fields(read_keys, raw.source), _KEYS)
    large = raw.boolean("new_decoder_architecture", False)
    if not large:
        hf_config.require(raw, multi_query=True, parallel_attn=True)
    if not raw.has("intermediate_size"):  # absent or null
        raw = Fields({**raw.values, "intermediate_size": 4 * raw.integer("hidden_size")}, raw.source)
    raw = hf_config.with_defaults(
        raw,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=11,
        eos_token_id=11,
    )
    fields = hf_config.common(raw, handled=("parallel_attn",), activations={"gelu": "gelu"})
    bias = raw.boolean("bias", False)
    norms = raw.integer("num_ln_in_parallel_attn", 2 if large else 1, high=2)
    if norms == 2 and not large:  # in 7B, transformers reads the second norm and does not use it
        raise raw.fail("num_ln_in_parallel_attn", "= 2 is not supported without new_decoder_architecture")
    return ModelConfig(
        **{**fields, "kv_heads": raw.integer("num_kv_heads", fields["heads"], high=1 << 16) if large else 1},
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        mlp_gate=False,
        layer_norm=True,
        norm_bias=True,
        stored_prefixes=(
            ("transformer.h.", "model.layers."),
            ("transformer.word_embeddings.", "model.embed_tokens."),
            ("transformer.ln_f.", "model.norm."),
        ),
        build_layer=FalconDecoderLayers(large, norms),
    )
