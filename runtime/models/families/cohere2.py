"""Command R7B, Command A and Aya: parallel attention and MLP after one bias-free LayerNorm."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama = llama_layer(config, index)
    return replace(llama, mlp=replace(llama.dense_mlp, norm=None), parallel=True)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_epsilon(raw, "layer_norm_eps")
    raw = hf_config.with_defaults(raw, sliding_window=4096, tie_word_embeddings=True, logit_scale=0.0625)
    fields = hf_config.common(raw, handled=("logit_scale",))
    period = raw.integer("sliding_window_pattern", 4)
    sliding = hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(period))
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"], interleaved=True)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        windows=hf_config.layer_windows(raw, sliding),
        # Layers with full attention have no positions.
        layer_ropes=tuple(rope if slides else None for slides in sliding),
        layer_norm=True,
        logit_scale=raw.number("logit_scale", low=1e-9),
        build_layer=layer,
    )
