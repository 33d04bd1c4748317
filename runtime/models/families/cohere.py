"""Command R and Aya 23: Command R7B whose layers all turn their heads and attend to the whole text."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.cohere2 import layer
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Cohere config.json. Norms of query and key heads (Command R+) are refused."""
    eps = raw.number("layer_norm_eps", 1e-5, low=1e-30, high=1.0)
    raw = hf_config.with_defaults(raw, tie_word_embeddings=True, logit_scale=0.0625, rms_norm_eps=eps)
    if raw.boolean("use_qk_norm", False):
        raise raw.fail("use_qk_norm", "= true is not supported", UNSUPPORTED_HINT)
    fields = hf_config.common(raw, handled=("logit_scale",))
    bias = raw.boolean("attention_bias", False)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        interleaved=True,
        layer_norm=True,
        logit_scale=raw.number("logit_scale", low=1e-9),
        build_layer=layer,
    )
