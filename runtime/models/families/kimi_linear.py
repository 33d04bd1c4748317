"""Kimi Linear (48B-A3B): Kimi Delta Attention in most layers, latent attention without rotation in the others."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.experts import (
    EXPERT_KEYS,
    ExpertNames,
    MoeLayers,
    read_dense_layers,
    read_expert_counts,
    read_routing,
)
from mycli.runtime.models.families import glm4_moe
from mycli.runtime.models.latent_layers import LatentLayers, read_latent, with_latent_head
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, NormSpec
from mycli.runtime.models.recurrent_spec import ConvolutionSpec, KimiDeltaSpec
from mycli.runtime.utils.json_fields import Fields

# Names in files -> names of DeepSeek-V3.
_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_NAMES = ExpertNames(
    "block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    shared="shared_experts",
    shared_gate=None,
    shared_linears=("gate_proj", "up_proj", "down_proj"),
    correction_bias="gate.e_score_correction_bias",
)


@dataclass(frozen=True)
class KimiLayers:
    """Builds the layers. low_rank: decays and gates are projected through `head_dim` values; others as in the specs."""

    recurrent: tuple[bool, ...]
    heads: int
    head_dim: int
    taps: int
    latent: LatentLayers
    low_rank: bool = True
    floor: float = 0.0

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        layer = self.latent(config, index)
        return replace(layer, mixer=self._delta(config, index)) if self.recurrent[index] else layer

    def _delta(self, config: ModelConfig, index: int) -> KimiDeltaSpec:
        hidden, heads, size = config.hidden_size, self.heads, self.head_dim
        width, layer = heads * size, f"model.layers.{index}"
        name = f"{layer}.{self.latent.block}"
        qkv = tuple(LinearSpec(f"{name}.{part}_proj", width, hidden) for part in "qkv")
        beta = LinearSpec(f"{name}.b_proj", heads, hidden)
        whole = tuple(LinearSpec(f"{name}.{part}_proj", width, hidden) for part in "gf")
        low = tuple(LinearSpec(f"{name}.{part}_a_proj", size, hidden) for part in "fg")
        decay_b, gate_b = (LinearSpec(f"{name}.{part}_b_proj", width, size) for part in "fg")
        return KimiDeltaSpec(
            heads,
            size,
            norm=config.norm_spec(f"{layer}.input_layernorm"),
            projections=qkv if self.low_rank else (*qkv, *whole),
            gates=(beta, *low) if self.low_rank else (beta,),
            convolution=ConvolutionSpec(
                f"{name}.conv1d", 3 * width, self.taps, parts=tuple((f"{name}.{part}_conv1d", width) for part in "qkv")
            ),
            decay=(f"{name}.A_log", (1, 1, heads, 1) if self.low_rank else (heads,)),
            dt_bias=f"{name}.dt_bias",
            head_norm=NormSpec(f"{name}.o_norm", size, config.rms_norm_eps),
            out=LinearSpec(f"{name}.{self.latent.out}", hidden, width),
            decay_b=decay_b if self.low_rank else None,
            gate_b=gate_b if self.low_rank else None,
            floor=self.floor,
        )


def with_deepseek_keys(raw: Fields) -> Fields:
    """Return `raw` with its keys named as in DeepSeek-V3."""
    return hf_config.renamed(raw, _KEYS)


def read_mixture(raw: Fields, layers: int, names: ExpertNames, first_dense: int) -> MoeLayers:
    """Read experts as DeepSeek-V3 has them; first_dense: the default number of first layers that keep their MLP."""
    count, top_k = read_expert_counts(raw, "n_routed_experts", layers, default=(256, 8))
    size = raw.integer("moe_intermediate_size")
    return MoeLayers(
        count,
        read_routing(raw, count, top_k),
        size,
        names,
        dense=read_dense_layers(raw, layers, first_dense),
        shared=size * raw.integer("n_shared_experts", 1, low=0, high=count),
        base=glm4_moe.layer,
    )


def _recurrent_layers(raw: Fields, section: Fields, layers: int) -> tuple[bool, ...]:
    if raw.has("layer_types") or not section.has("full_attn_layers"):
        return hf_config.layers_of_type(raw, layers, lambda index: not index or index % 4 != 0, "linear_attention")
    full = set(section.array("full_attn_layers", int, MAX_LAYERS))
    if not full <= set(range(1, layers + 1)):
        raise section.fail("full_attn_layers", f"numbers a layer outside of 1 to {layers}")
    return tuple(index + 1 not in full for index in range(layers))


def _stored_prefixes(dense: frozenset[int]) -> tuple[tuple[str, str], ...]:
    # Published files name a dense MLP as Llama does; transformers writes it under the name of mixtures.
    plain: Mapping[int, str] = {index: f"model.layers.{index}.mlp." for index in sorted(dense)}
    written = ((f"model.layers.{index}.{_NAMES.block}.", name) for index, name in plain.items())
    return (*((name, name) for name in plain.values()), *written)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        with_deepseek_keys(raw),
        moe_intermediate_size=1024,
        routed_scaling_factor=2.446,
        max_position_embeddings=1048576,
        rms_norm_eps=1e-5,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    hf_config.require(raw, moe_router_activation_func="sigmoid", moe_layer_freq=1, mla_use_nope=True)
    hf_config.require(raw, tie_word_embeddings=False)  # transformers does not tie them
    section = raw.object("linear_attn_config")
    raw = with_latent_head(raw)
    fields = hf_config.common(raw, handled=EXPERT_KEYS, activations=hf_config.SILU)
    layers = fields["layers"]
    mixture = read_mixture(raw, layers, _NAMES, first_dense=1)
    return ModelConfig(
        **fields,
        layer_ropes=(None,) * layers,
        stored_prefixes=_stored_prefixes(mixture.dense),
        build_layer=KimiLayers(
            _recurrent_layers(raw, section, layers),
            section.integer("num_heads", raw.integer("linear_num_heads", 32), high=1 << 16),
            section.integer("head_dim", raw.integer("linear_head_dim", 128), high=1 << 10),
            section.integer("short_conv_kernel_size", raw.integer("linear_conv_kernel_dim", 4), low=2, high=64),
            read_latent(raw, mixture=mixture, base=glm4_moe.layer),
        ),
    )
