"""GPT-2: a table of positions, and q, k and v in one tensor; weights are not transposed, unlike in its own files."""

from mycli.runtime.checkpoint.gguf.architecture import (
    ALL_BIASES,
    LAYER_NORM_EPSILON,
    NORM_BIASES,
    Architecture,
    Config,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS, TensorRule
from mycli.runtime.checkpoint.safetensors_header import damaged

POSITION_TENSORS = {**MODEL_TENSORS, "position_embd": TensorRule("model.embed_positions")}


def gpt2_config(model: GgufModel, config: Config, activation: str) -> Config:
    """Return the fields of a family with GPT-2's names: `intermediate_size` is not read there."""
    table = model.tensors.get("position_embd.weight")
    if table is None or len(table.shape) != 2:
        raise damaged("position_embd.weight is not a matrix of the file")
    return {
        "activation_function": activation,
        "max_position_embeddings": table.shape[0],
        "n_inner": config["intermediate_size"],
    }


ARCHITECTURE = Architecture(
    name="gpt2",
    model_type="gpt2",
    written_types=("gpt2",),
    biases=(*ALL_BIASES, *NORM_BIASES),
    layer_tensors={
        "attn_norm": TensorRule("ln_1"),
        "attn_qkv": TensorRule("attn.qkv_proj"),
        "attn_output": TensorRule("attn.o_proj"),
        "ffn_norm": TensorRule("ln_2"),
        "ffn_up": TensorRule("mlp.up_proj"),
        "ffn_down": TensorRule("mlp.down_proj"),
    },
    model_tensors=POSITION_TENSORS,
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_epsilon",
    read_config=lambda model, config: gpt2_config(model, config, "gelu_new"),
)
