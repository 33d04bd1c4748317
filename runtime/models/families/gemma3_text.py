"""Gemma 3, its text model: Gemma 2 without softcaps, with norms of query and key heads, and five layers with a sliding
window and a small theta to each with full attention and a large one."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.gemma2 import fields_of
from mycli.runtime.models.hf_rope import read_sliding_rope
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Gemma 3 text config."""
    raw = hf_config.with_defaults(
        raw,
        vocab_size=262208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=2,
    )
    fields = fields_of(raw)
    period = raw.integer("sliding_window_pattern", 6)
    sliding = hf_config.sliding_layers(raw, fields["layers"], hf_config.every(period))
    theta, scaling = read_sliding_rope(raw, raw.number("rope_local_base_freq"))
    full = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    near = RopeSpec(theta, fields["head_dim"], scaling)
    return ModelConfig(
        **fields,
        qk_norm=True,
        windows=hf_config.windows_of(raw, sliding),
        layer_ropes=tuple(near if slides else full for slides in sliding),
    )
