"""Gemma 3, text model: Gemma 2 without softcaps, with per-head norms of queries and keys; and EmbeddingGemma."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.gemma2 import gemma_fields
from mycli.runtime.models.hf_rope import read_sliding_rope
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
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
    hf_config.require(raw, attn_logit_softcapping=None)
    fields = gemma_fields(raw, handled=("use_bidirectional_attention",))
    bidirectional = raw.boolean("use_bidirectional_attention", False)  # EmbeddingGemma
    if bidirectional:
        # As many tokens before a token as after it.
        raw = Fields({**raw.values, "sliding_window": raw.integer("sliding_window") // 2 + 1}, raw.source)
    period = raw.integer("sliding_window_pattern", 6)
    sliding = hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(period))
    theta, scaling = read_sliding_rope(raw, raw.number("rope_local_base_freq"))
    full_rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    sliding_rope = RopeSpec(theta, fields["head_dim"], scaling)
    return ModelConfig(
        **fields,
        qk_norm=True,
        windows=hf_config.layer_windows(raw, sliding),
        layer_ropes=tuple(sliding_rope if slides else full_rope for slides in sliding),
        bidirectional=bidirectional,
    )
