"""openPangu Embedded (1B and 7B): Llama with biases on q, k, v and o."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    # The first files name the biases `bias`, and not every file has theta.
    bias = raw.boolean("bias", True)
    raw = hf_config.with_defaults(raw, attention_bias=bias, rms_norm_eps=1e-5, rope_theta=16000000.0)
    return ModelConfig(**hf_config.common(raw, activations=hf_config.SILU), **hf_config.attention_biases(raw))
