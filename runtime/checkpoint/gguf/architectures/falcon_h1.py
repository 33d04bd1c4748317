"""Falcon-H1: attention and Mamba-2 side by side; the weights hold the multipliers."""

from mycli.runtime.checkpoint.gguf.architecture import (
    LLAMA_TENSORS,
    MODEL_TENSORS,
    QKV_BIASES,
    Architecture,
    Config,
    TensorRule,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.mamba import (
    CONVOLUTION_BIAS,
    MAMBA_FIELDS,
    expansion,
    has_bias,
    mamba_tensors,
    read_mamba_keys,
    write_mamba_keys,
)


def _read_config(model: GgufModel, config: Config) -> Config:
    return {
        **read_mamba_keys(model, MAMBA_FIELDS, "mamba_d_head"),
        "mamba_d_ssm": model.integer("ssm.inner_size", low=1),
        "mamba_expand": expansion(model),
        "mamba_conv_bias": has_bias(model, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(model, "ssm_in"),
        "projectors_bias": has_bias(model, "ssm_out"),
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in model.tensors),
        "mamba_norm_before_gate": False,  # llama.cpp's order
        "attention_bias": has_bias(model, "attn_q"),
        "mlp_bias": has_bias(model, "ffn_up"),
    }


ARCHITECTURE = Architecture(
    name="falcon-h1",
    model_type="falcon_h1",
    written_types=("falcon_h1",),
    requires=(CONVOLUTION_BIAS,),
    # llama.cpp reads a bias of attn_output and does not add it.
    biases=(*QKV_BIASES, "ffn_gate", "ffn_up", "ffn_down", "ssm_conv1d"),
    layer_tensors={
        **LLAMA_TENSORS,
        **mamba_tensors("mamba"),
        "ffn_norm": TensorRule("pre_ff_layernorm", suffixes={"": ".weight"}),
        "ffn_gate": TensorRule("feed_forward.gate_proj"),
        "ffn_up": TensorRule("feed_forward.up_proj"),
        "ffn_down": TensorRule("feed_forward.down_proj"),
    },
    model_tensors={**MODEL_TENSORS, "output_norm": TensorRule("model.final_layernorm")},
    read_config=_read_config,
    write_keys=write_mamba_keys,
)
