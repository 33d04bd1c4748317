"""Command R, Command R+ and Aya 23: one LayerNorm before attention and MLP in parallel, scaled logits."""

from mycli.runtime.checkpoint.gguf.architecture import (
    LAYER_NORM_EPSILON,
    Architecture,
    Config,
    GgufKey,
    linear_biases,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS

LOGIT_SCALE = GgufKey("logit_scale", "logit_scale", float, required=True, write=lambda c: float(c.logit_scale))
# llama.cpp takes the embedding as the head.
TIED_TENSORS = {name: rule for name, rule in MODEL_TENSORS.items() if name != "output"}
_HEAD_NORMS = Requirement(
    "norms of the heads in models of 64 layers and more, and in no others",
    lambda config: (config.layer_specs[0].attention.q_norm is not None) == (config.layers >= 64),
)


def read_config(model: GgufModel, config: Config) -> Config:
    return linear_biases(model, config) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors}


ARCHITECTURE = Architecture(
    name="command-r",
    model_type="cohere",
    written_types=("cohere",),
    requires=(HIDDEN_WIDE_HEADS, _HEAD_NORMS),
    model_tensors=TIED_TENSORS,
    keys=(LOGIT_SCALE,),
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_eps",
    read_config=read_config,
)
