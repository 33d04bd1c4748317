"""Command R7B, Command A and Aya: attention and MLP side by side after one LayerNorm without a bias; neighbouring pairs
turned, in the layers with a sliding window only; logits times a constant."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Llama's linears, one norm."""
    llama = llama_layer(config, index)
    return replace(llama, mlp=replace(llama.mlp, norm=None), parallel=True)


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Cohere 2 config.json."""
    raw = hf_config.with_defaults(
        raw,
        sliding_window=4096,
        tie_word_embeddings=True,
        logit_scale=0.0625,
        rms_norm_eps=raw.number("layer_norm_eps", 1e-5, low=1e-30, high=1.0),
    )
    fields = hf_config.common(raw, handled=("logit_scale",))
    bias = raw.boolean("attention_bias", False)
    period = raw.integer("sliding_window_pattern", 4)
    sliding = hf_config.sliding_layers(raw, fields["layers"], hf_config.every(period))
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"], interleaved=True)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        windows=hf_config.windows_of(raw, sliding),
        layer_ropes=tuple(rope if slides else None for slides in sliding),
        layer_norm=True,
        logit_scale=raw.number("logit_scale", low=1e-9),
        build_layer=layer,
    )
