"""GPT-Neo (125M to 2.7B) and TinyStories: GPT-2 with unscaled scores, and a window in every second layer."""

from dataclasses import replace
from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.families.gpt2 import read_gpt2
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields

_DEFAULT_TYPES = [[["global", "local"], 12]]


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    attention, mlp, name = llama.attention, llama.dense_mlp, f"{prefix}.attn.attention"
    qkv = tuple(replace(linear, name=f"{name}.{part}_proj") for linear, part in zip(attention.qkv, "qkv", strict=True))
    return replace(
        llama,
        mixer=replace(
            attention,
            norm=config.norm_spec(f"{prefix}.ln_1"),
            qkv=qkv,
            o=replace(attention.o, name=f"{name}.out_proj"),
        ),
        mlp=replace(
            mlp,
            norm=config.norm_spec(f"{prefix}.ln_2"),
            gate_up=(replace(mlp.gate_up[0], name=f"{prefix}.mlp.c_fc"),),
            down=replace(mlp.down, name=f"{prefix}.mlp.c_proj"),
        ),
        ignored_prefixes=(f"{name}.bias", f"{name}.masked_bias"),  # the causal mask
    )


def _attention_kinds(raw: Fields, layers: int) -> list[str]:
    # A list of [kinds of layers, how often they follow one another].
    types = raw.values.get("attention_types") or _DEFAULT_TYPES
    kinds: list[str] = []
    for item in types if isinstance(types, list) else [None]:
        match item:
            case [[*names], int(count)] if 0 <= count <= MAX_LAYERS and len(names) <= MAX_LAYERS:
                kinds += [str(name) for name in names] * min(count, 1 + layers)
            case _:
                raise raw.fail("attention_types", "must hold pairs of a list of kinds and a count")
        if len(kinds) > layers:
            break
    if len(kinds) != layers or not all(kind in ("global", "local") for kind in kinds):
        raise raw.fail("attention_types", f"must give global or local for each of {layers} layers")
    return kinds


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.renamed(raw, {"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"})
    sizes: dict[str, Any] = {"n_inner": raw.values.get("intermediate_size")}
    if not raw.has("max_position_embeddings"):
        sizes["max_position_embeddings"] = 2048
    kinds = _attention_kinds(raw, raw.integer("num_hidden_layers", high=MAX_LAYERS))
    window = raw.integer("window_size", 256)
    return read_gpt2(
        Fields({**raw.values, **sizes}, raw.source),
        layer,
        "gelu_new",
        qkv_bias=False,
        attention_scale=1.0,
        windows=tuple(window if kind == "local" else None for kind in kinds),
    )
