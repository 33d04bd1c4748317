"""Falcon (7B): multi-query attention and a GELU MLP in parallel after one LayerNorm, q, k and v in one tensor.

Its other layouts are refused: Falcon-RW has attention biases by distance (ALiBi), and in 40B and 180B queries, keys and
values of a group follow one another.
"""

from dataclasses import replace

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
    "n_layer": "num_hidden_layers",
}


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix, hidden = llama_layer(config, index), f"model.layers.{index}", config.hidden_size
    attention, mlp, name = llama.attention, llama.dense_mlp, f"{prefix}.self_attention"
    rows = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = LinearSpec(f"{name}.query_key_value", rows, hidden, config.qkv_bias)
    up = replace(mlp.gate_up[0], name=f"{prefix}.mlp.dense_h_to_4h")
    down = replace(mlp.down, name=f"{prefix}.mlp.dense_4h_to_h")
    return replace(
        llama,
        mixer=replace(attention, qkv=(qkv,), o=replace(attention.o, name=f"{name}.dense")),
        mlp=replace(mlp, norm=None, gate_up=(up,), down=down),
        parallel=True,
    )


def read(raw: Fields) -> ModelConfig:
    # The size of the MLP has another name; transformers reads none of this one.
    read_keys = {key: value for key, value in raw.values.items() if key != "intermediate_size"}
    raw = hf_config.renamed(Fields(read_keys, raw.source), _KEYS)
    hf_config.require(raw, multi_query=True, parallel_attn=True, new_decoder_architecture=False)
    raw = hf_config.with_defaults(
        raw,
        intermediate_size=4 * raw.integer("hidden_size"),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=11,
        eos_token_id=11,
    )
    fields = hf_config.common(raw, handled=("parallel_attn",), activations={"gelu": "gelu"})
    bias = raw.boolean("bias", False)
    return ModelConfig(
        **{**fields, "kv_heads": 1},
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
        build_layer=layer,
    )
