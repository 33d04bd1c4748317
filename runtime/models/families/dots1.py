"""dots.llm1 (142B-A14B): Qwen 3's attention, and in all but the first layers experts, chosen by corrected sigmoids, and
one that all tokens go through."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS
from mycli.runtime.models.families.glm4_moe import read_mixture
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a dots.llm1 config.json."""
    raw = hf_config.with_defaults(
        raw, first_k_dense_replace=0, norm_topk_prob=False, sliding_window=4096, max_window_layers=62
    )
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    bias, first = raw.boolean("attention_bias", False), raw.integer("max_window_layers", low=0)
    slides = hf_config.sliding_layers(raw, fields["layers"], lambda index: raw.has("sliding_window") and index >= first)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=hf_config.windows_of(raw, slides),
        build_layer=read_mixture(raw, fields["layers"]),
    )
