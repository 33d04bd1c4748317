"""Granite 3 and 4, dense: Llama with multipliers for embeddings, scores, residual branches and logits."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def read(raw: Fields) -> ModelConfig:
    return read_granite(raw)


def read_granite(raw: Fields, handled: tuple[str, ...] = ()) -> ModelConfig:
    """Read a Granite config; `handled`: keys that the caller implements, as in `hf_config.common`."""
    fields = hf_config.common(raw, handled=(*_MULTIPLIERS, *handled))
    embedding, attention, residual, logits = (raw.number(key, 1.0, low=1e-9, high=1e9) for key in _MULTIPLIERS)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        embedding_scale=embedding,
        attention_scale=attention,
        residual_scale=residual,
        logit_scale=1 / logits,
    )
