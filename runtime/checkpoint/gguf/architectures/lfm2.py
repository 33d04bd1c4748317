"""LFM2, dense: gated short convolutions in the layers without key-value heads."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.recurrent_spec import ShortConvSpec

LFM2_MODEL_TENSORS = {
    **{name: rule for name, rule in MODEL_TENSORS.items() if name != "output_norm"},
    "token_embd_norm": TensorRule("model.embedding_norm"),
}
LFM2_TENSORS = {
    "attn_norm": TensorRule("operator_norm"),
    "attn_q": TensorRule("self_attn.q_proj"),
    "attn_k": TensorRule("self_attn.k_proj"),
    "attn_v": TensorRule("self_attn.v_proj"),
    "attn_output": TensorRule("self_attn.out_proj"),
    "attn_q_norm": TensorRule("self_attn.q_layernorm"),
    "attn_k_norm": TensorRule("self_attn.k_layernorm"),
    "shortconv.in_proj": TensorRule("conv.in_proj"),
    "shortconv.conv": TensorRule("conv.conv"),
    "shortconv.out_proj": TensorRule("conv.out_proj"),
    "ffn_norm": TensorRule("ffn_norm"),
    "ffn_gate": TensorRule("feed_forward.w1"),
    "ffn_up": TensorRule("feed_forward.w3"),
    "ffn_down": TensorRule("feed_forward.w2"),
}


def read_layer_types(model: GgufModel, config: Config) -> Config:
    """Return the config fields of the convolutions."""
    heads = model.layer_values("attention.head_count_kv", config["num_hidden_layers"])
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in model.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def write_layer_types(config: ModelConfig) -> dict[str, list[int]]:
    """Return the key that says which layers have attention."""
    return {"attention.head_count_kv": [0 if spec.recurrent else config.kv_heads for spec in config.layer_specs]}


def _taps(config: ModelConfig) -> int:
    convolutions = [spec.recurrent for spec in config.layer_specs if isinstance(spec.recurrent, ShortConvSpec)]
    return convolutions[0].convolution.taps if convolutions else 3


CONV_KEY = GgufKey("shortconv.l_cache", "conv_L_cache", required=True, write=_taps)
ARCHITECTURE = Architecture(
    name="lfm2",
    model_type="lfm2",
    written_types=("lfm2",),
    requires=(HIDDEN_WIDE_HEADS,),
    layer_tensors=LFM2_TENSORS,
    model_tensors=LFM2_MODEL_TENSORS,
    keys=(CONV_KEY,),
    by_layer=("attention.head_count_kv",),
    epsilon_field="norm_eps",
    read_config=read_layer_types,
    write_keys=write_layer_types,
)
