"""Qwen 3 with experts: 30B-A3B, 235B-A22B, Coder."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS

ARCHITECTURE = Architecture(
    name="qwen3moe",
    model_type="qwen3_moe",
    written_types=("qwen3_moe",),
    requires=(WHOLE_ROTATION,),
    layer_tensors={**LLAMA_TENSORS, **expert_tensors()},
    keys=expert_keys(),
    # llama.cpp divides weights by their sum and has no key for it; every published model does so too.
    read_config=lambda model, config: {**linear_biases(model, config), "norm_topk_prob": True},
)
