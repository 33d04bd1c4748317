"""OLMoE 1B-7B: norms over all heads of queries and keys, weights of experts that are not normalized."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS

ARCHITECTURE = Architecture(
    name="olmoe",
    model_type="olmoe",
    written_types=("olmoe",),
    requires=(HIDDEN_WIDE_HEADS, WHOLE_ROTATION),
    own_head=True,
    layer_tensors={**LLAMA_TENSORS, **expert_tensors()},
    keys=expert_keys(size=None),
    read_config=lambda model, config: {**linear_biases(model, config), "norm_topk_prob": False},
)
