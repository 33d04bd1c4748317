"""Hunyuan with experts (A13B): Hunyuan's attention, and experts, weighted among those that are chosen, and one that all
tokens go through."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families import hunyuan_v1_dense
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(router="gate.wg", shared="shared_mlp", shared_gate=None)
_BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")  # a number, or one for each layer


def _uniform(raw: Fields) -> Fields:
    """`raw` with numbers for the lists of `_BY_LAYER`. Raises ModelError where layers differ."""
    values = dict(raw.values)
    for key in _BY_LAYER:
        if isinstance(values.get(key), list):
            numbers = set(raw.array(key, int, MAX_LAYERS))
            if len(numbers) != 1:
                raise raw.fail(key, "differs between layers, which is not supported", UNSUPPORTED_HINT)
            values[key] = numbers.pop()
    return Fields(values, raw.source)


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Hunyuan config.json with experts."""
    raw = hf_config.with_defaults(_uniform(raw), rms_norm_eps=1e-5)
    dense = {key: value for key, value in raw.values.items() if key not in EXPERT_KEYS}
    config = hunyuan_v1_dense.read(Fields(dense, raw.source))
    size = config.intermediate_size
    for key, done in (("moe_intermediate_size", size), ("num_shared_expert", 1), ("use_cla", False)):
        if raw.has(key) and raw.values[key] != done:
            raise raw.fail(key, f"= {raw.values[key]!r:.40} is not supported", UNSUPPORTED_HINT)
    count, top_k = read_expert_counts(raw, "num_experts", config.layers, usual=(1, 1), chosen="moe_topk")
    choice = RoutingSpec(top_k, normalize=True)
    return replace(config, build_layer=MoeLayers(count, choice, size, _NAMES, shared=size, base=hunyuan_v1_dense.layer))
