"""Hunyuan with experts (A13B): Hunyuan dense with experts, a softmax over the selected ones, and a shared expert."""

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
    """Return `raw` with one number in place of a list with one per layer. Raises ModelError where layers differ."""
    values = dict(hf_config.renamed(raw, {"num_experts_per_tok": "moe_topk"}).values)
    for key in _BY_LAYER:
        if isinstance(values.get(key), list):
            numbers = set(Fields(values, raw.source).array(key, int, MAX_LAYERS))
            if len(numbers) != 1:
                raise raw.fail(key, "differs between layers, which is not supported", UNSUPPORTED_HINT)
            values[key] = numbers.pop()
    return Fields(values, raw.source)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(_uniform(raw), rms_norm_eps=1e-5)
    dense = {key: value for key, value in raw.values.items() if key not in EXPERT_KEYS}
    config = hunyuan_v1_dense.read(Fields(dense, raw.source))
    size = config.intermediate_size
    hf_config.require(raw, moe_intermediate_size=size, num_shared_expert=1, use_cla=False)
    count, top_k = read_expert_counts(raw, "num_experts", config.layers, default=(1, 1), top_k_key="moe_topk")
    choice = RoutingSpec(top_k, normalize=True)
    return replace(config, build_layer=MoeLayers(count, choice, size, _NAMES, shared=size, base=hunyuan_v1_dense.layer))
