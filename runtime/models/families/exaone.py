"""EXAONE 3, 3.5 and Deep (2.4B to 32B): Llama with names of tensors and fields like GPT-2's."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.hf_rope import has_rope
from mycli.runtime.utils.json_fields import Fields

_KEYS = {
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "num_layers": "num_hidden_layers",
}
_PARTS = (
    ("ln_1.", "input_layernorm."),
    ("ln_2.", "post_attention_layernorm."),
    ("attn.attention.out_proj.", "self_attn.o_proj."),
    ("attn.attention.", "self_attn."),
    ("mlp.c_fc_0.", "mlp.gate_proj."),
    ("mlp.c_fc_1.", "mlp.up_proj."),
    ("mlp.c_proj.", "mlp.down_proj."),
)
_OUTER = (("transformer.wte.", "model.embed_tokens."), ("transformer.ln_f.", "model.norm."))


def _stored_prefixes(layers: int) -> tuple[tuple[str, str], ...]:
    inner = (
        (f"transformer.h.{index}.{stored}", f"model.layers.{index}.{name}")
        for index in range(layers)
        for stored, name in _PARTS
    )
    return (*inner, *_OUTER)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.renamed(raw, _KEYS)
    if not raw.has("rope_theta") and not has_rope(raw):  # the defaults of the files' code and of transformers differ
        raise raw.fail("rope_theta", "is missing")
    raw.number("rms_norm_eps")
    fields = hf_config.common(raw, activations=hf_config.SILU)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        stored_prefixes=_stored_prefixes(fields["layers"]),
    )
