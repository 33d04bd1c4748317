"""Granite with sliding windows: Granite with attention sinks, and rotary embedding with a theta for each layer."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.families import granite
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama = llama_layer(config, index)
    return replace(llama, mixer=replace(llama.attention, sinks=f"model.layers.{index}.self_attn.sinks"))


def with_windows(raw: Fields, config: ModelConfig) -> ModelConfig:
    """Return a Granite `config` with the windows and the rotary embedding of each layer."""
    sliding = hf_config.layers_of_type(raw, config.layers, lambda index: index % 4 != 0)
    thetas = raw.array("layer_rope_theta", object, MAX_LAYERS) or [config.rope_theta] * config.layers
    if len(thetas) != config.layers:
        raise raw.fail("layer_rope_theta", f"has {len(thetas)} entries for {config.layers} layers")
    # Scaling is that of the model; only theta differs between layers.
    rope = RopeSpec(config.rope_theta, config.head_dim, config.rope_scaling)

    def rotation(theta: object) -> RopeSpec | None:  # none for 0 and null
        source = Fields({"layer_rope_theta": theta}, raw.source)
        return replace(rope, theta=source.number("layer_rope_theta", low=1e-6, high=1e12)) if theta else None

    return replace(
        config,
        windows=hf_config.layer_windows(raw, sliding),
        layer_ropes=tuple(rotation(theta) for theta in thetas),
    )


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw, num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=True, sliding_window=128
    )
    return replace(with_windows(raw, granite.read(raw)), build_layer=layer)
