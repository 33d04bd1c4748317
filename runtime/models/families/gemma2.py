"""Gemma 2: norms before and after each part with gain 1 + w, softcapped scores and logits, GELU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import ActivationName
from mycli.runtime.utils.json_fields import Fields

GELU: dict[str, ActivationName] = {"gelu_pytorch_tanh": "gelu_tanh"}
_HANDLED = ("attn_logit_softcapping", "final_logit_softcapping", "rope_parameters")


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    after_attention = config.norm_spec(f"{prefix}.post_attention_layernorm")
    before_mlp = config.norm_spec(f"{prefix}.pre_feedforward_layernorm")
    after_mlp = config.norm_spec(f"{prefix}.post_feedforward_layernorm")
    return LayerSpec(
        index,
        replace(llama.attention, output_norm=after_attention),
        replace(llama.dense_mlp, norm=before_mlp, output_norm=after_mlp),
    )


def softcap(raw: Fields, key: str) -> float | None:
    return raw.number(key, low=1e-3, high=1e6) if raw.has(key) else None


def gemma_fields(raw: Fields, handled: Sequence[str] = ()) -> dict[str, Any]:
    """Return the ModelConfig fields that Gemma 2 and 3 share."""
    return {
        **hf_config.common(raw, handled=(*_HANDLED, *handled), activations=GELU),
        **hf_config.attention_biases(raw),
        "norm_offset": 1.0,
        "attention_scale": raw.number("query_pre_attn_scalar", low=1e-3) ** -0.5,
        "attention_softcap": softcap(raw, "attn_logit_softcapping"),
        "logit_softcap": softcap(raw, "final_logit_softcapping"),
        "embedding_scale": raw.integer("hidden_size") ** 0.5,
        "round_embedding_scale": True,
        "build_layer": layer,
    }


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        head_dim=256,
        num_key_value_heads=4,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=4096,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=2,
    )
    fields = gemma_fields(raw)
    sliding = hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(2))
    return ModelConfig(**fields, windows=hf_config.layer_windows(raw, sliding))
