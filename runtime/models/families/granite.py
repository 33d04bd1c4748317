"""Granite 3 and 4, dense: Llama with multipliers of embeddings, of scores, of what each part adds, and of logits."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Granite config.json."""
    return read_granite(raw)


def read_granite(raw: Fields, handled: tuple[str, ...] = ()) -> ModelConfig:
    """Of a config of which the caller does what the keys `handled` ask for."""
    fields = hf_config.common(raw, handled=(*_MULTIPLIERS, *handled))
    bias = raw.boolean("attention_bias", False)
    embedding, attention, residual, logits = (raw.number(key, 1.0, low=1e-9, high=1e9) for key in _MULTIPLIERS)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=raw.boolean("mlp_bias", False),
        embedding_scale=embedding,
        attention_scale=attention,
        residual_scale=residual,
        logit_scale=1 / logits,
    )
