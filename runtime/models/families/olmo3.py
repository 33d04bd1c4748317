"""OLMo 3: OLMo 2 with a sliding window in three layers of four, and a rotation stretched in the fourth only."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.olmo2 import layer
from mycli.runtime.models.hf_rope import read_sliding_rope
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of an OLMo 3 config.json."""
    raw = hf_config.with_defaults(raw, rope_theta=500000.0, sliding_window=4096)
    fields = hf_config.common(raw, handled=("rope_parameters",))
    bias = raw.boolean("attention_bias", False)
    sliding = hf_config.sliding_layers(raw, fields["layers"], hf_config.every(4))
    theta, scaling = read_sliding_rope(raw, fields["rope_theta"])
    full = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    near = RopeSpec(theta, fields["head_dim"], scaling)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        windows=hf_config.windows_of(raw, sliding),
        layer_ropes=tuple(near if slides else full for slides in sliding),
        build_layer=layer,
    )
