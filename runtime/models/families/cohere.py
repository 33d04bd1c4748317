"""Command R and Aya 23: Command R7B with rotary embedding and full attention in all layers."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.cohere2 import layer
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    eps = raw.number("layer_norm_eps", 1e-5, low=1e-30, high=1.0)
    raw = hf_config.with_defaults(
        raw, tie_word_embeddings=True, logit_scale=0.0625, rms_norm_eps=eps, rope_theta=500000.0
    )
    hf_config.require(raw, use_qk_norm=False)  # Command R+
    fields = hf_config.common(raw, handled=("logit_scale",))
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        interleaved=True,
        layer_norm=True,
        logit_scale=raw.number("logit_scale", low=1e-9),
        build_layer=layer,
    )
