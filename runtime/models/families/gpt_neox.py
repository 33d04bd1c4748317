"""GPT-NeoX and Pythia: a quarter of each head rotated, a GELU MLP next to or after attention, LayerNorms, biases."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import ActivationName
from mycli.runtime.utils.json_fields import Fields

_KEYS = {"layer_norm_eps": "rms_norm_eps", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
_ACTIVATIONS: dict[str, ActivationName] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class GptNeoxLayers:
    """Builds the layers. parallel: attention and MLP read the layer's input, each through a norm of its own."""

    parallel: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        llama, prefix = llama_layer(config, index), f"model.layers.{index}"
        attention, mlp, name = llama.attention, llama.dense_mlp, f"{prefix}.attention"
        # Files have the rows of all three in one tensor, head by head, which `restored_weights` takes apart.
        qkv = tuple(
            replace(linear, name=f"{name}.{part}_proj") for linear, part in zip(attention.qkv, "qkv", strict=True)
        )
        up = replace(mlp.gate_up[0], name=f"{prefix}.mlp.dense_h_to_4h")
        down = replace(mlp.down, name=f"{prefix}.mlp.dense_4h_to_h")
        return replace(
            llama,
            mixer=replace(attention, qkv=qkv, o=replace(attention.o, name=f"{name}.dense")),
            mlp=replace(mlp, gate_up=(up,), down=down),
            parallel=self.parallel,
            ignored_prefixes=(f"{name}.bias", f"{name}.masked_bias"),  # the causal mask
        )


def read(raw: Fields) -> ModelConfig:
    # Every query head has keys of its own, of hidden_size / num_attention_heads values; transformers reads no others.
    read_keys = {key: value for key, value in raw.values.items() if key not in ("num_key_value_heads", "head_dim")}
    raw = hf_config.renamed(Fields(read_keys, raw.source), _KEYS)
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=2)
    fields = hf_config.common(raw, handled=("partial_rotary_factor",), activations=_ACTIVATIONS)
    bias = raw.boolean("attention_bias", True)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        mlp_gate=False,
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.25),
        layer_norm=True,
        norm_bias=True,
        stored_prefixes=(
            ("gpt_neox.layers.", "model.layers."),
            ("gpt_neox.embed_in.", "model.embed_tokens."),
            ("gpt_neox.final_layer_norm.", "model.norm."),
            ("embed_out.", "lm_head."),
        ),
        build_layer=GptNeoxLayers(raw.boolean("use_parallel_residual", True)),
    )
