"""Ling 1 and 1.5 (lite, plus): DeepSeek-MoE with normalized weights of experts; the head is stored normalized."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.deepseek import DEEPSEEK_KEYS, DEEPSEEK_TENSORS
from mycli.runtime.checkpoint.gguf.experts import NORM_KEY

ARCHITECTURE = Architecture(
    name="bailingmoe",
    model_type="deepseek",
    layer_tensors=DEEPSEEK_TENSORS,
    keys=(*DEEPSEEK_KEYS, NORM_KEY),
    read_config=linear_biases,
)
