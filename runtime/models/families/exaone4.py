"""EXAONE 4: norms on the outputs of attention and MLP only, norms of query and key heads; where some layers have a
sliding window, the others do not turn their heads."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.families import olmo2
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """OLMo 2's norms of the stream, Llama's place for those of heads."""
    outputs, llama = olmo2.layer(config, index), llama_layer(config, index).attention
    return replace(outputs, mixer=replace(outputs.attention, q_norm=llama.q_norm, k_norm=llama.k_norm))


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of an EXAONE 4 config.json."""
    fields = hf_config.common(raw)
    sliding = (False,) * fields["layers"]
    if raw.has("sliding_window"):
        period = 4 if raw.has("layer_types") else raw.integer("sliding_window_pattern", 4)
        sliding = hf_config.sliding_layers(raw, fields["layers"], hf_config.every(period))
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    turned = (slides or not raw.has("sliding_window") for slides in sliding)
    return ModelConfig(
        **fields,
        qk_norm=True,
        windows=hf_config.windows_of(raw, sliding),
        layer_ropes=tuple(rope if turns else None for turns in turned),
        build_layer=layer,
    )
