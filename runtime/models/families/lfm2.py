"""LFM2, dense: gated short convolutions in most layers, attention with per-head norms of q and k in the others."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.models.recurrent_spec import ConvolutionSpec, ShortConvSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class Lfm2Layers:
    """Builds the layers: short convolutions where `convolves`, else attention; Llama's MLP with other names."""

    convolves: tuple[bool, ...]
    taps: int
    bias: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        base, layer, hidden = llama_layer(config, index), f"model.layers.{index}", config.hidden_size
        gate, up = base.dense_mlp.gate_up
        mlp = replace(
            base.dense_mlp,
            norm=config.norm_spec(f"{layer}.ffn_norm"),
            gate_up=(replace(gate, name=f"{layer}.feed_forward.w1"), replace(up, name=f"{layer}.feed_forward.w3")),
            down=replace(base.dense_mlp.down, name=f"{layer}.feed_forward.w2"),
        )
        norm, attention = config.norm_spec(f"{layer}.operator_norm"), f"{layer}.self_attn"
        if not self.convolves[index]:
            mixer = replace(
                base.attention,
                norm=norm,
                q_norm=config.norm_spec(f"{attention}.q_layernorm", config.head_dim),
                k_norm=config.norm_spec(f"{attention}.k_layernorm", config.head_dim),
                o=replace(base.attention.o, name=f"{attention}.out_proj"),
            )
            return replace(base, mixer=mixer, mlp=mlp)
        convolution = ShortConvSpec(
            norm,
            LinearSpec(f"{layer}.conv.in_proj", 3 * hidden, hidden, self.bias),
            ConvolutionSpec(f"{layer}.conv.conv", hidden, self.taps, self.bias),
            LinearSpec(f"{layer}.conv.out_proj", hidden, hidden, self.bias),
        )
        return replace(base, mixer=convolution, mlp=mlp)


def _intermediate_size(raw: Fields) -> int:
    # With block_auto_adjust_ff_dim: two thirds of the given size, times a factor, rounded up to a multiple.
    size = raw.integer("block_ff_dim" if raw.has("block_ff_dim") else "intermediate_size")
    if not raw.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor = raw.values.get("block_ffn_dim_multiplier", 1.0)
    if factor is not None:
        multiple = raw.integer("block_multiple_of", 256)
        size = int(raw.number("block_ffn_dim_multiplier", 1.0, low=1e-3, high=1e3) * size)
        size = multiple * -(-size // multiple)
    if size < 1:
        raise raw.fail("intermediate_size", "is too small: the MLP would have no columns")
    return size


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        hf_config.with_epsilon(raw, "norm_eps"),
        num_key_value_heads=8,
        rope_theta=1000000.0,
        max_position_embeddings=128000,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    tied = raw.boolean("tie_embedding", raw.boolean("tie_word_embeddings", True))
    fields = hf_config.common(Fields({**raw.values, "tie_word_embeddings": tied}, raw.source))
    attends = raw.array("full_attn_idxs", int, MAX_LAYERS) if raw.has("full_attn_idxs") else range(fields["layers"])
    convolves = hf_config.layers_of_type(raw, fields["layers"], lambda index: index not in attends, "conv")
    return ModelConfig(
        **{**fields, "intermediate_size": _intermediate_size(raw)},
        final_norm="model.embedding_norm",
        build_layer=Lfm2Layers(
            convolves, raw.integer("conv_L_cache", 3, low=2, high=64), raw.boolean("conv_bias", False)
        ),
    )
