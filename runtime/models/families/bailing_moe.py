"""Ling and Ring 1 to 2.0 (lite, mini, flash): q, k and v in one tensor, routed experts and shared experts."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts, read_routing
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None)


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, name = llama_layer(config, index), f"model.layers.{index}.attention"
    rows = (config.heads + 2 * config.kv_heads) * config.head_dim
    attention = replace(
        llama.attention,
        qkv=(LinearSpec(f"{name}.query_key_value", rows, config.hidden_size, config.qkv_bias),),
        q_norm=config.norm_spec(f"{name}.query_layernorm", config.head_dim) if config.qk_norm else None,
        k_norm=config.norm_spec(f"{name}.key_layernorm", config.head_dim) if config.qk_norm else None,
        o=replace(llama.attention.o, name=f"{name}.dense"),
    )
    # The MTP head is one more layer.
    return LayerSpec(index, attention, llama.mlp, ignored_prefixes=(f"model.layers.{config.layers}.",))


def read(raw: Fields) -> ModelConfig:
    hf_config.require(raw, use_bias=False, norm_head=False, norm_softmax=False)
    # The defaults of the two versions' code differ.
    raw.number("rms_norm_eps")
    top_k = raw.integer("num_experts_per_tok")
    # Only the second version's files have scores with a correction bias.
    scoring = raw.text(
        "score_function", "sigmoid" if raw.boolean("moe_router_enable_expert_bias", False) else "softmax"
    )
    if scoring not in ("sigmoid", "softmax"):
        raise raw.fail("score_function", f"{scoring!r:.40} is not supported (sigmoid, softmax)")
    sigmoid = scoring == "sigmoid"
    hf_config.require(raw, moe_router_enable_expert_bias=sigmoid)
    fields = hf_config.common(raw, handled=("partial_rotary_factor", *EXPERT_KEYS))
    count, _ = read_expert_counts(raw, "num_experts", fields["layers"], default=(256, top_k))
    size = raw.integer("moe_intermediate_size")
    shared = raw.integer("moe_shared_expert_intermediate_size", size)
    mixture = MoeLayers(
        count,
        read_routing(raw, count, top_k, "sigmoid" if sigmoid else "softmax"),
        size,
        replace(_NAMES, correction_bias="gate.expert_bias") if sigmoid else _NAMES,
        dense=frozenset(range(raw.integer("first_k_dense_replace", 0, low=0, high=fields["layers"]))),
        shared=shared * raw.integer("num_shared_experts", 0, low=0, high=count),
        base=layer,
    )
    return ModelConfig(
        **fields,
        qkv_bias=raw.boolean("use_qkv_bias", False),
        qk_norm=raw.boolean("use_qk_norm", False),
        rotary_dim=rotary_dim(raw, fields["head_dim"]),
        stored_prefixes=(("model.word_embeddings.", "model.embed_tokens."),),
        build_layer=mixture,
    )
