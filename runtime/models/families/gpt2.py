"""GPT-2 (124M to 1.5B) and models of its class: a table of positions, LayerNorms, biases, a GELU MLP without a gate."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import ActivationName, LinearSpec, PositionSpec
from mycli.runtime.utils.json_fields import Fields

# Names of fields that transformers reads by either.
_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
# Names of other families' fields, which these classes do not read.
_UNREAD = ("head_dim", "hidden_act", "intermediate_size", "num_key_value_heads", "rms_norm_eps")
_ACTIVATIONS: dict[str, ActivationName] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}
_PREFIXES = (
    ("h.", "model.layers."),
    ("wte.", "model.embed_tokens."),
    ("wpe.", "model.embed_positions."),
    ("ln_f.", "model.norm."),
)


@dataclass(frozen=True)
class Gpt2Layers:
    """Builds the layers. transposed: files hold the transposes of the weights, as those of GPT-2's Conv1D.

    by_layer: the scores of layer n, counted from 1, are divided by n.
    """

    transposed: bool
    by_layer: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        llama, prefix, hidden = llama_layer(config, index), f"model.layers.{index}", config.hidden_size
        attention, mlp = llama.attention, llama.dense_mlp
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim

        def linear(name: str, own_name: str, spec: LinearSpec) -> LinearSpec:
            stored = f"{prefix}.{name}"
            if not self.transposed:
                return replace(spec, name=stored)
            # A name of its own: a square weight does not show whether it is transposed, and copies hold it as it is.
            return replace(spec, name=f"{stored.rpartition('.')[0]}.{own_name}", transposed_as=stored)

        qkv = linear("attn.c_attn", "qkv_proj", LinearSpec("", rows, hidden, bias=True))
        scale = attention.softmax_scale
        return replace(
            llama,
            mixer=replace(
                attention,
                norm=config.norm_spec(f"{prefix}.ln_1"),
                qkv=(qkv,),
                o=linear("attn.c_proj", "o_proj", attention.o),
                scale=scale / (index + 1) if self.by_layer else attention.scale,
            ),
            mlp=replace(
                mlp,
                norm=config.norm_spec(f"{prefix}.ln_2"),
                gate_up=(linear("mlp.c_fc", "up_proj", mlp.gate_up[0]),),
                down=linear("mlp.c_proj", "down_proj", mlp.down),
            ),
            ignored_prefixes=(f"{prefix}.attn.bias", f"{prefix}.attn.masked_bias"),  # the causal mask
        )


def read(raw: Fields) -> ModelConfig:
    by_layer = raw.boolean("scale_attn_by_inverse_layer_idx", False)
    return read_gpt2(raw, Gpt2Layers(transposed=True, by_layer=by_layer), "gelu_new")


def read_gpt2(
    raw: Fields, layers: Callable[[ModelConfig, int], LayerSpec], activation: str, **changes: Any
) -> ModelConfig:
    """Read the config of a class with GPT-2's fields; activation: the default; changes: to the ModelConfig.

    Files without a dtype are in fp32, in which they were published.
    """
    raw = hf_config.renamed(raw, _KEYS)
    raw = Fields({key: value for key, value in raw.values.items() if key not in _UNREAD}, raw.source)
    raw = hf_config.with_defaults(
        raw,
        intermediate_size=raw.integer("n_inner", 4 * raw.integer("hidden_size")),
        hidden_act=raw.text("activation_function", activation),
        rms_norm_eps=raw.number("layer_norm_epsilon", 1e-5, low=1e-30, high=1.0),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    if not raw.has("dtype"):
        raw = Fields({**raw.values, "dtype": raw.text("torch_dtype", "float32")}, raw.source)
    fields = hf_config.common(raw, activations=_ACTIVATIONS)
    table = LinearSpec("model.embed_positions", fields["max_context"], fields["hidden_size"])
    common: dict[str, Any] = {
        **fields,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "mlp_gate": False,
        "attention_scale": None if raw.boolean("scale_attn_weights", True) else 1.0,
        "layer_norm": True,
        "norm_bias": True,
        "layer_ropes": (None,) * fields["layers"],
        "positions": PositionSpec(table, None),
        # The class without a head has no prefix; GPT-2 was published by it.
        "stored_prefixes": (*((f"transformer.{stored}", name) for stored, name in _PREFIXES), *_PREFIXES),
        "build_layer": layers,
    }
    return ModelConfig(**{**common, **changes})
