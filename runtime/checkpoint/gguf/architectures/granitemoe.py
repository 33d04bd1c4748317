"""Granite 3 with experts."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, PAIRED_TENSORS, Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.granite import GRANITE_KEYS
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors

ARCHITECTURE = Architecture(
    name="granitemoe",
    model_type="granitemoe",
    written_types=("granitemoe",),
    biases=ALL_BIASES,
    layer_tensors={**PAIRED_TENSORS, **expert_tensors("block_sparse_moe", router="router.layer")},
    keys=(*GRANITE_KEYS, *expert_keys("num_local_experts", size=None)),
    read_config=linear_biases,
)
