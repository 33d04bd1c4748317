"""Hunyuan with experts, A13B: a shared expert of the size of the others, without a gate."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.hunyuan_dense import HUNYUAN_TENSORS
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors, experts_spec, shared_size_key
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION, Requirement

ARCHITECTURE = Architecture(
    name="hunyuan-moe",
    model_type="hunyuan_v1_moe",
    written_types=("hunyuan_v1_moe",),
    requires=(
        WHOLE_ROTATION,
        Requirement("a shared expert", lambda config: experts_spec(config).shared is not None),
    ),
    layer_tensors={**HUNYUAN_TENSORS, **expert_tensors(router="gate.wg", shared="shared_mlp")},
    keys=(*expert_keys(used="moe_topk"), shared_size_key("intermediate_size")),
    read_config=linear_biases,
    write_keys=lambda config: {"expert_shared_count": 0 if experts_spec(config).shared is None else 1},
)
