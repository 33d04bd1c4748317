"""Builds layers with latent attention from the config keys of DeepSeek-V2 and its relatives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import MoeLayers
from mycli.runtime.models.hf_rope import yarn_magnitude
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, NormSpec
from mycli.runtime.utils.json_fields import Fields

_MOST = 1 << 16  # values of a head or a rank
_NORM_EPS = 1e-6  # of the low-rank norms, whatever rms_norm_eps says, as in transformers


@dataclass(frozen=True)
class LatentLayers:
    """Builds the layers: latent attention with the sizes of `LatentAttentionSpec`, then `mixture` or Llama's MLP.

    query_rank: of the query's low-rank projection; None for a whole one. scale: of the scores. bias: of the projections
    from and to the residual stream. block, out: names of attention and of its last linear; gate: that of its gate.
    """

    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool
    mixture: MoeLayers | None = None
    base: Callable[[ModelConfig, int], LayerSpec] = llama_layer
    block: str = "self_attn"
    out: str = "o_proj"
    gate: str | None = None

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        layer = replace(self.base(config, index), mixer=self._attention(config, index))
        return layer if self.mixture is None else self.mixture.replace_mlp(layer, config)

    def _attention(self, config: ModelConfig, index: int) -> LatentAttentionSpec:
        hidden, heads, layer = config.hidden_size, config.heads, f"model.layers.{index}"
        name, low, width = f"{layer}.{self.block}", self.query_rank, config.heads * (self.nope_dim + self.rope_dim)
        query = LinearSpec(f"{name}.q_proj", width, hidden)
        if low is not None:
            query = LinearSpec(f"{name}.q_a_proj", low, hidden, self.bias)
        return LatentAttentionSpec(
            heads,
            self.rank,
            self.nope_dim,
            self.rope_dim,
            self.value_dim,
            norm=config.norm_spec(f"{layer}.input_layernorm"),
            inputs=(query, LinearSpec(f"{name}.kv_a_proj_with_mqa", self.rank + self.rope_dim, hidden, self.bias)),
            kv_norm=NormSpec(f"{name}.kv_a_layernorm", self.rank, _NORM_EPS),
            kv_b=LinearSpec(f"{name}.kv_b_proj", heads * (self.nope_dim + self.value_dim), self.rank),
            o=LinearSpec(f"{name}.{self.out}", hidden, heads * self.value_dim, self.bias),
            rope=config.layer_rope(index),
            scale=self.scale,
            q_norm=None if low is None else NormSpec(f"{name}.q_a_layernorm", low, _NORM_EPS),
            q_b=None if low is None else LinearSpec(f"{name}.q_b_proj", width, low),
            gate=None if self.gate is None else LinearSpec(f"{name}.{self.gate}", heads, hidden),
            residual_scale=config.residual_scale,
        )


# Configs name as many key-value heads as query heads, which is what expanding gives. The cache has one.
def with_latent_head(raw: Fields) -> Fields:
    """Return `raw` with the fields that count heads of keys as latent attention has them: one, which rotates whole."""
    return Fields(
        {**raw.values, "head_dim": raw.integer("qk_rope_head_dim", high=_MOST), "num_key_value_heads": 1}, raw.source
    )


def read_latent(raw: Fields, **options: Any) -> LatentLayers:
    """Read the sizes of latent attention; `options`: further fields of `LatentLayers`."""
    nope, rope = raw.integer("qk_nope_head_dim", high=_MOST), raw.integer("qk_rope_head_dim", high=_MOST)
    return LatentLayers(
        query_rank=raw.integer("q_lora_rank", high=_MOST) if raw.has("q_lora_rank") else None,
        rank=raw.integer("kv_lora_rank", high=_MOST),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=raw.integer("v_head_dim", high=_MOST),
        scale=(nope + rope) ** -0.5 * _magnitude(raw) ** 2,
        bias=raw.boolean("attention_bias", False),
        **options,
    )


def _magnitude(raw: Fields) -> float:
    section = raw.object("rope_parameters" if raw.has("rope_parameters") else "rope_scaling")
    if section.text("rope_type", section.text("type", "default")) == "default" or not section.has("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(section.number("mscale_all_dim", low=0.0), section.number("factor", 1.0, low=1e-3, high=1e6))
