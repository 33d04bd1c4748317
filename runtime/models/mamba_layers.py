"""Builds Mamba-1 and Mamba-2 mixers from the config keys of the families that have them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, NormSpec
from mycli.runtime.models.recurrent_spec import ConvolutionSpec, MambaSpec, SelectiveSpec
from mycli.runtime.utils.json_fields import Fields

_MOST = 1 << 16  # heads, or values of a head
_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


@dataclass(frozen=True)
class MambaLayers:
    """The sizes of Mamba-2 mixers, as in `MambaSpec`."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    taps: int
    bias: bool
    convolution_bias: bool
    step_limits: tuple[float, float]
    norm: str = "input_layernorm"  # of the layer

    def mixer(self, config: ModelConfig, index: int, name: str = "mamba") -> MambaSpec:
        """Return the mixer of a layer, whose tensors are called `model.layers.<index>.<name>`."""
        layer, hidden, inner = f"model.layers.{index}", config.hidden_size, self.heads * self.head_dim
        name, channels = f"{layer}.{name}", inner + 2 * self.groups * self.state_dim
        return MambaSpec(
            self.heads,
            self.groups,
            self.head_dim,
            self.state_dim,
            norm=config.norm_spec(f"{layer}.{self.norm}"),
            projection=LinearSpec(f"{name}.in_proj", inner + channels + self.heads, hidden, self.bias),
            convolution=ConvolutionSpec(f"{name}.conv1d", channels, self.taps, self.convolution_bias),
            decay=f"{name}.A_log",
            dt_bias=f"{name}.dt_bias",
            skip=f"{name}.D",
            gated_norm=NormSpec(f"{name}.norm", inner, config.rms_norm_eps),
            norm_groups=self.groups,
            out=LinearSpec(f"{name}.out_proj", hidden, inner, self.bias),
            step_limits=self.step_limits,
            residual_scale=config.residual_scale,
        )


def read_mamba(raw: Fields, inner: int | None = None) -> MambaLayers:
    """Read the keys `mamba_*` and `time_step_limit`. Raises ModelError for sizes that do not divide.

    inner: the width of all heads; None for `mamba_expand` times hidden_size.
    """
    heads, groups = raw.integer("mamba_n_heads", 128, high=_MOST), raw.integer("mamba_n_groups", 1, high=_MOST)
    inner = inner or raw.integer("mamba_expand", 2, high=64) * raw.integer("hidden_size")
    if heads % groups or inner % heads:
        raise raw.fail("mamba_n_heads", f"= {heads} must divide {inner}, and be a multiple of mamba_n_groups {groups}")
    head_dim = inner // heads
    # transformers refuses configs whose heads do not fill the expanded size; the projections would not fit.
    if raw.values.get("mamba_d_head", "auto") not in ("auto", head_dim):
        raise raw.fail("mamba_d_head", f"must be {head_dim}, or auto")
    return MambaLayers(
        heads,
        groups,
        head_dim,
        raw.integer("mamba_d_state", 256, high=_MOST),
        raw.integer("mamba_d_conv", 4, low=2, high=64),
        raw.boolean("mamba_proj_bias", False),
        raw.boolean("mamba_conv_bias", True),
        read_step_limits(raw),
    )


def read_plain_mamba(raw: Fields, head_key: str = "mamba_head_dim") -> MambaLayers:
    """Read the keys of Mamba-2 and Nemotron-H; `head_key` has the size of a head. Raises as `read_mamba`."""
    heads, groups = raw.integer("mamba_num_heads", 128, high=_MOST), raw.integer("n_groups", 8, high=_MOST)
    if heads % groups:
        raise raw.fail("n_groups", f"= {groups} must divide {heads} heads")
    return MambaLayers(
        heads,
        groups,
        raw.integer(head_key, 64, high=_MOST),
        raw.integer("ssm_state_size", 128, high=_MOST),
        raw.integer("conv_kernel", 4, low=2, high=64),
        raw.boolean("use_bias", False),
        raw.boolean("use_conv_bias", True),
        read_step_limits(raw),
        norm="norm",
    )


def read_step_limits(raw: Fields) -> tuple[float, float]:
    """Read `time_step_limit`, the smallest and the largest step; no limits where it is absent."""
    values = raw.array("time_step_limit", object, 2)
    if not values:
        return 0.0, float("inf")
    # JSON has no infinity: transformers writes an object in its place.
    low, high = (float("inf") if value == _INFINITY else value for value in values)
    numbers = Fields({"low": low, "high": None if high == float("inf") else high}, f"{raw.source}: time_step_limit")
    return numbers.number("low"), numbers.number("high", float("inf"))


_INFINITY = {"__float__": "Infinity"}


# A recurrent state has no longest context. transformers names none either; llama.cpp takes this one.
_CONTEXT = 1 << 20


