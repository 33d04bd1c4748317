"""OLMo 3: OLMo 2 with a sliding window in three layers of four; rope scaling in the fourth only."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.olmo2 import layer
from mycli.runtime.models.hf_rope import read_sliding_rope
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rope_theta=500000.0, rms_norm_eps=1e-5, sliding_window=4096)
    fields = hf_config.common(raw, handled=("rope_parameters",))
    sliding = hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(4))
    theta, scaling = read_sliding_rope(raw, fields["rope_theta"])
    full_rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    sliding_rope = RopeSpec(theta, fields["head_dim"], scaling)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        windows=hf_config.layer_windows(raw, sliding),
        layer_ropes=tuple(sliding_rope if slides else full_rope for slides in sliding),
        build_layer=layer,
    )
