"""dots.llm1 (142B-A14B): Qwen 3's attention; sigmoid-routed experts with a correction bias and a shared expert."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS
from mycli.runtime.models.families.glm4_moe import read_experts
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw, first_k_dense_replace=0, norm_topk_prob=False, sliding_window=4096, max_window_layers=62
    )
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    first = raw.integer("max_window_layers", low=0)
    slides = hf_config.layers_of_type(raw, fields["layers"], lambda index: raw.has("sliding_window") and index >= first)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        qk_norm=True,
        windows=hf_config.layer_windows(raw, slides),
        build_layer=read_experts(raw, fields["layers"]),
    )
