"""Granite 3 with experts, and Granite 4 previews, which have a shared expert."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, Architecture, Config, GgufKey, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.granite import GRANITE_KEYS
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors, joined_shared_expert, shared_size
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS

SHARED_KEY = GgufKey("expert_shared_feed_forward_length", "shared_intermediate_size", write=shared_size)


def _read_config(model: GgufModel, config: Config) -> Config:
    shared = model.integer(SHARED_KEY.name, 0)
    return {**linear_biases(model, config), **({"model_type": "granitemoeshared"} if shared else {})}


ARCHITECTURE = Architecture(
    name="granitemoe",
    model_type="granitemoe",
    written_types=("granitemoe", "granitemoeshared"),
    biases=ALL_BIASES,
    layer_tensors={
        **PAIRED_TENSORS,
        **expert_tensors("block_sparse_moe", router="router.layer"),
        **joined_shared_expert(),
    },
    keys=(*GRANITE_KEYS, *expert_keys("num_local_experts", size=None), SHARED_KEY),
    read_config=_read_config,
)
