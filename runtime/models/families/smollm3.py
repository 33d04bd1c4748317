"""SmolLM3: Llama of which every fourth layer does not turn its heads."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def _turning(raw: Fields, layers: int) -> list[int]:
    """1 for layers that turn their heads; `no_rope_layers` says so in spite of its name."""
    found = raw.array("no_rope_layers", int, MAX_LAYERS)
    if not found:
        interval = raw.integer("no_rope_layer_interval", 4)
        return [int((index + 1) % interval != 0) for index in range(layers)]
    if len(found) < layers or any(value not in (0, 1) for value in found):
        raise raw.fail("no_rope_layers", f"must hold 0 or 1 for each of {layers} layers")
    return found[:layers]


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a SmolLM3 config.json."""
    raw = hf_config.with_defaults(raw, rope_theta=2000000.0, tie_word_embeddings=True)
    fields = hf_config.common(raw, handled=("no_rope_layers",))
    bias = raw.boolean("attention_bias", False)
    turning = _turning(raw, fields["layers"])
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    windows: tuple[int | None, ...] = ()
    if raw.boolean("use_sliding_window", False) and raw.has("sliding_window"):
        sliding = hf_config.sliding_layers(raw, fields["layers"], lambda index: not turning[index])
        windows = hf_config.windows_of(raw, sliding)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=raw.boolean("mlp_bias", False),
        windows=windows,
        layer_ropes=tuple(rope if turns else None for turns in turning),
    )