def without_attention(
    raw: Fields, inner: int, build_layer: Callable[[ModelConfig, int], LayerSpec], **defaults: Any
) -> ModelConfig:
    """Return the config of a model of mixers alone. inner: the width of a mixer; defaults: the family's."""
    raw = hf_config.with_epsilon(raw, "layer_norm_epsilon")
    # `common` requires fields of attention and MLPs. The model has neither, so their values are never used.
    fields = hf_config.common(
        Fields(
            {
                "max_position_embeddings": _CONTEXT,
                **defaults,
                **{
                    key: value
                    for key, value in raw.values.items()
                    if key not in ("layer_types", "num_heads", "head_dim")
                },
                "num_attention_heads": 1,
                "head_dim": 64,
                "intermediate_size": inner,
            },
            raw.source,
        ),
        activations=hf_config.SILU,
    )
    return ModelConfig(
        **fields,
        layer_ropes=(None,) * fields["layers"],
        final_norm="model.norm_f",
        stored_prefixes=(
            ("backbone.embeddings.", "model.embed_tokens."),
            ("backbone.embedding.", "model.embed_tokens."),  # of older files, which transformers renames too
            ("backbone.", "model."),
        ),
        build_layer=build_layer,
    )


@dataclass(frozen=True)
class SelectiveLayers:
    """The sizes of Mamba-1 mixers, as in `SelectiveSpec`. rank: of the projection to steps.

    norms: names of the norms of dt, B and C within the mixer, None each for norms without a weight, or none at all; eps
    is theirs.
    """

    channels: int
    state_dim: int
    rank: int
    taps: int
    bias: bool
    convolution_bias: bool
    norms: tuple[str | None, ...] = ()
    eps: float = 1e-6
    norm: str = "norm"  # of the layer

    def mixer(self, config: ModelConfig, index: int, name: str) -> SelectiveSpec:
        """Return the mixer of a layer, whose tensors are called `model.layers.<index>.<name>`."""
        layer, hidden, channels = f"model.layers.{index}", config.hidden_size, self.channels
        name, widths = f"{layer}.{name}", (self.rank, self.state_dim, self.state_dim)
        return SelectiveSpec(
            self.state_dim,
            norm=config.norm_spec(f"{layer}.{self.norm}"),
            projection=LinearSpec(f"{name}.in_proj", 2 * channels, hidden, self.bias),
            convolution=ConvolutionSpec(f"{name}.conv1d", channels, self.taps, self.convolution_bias),
            select=LinearSpec(f"{name}.x_proj", sum(widths), channels),
            select_norms=tuple(
                NormSpec(norm and f"{name}.{norm}", width, self.eps)
                for norm, width in zip(self.norms, widths, strict=bool(self.norms))
            ),
            step=LinearSpec(f"{name}.dt_proj", channels, self.rank),
            decay=f"{name}.A_log",
            dt_bias=f"{name}.dt_proj.bias",
            skip=f"{name}.D",
            out=LinearSpec(f"{name}.out_proj", hidden, channels, self.bias),
            residual_scale=config.residual_scale,
        )


@dataclass(frozen=True)
class PlainSelectiveLayers:
    """Builds layers of a Mamba-1 mixer alone."""

    mamba: SelectiveLayers

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        return LayerSpec(index, self.mamba.mixer(config, index, "mixer"), None)


def read_plain_selective(raw: Fields, norms: tuple[None, ...] = ()) -> ModelConfig:
    """Read the config of Mamba and Falcon-Mamba; norms: of dt, B and C, as in `SelectiveLayers`."""
    # Falcon-Mamba 7B has an `expand` of 16 that its intermediate_size contradicts; transformers reads the latter.
    inner = raw.integer("intermediate_size", raw.integer("expand", 2, high=64) * raw.integer("hidden_size"))
    mamba = SelectiveLayers(
        inner,
        raw.integer("state_size", 16, high=_MOST),
        read_rank(raw, "time_step_rank"),
        raw.integer("conv_kernel", 4, low=2, high=64),
        raw.boolean("use_bias", False),
        raw.boolean("use_conv_bias", True),
        norms,
        raw.number("mixer_rms_eps", 1e-6, low=1e-30, high=1.0),
    )
    return without_attention(raw, inner, PlainSelectiveLayers(mamba), tie_word_embeddings=True)


def read_rank(raw: Fields, key: str) -> int:
    """Return the rank of the projection to steps: `key`, by default "auto", a sixteenth of hidden_size rounded up."""
    if raw.values.get(key, "auto") == "auto":
        return -(-raw.integer("hidden_size") // 16)
    return raw.integer(key, high=_MOST)


def recurrent_layers(raw: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers have a Mamba-2 mixer rather than attention, by `layer_types`; all where it is absent."""
    key = "layer_types" if raw.has("layer_types") else "layers_block_type"
    types = raw.array(key, str, MAX_LAYERS) or ["mamba"] * layers
    if len(types) != layers or set(types) - _KINDS.keys():
        raise raw.fail(key, f"must name {' or '.join(_KINDS)} for each of {layers} layers")
    return tuple(_KINDS[name] for name in types)
