"""The text part of Qwen3-VL with experts: Qwen3 with experts and three positions a token."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.qwen2vl import read_image_positions, write_image_positions
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS

ARCHITECTURE = Architecture(
    name="qwen3vlmoe",
    model_type="qwen3_moe",
    multimodal_types=("qwen3_vl_moe",),
    requires=(WHOLE_ROTATION,),
    layer_tensors={**LLAMA_TENSORS, **expert_tensors()},
    keys=expert_keys(),
    read_config=lambda model, config: {
        **linear_biases(model, config),
        **read_image_positions(model, config, "qwen3_vl_moe"),
        "norm_topk_prob": True,
    },
    write_multimodal=write_image_positions,
)
