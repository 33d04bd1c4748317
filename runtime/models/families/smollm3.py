"""SmolLM3: Llama without rotary embedding in every fourth layer."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def rotating_layers(raw: Fields, layers: int) -> list[int]:
    """Return 1 for each layer with rotary embedding and 0 for the others."""
    # In spite of its name, no_rope_layers is 1 for layers with rotary embedding.
    has_rope = raw.array("no_rope_layers", int, MAX_LAYERS)
    if not has_rope:
        interval = raw.integer("no_rope_layer_interval", 4)
        return [int((index + 1) % interval != 0) for index in range(layers)]
    if len(has_rope) < layers or any(value not in (0, 1) for value in has_rope):
        raise raw.fail("no_rope_layers", f"must hold 0 or 1 for each of {layers} layers")
    return has_rope[:layers]


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, num_key_value_heads=4, rope_theta=2000000.0, tie_word_embeddings=True)
    fields = hf_config.common(raw, handled=("no_rope_layers",))
    has_rope = rotating_layers(raw, fields["layers"])
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    windows: tuple[int | None, ...] = ()
    if raw.boolean("use_sliding_window", False) and raw.has("sliding_window"):
        sliding = hf_config.layers_of_type(raw, fields["layers"], lambda index: not has_rope[index])
        windows = hf_config.layer_windows(raw, sliding)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        windows=windows,
        layer_ropes=tuple(rope if rotates else None for rotates in has_rope),
    )
