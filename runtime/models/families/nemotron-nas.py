"""Llama Nemotron of Nvidia's architecture search (Super 49B): Llama with layers without attention or MLP."""

from dataclasses import dataclass, replace
from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class NasLayers:
    """Builds the layers. kv_heads and sizes: key-value heads and MLP width of each; None: a layer without the part."""

    kv_heads: tuple[int | None, ...]
    sizes: tuple[int | None, ...]

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        kv_heads, size = self.kv_heads[index], self.sizes[index]
        layer = llama_layer(config, index, kv_heads=kv_heads, intermediate_size=size)
        mixer, mlp = (layer.mixer if kv_heads else None), (layer.mlp if size else None)
        return replace(layer, mixer=mixer, mlp=mlp)


def _part(block: Any, name: str, source: str) -> Fields | None:
    part = Fields(block if isinstance(block, dict) else {}, source).object(name)
    if part.boolean("no_op", False):
        return None
    hf_config.require(part, replace_with_linear=False, sparsify=None, window_length=None, num_sink_tokens=None)
    return part


def _width(part: Fields, hidden: int) -> int:
    # As in the published code: two thirds, rounded up to a multiple of 256.
    return -(-int(2 * part.number("ffn_mult", low=1e-3, high=1e3) * hidden / 3) // 256) * 256


def read(raw: Fields) -> ModelConfig:
    blocks = raw.array("block_configs", object, MAX_LAYERS)
    attentions, mlps = ([_part(block, name, raw.source) for block in blocks] for name in ("attention", "ffn"))
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads", high=1 << 16)
    groups = [None if part is None else part.integer("n_heads_in_group", high=1 << 16) for part in attentions]
    sizes = [None if part is None else _width(part, hidden) for part in mlps]
    if len(blocks) != raw.integer("num_hidden_layers", high=MAX_LAYERS) or not any(groups) or not any(sizes):
        raise raw.fail("block_configs", "must describe each layer, at least one with attention and one with an MLP")
    if not all(group or size for group, size in zip(groups, sizes, strict=True)):
        raise raw.fail("block_configs", "has a layer without attention and MLP, which is not supported")
    if any(group and heads % group for group in groups):
        raise raw.fail("block_configs", f"has an n_heads_in_group that does not divide num_attention_heads {heads}")
    kv_heads = [heads // group if group else None for group in groups]
    # The published config has null for both.
    largest = {"num_key_value_heads": max(filter(None, kv_heads)), "intermediate_size": max(filter(None, sizes))}
    raw = Fields({**raw.values, **largest}, raw.source)
    return ModelConfig(
        **hf_config.common(raw),
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        build_layer=NasLayers(tuple(kv_heads), tuple(sizes)),
    )
