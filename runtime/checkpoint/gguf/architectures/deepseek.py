"""DeepSeek-MoE: Llama's attention, softmax-routed experts whose weights stay as they are, and shared experts."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.experts import (
    SCALE_KEY,
    dense_layers_key,
    expert_keys,
    expert_tensors,
    experts_spec,
    shared_count_key,
)
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS

DEEPSEEK_TENSORS = {**PAIRED_TENSORS, **expert_tensors(shared="shared_experts")}
DEEPSEEK_KEYS = (
    *expert_keys("n_routed_experts"),
    shared_count_key(),
    dense_layers_key("first_k_dense_replace"),
    SCALE_KEY,
)


ARCHITECTURE = Architecture(
    name="deepseek",
    model_type="deepseek",
    written_types=("deepseek",),
    requires=(
        HIDDEN_WIDE_HEADS,
        WHOLE_ROTATION,
        Requirement("norm_topk_prob = false", lambda config: not experts_spec(config).routing.normalize),
        Requirement("shared experts", lambda config: experts_spec(config).shared is not None),
    ),
    layer_tensors=DEEPSEEK_TENSORS,
    keys=DEEPSEEK_KEYS,
    read_config=linear_biases,
)
