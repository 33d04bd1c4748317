"""Maincoder (1B): Llama with interleaved rotary embedding, and per-head norms of q and k after it."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}.feed_forward"
    attention, mlp = llama.attention, llama.dense_mlp
    q_norm, k_norm = (norm and replace(norm, pairs=True) for norm in (attention.q_norm, attention.k_norm))

    def renamed(linear: LinearSpec) -> LinearSpec:
        return replace(linear, name=f"{prefix}.{linear.name.rpartition('.')[2]}")

    gate_up = tuple(renamed(linear) for linear in mlp.gate_up)
    return replace(
        llama,
        mixer=replace(attention, q_norm=q_norm, k_norm=k_norm, norm_after_rope=True),
        mlp=replace(mlp, gate_up=gate_up, down=renamed(mlp.down)),
    )


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw, head_dim=96, num_key_value_heads=4, rms_norm_eps=1e-5, rope_theta=1000000.0, tie_word_embeddings=True
    )
    hf_config.require(raw, attention_bias=False, mlp_bias=False)
    fields = hf_config.common(raw)
    # As in Llama 4, from whose code it is derived, the size of dense MLPs has a key of its own.
    size = raw.integer("intermediate_size_mlp", fields["intermediate_size"])
    return ModelConfig(
        **{**fields, "intermediate_size": size},
        qk_norm=raw.boolean("use_qk_norm", True),
        interleaved=True,
        build_layer=layer,
    )
