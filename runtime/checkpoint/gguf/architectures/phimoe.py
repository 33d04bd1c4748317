"""Phi-3.5-MoE: Mixtral with LayerNorms and experts chosen by SparseMixer."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, NORM_BIASES, Architecture, Config, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.phi3 import PHI3_KEYS
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS


def _read_config(model: GgufModel, config: Config) -> Config:
    return {**linear_biases(model, config), "lm_head_bias": "output.bias" in model.tensors}


ARCHITECTURE = Architecture(
    name="phimoe",
    model_type="phimoe",
    written_types=("phimoe",),
    # The files are complete, so they are read; llama.cpp computes RMSNorms, and softmax for the weights of experts.
    requires=(Requirement("RMSNorms, which this family does not have", lambda config: not config.layer_norm),),
    biases=(*ALL_BIASES, *NORM_BIASES, "output"),
    layer_tensors={**LLAMA_TENSORS, **expert_tensors("block_sparse_moe", gate="w1", up="w3", down="w2")},
    keys=(*expert_keys("num_local_experts", size=None), *PHI3_KEYS),
    read_config=_read_config,
)
