"""Reads the rotary embedding of a config.json: rope_theta and RopeScaling, as transformers 5 and before write them.

`runtime.layers.rope` computes the frequencies.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from mycli.runtime.models.part_spec import RopeKind, RopeScaling, RopeSpec
from mycli.runtime.utils.json_fields import Fields

UNSUPPORTED_HINT = "the result would differ from the original model; run it with transformers or vLLM"
ThetaAndScaling = tuple[float, RopeScaling]
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_FAMILY_KINDS = ("longrope", "proportional")  # only where the family names them in `handled`
_NEUTRAL: Mapping[str, tuple[float, ...]] = {"partial_rotary_factor": (1,), "llama_4_scaling_beta": (0,)}
_MAX_PAIRS = 1 << 15  # per head; bounds what a config can make us allocate


def trained_context(raw: Fields) -> int:
    """Return `max_position_embeddings`."""
    # No upper bound: an absurd value only means that the caller must choose a context, which memory limits.
    return raw.integer("max_position_embeddings", 2048, high=1 << 62)


def scaled_context(raw: Fields, scaling: RopeScaling) -> int:
    """Return the longest context of a model with this scaling of full attention."""
    trained = trained_context(raw)
    if scaling.kind not in ("yarn", "dynamic"):
        return trained
    # Qwen's model cards add yarn to config.json and leave max_position_embeddings as it was, as vLLM expects. Dynamic
    # scaling changes nothing within max_position_embeddings, so its factor can only be meant for longer contexts.
    return max(trained, int(scaling.original_context * scaling.factor))


def has_rope(raw: Fields) -> bool:
    """Whether the config has a rope section, under its new or its old name."""
    return bool(_keys(raw))


def _keys(raw: Fields) -> list[str]:
    # An empty section counts as absent, as in transformers.
    return [key for key in ("rope_parameters", "rope_scaling") if raw.has(key) and raw.values[key] != {}]


def _section(raw: Fields) -> Fields:
    keys = _keys(raw)
    if len(keys) == 2 and raw.values[keys[0]] != raw.values[keys[1]]:
        raise raw.fail("rope_parameters", "and rope_scaling are both given and differ", "keep one")
    section, key = raw.object(keys[0] if keys else "rope_scaling"), "original_max_position_embeddings"
    if section.values and raw.has(key) and not _differs_by_layer_type(section):
        # At the top level, as in Phi 3's files, it counts before the section's.
        section = Fields({**section.values, key: raw.values[key]}, section.source)
    return section


def _differs_by_layer_type(section: Fields) -> bool:
    return any(isinstance(value, dict) for value in section.values.values())


def read_rope(raw: Fields, handled: Collection[str] = ()) -> ThetaAndScaling:
    """Read theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older).

    `handled`: what the family implements beyond the common kinds: the keys `partial_rotary_factor` and
    `llama_4_scaling_beta`, the kinds `longrope` and `proportional`, and `rope_parameters` per layer type, of which
    this returns those of full attention. Raises ModelError for anything else.
    """
    section = _section(raw)
    if not _differs_by_layer_type(section):
        return _read(section, raw, handled)
    if "rope_parameters" not in handled:
        key = "rope_parameters" if raw.has("rope_parameters") else "rope_scaling"
        raise raw.fail(key, "differs by layer type, which is not supported", UNSUPPORTED_HINT)
    return _read(section.object("full_attention"), raw, handled)


def read_sliding_rope(raw: Fields, theta: float, handled: Collection[str] = ()) -> ThetaAndScaling:
    """Read theta and scaling of the sliding-window layers; `theta` is the family's default."""
    section = _section(raw)
    if not _differs_by_layer_type(section):
        # Older configs scale full attention only. transformers ignores what else it finds there.
        if section.values and raw.has("rope_parameters"):
            raise raw.fail("rope_parameters", "has no sections full_attention and sliding_attention", UNSUPPORTED_HINT)
        if section.has("type") and not section.has("rope_type"):
            raise section.fail("type", "is not read for this family, only rope_type", UNSUPPORTED_HINT)
        return theta, RopeScaling()
    sliding = section.object("sliding_attention")
    return _read(Fields({"rope_theta": theta, **sliding.values}, sliding.source), raw, handled)


def layer_type_ropes(
    raw: Fields, head_dim: int, sliding: Sequence[bool], partial_factor: float = 1.0, handled: Collection[str] = ()
) -> tuple[RopeSpec, ...]:
    """Return the rotary embedding of each layer from `rope_parameters`, which may differ by layer type.

    partial_factor: the default of `partial_rotary_factor`, which may be in the section of a layer type.
    """
    section, handled = _section(raw), ("rope_parameters", "partial_rotary_factor", *handled)

    def rope(layer_type: str) -> RopeSpec:
        source = section.object(layer_type) if _differs_by_layer_type(section) else section
        theta, scaling = _read(source, raw, handled)
        if scaling.kind == "proportional":  # rotates a share of the frequencies of whole heads
            return RopeSpec(theta, head_dim, scaling)
        source = source if source.has("partial_rotary_factor") else raw
        factor = source.number("partial_rotary_factor", partial_factor, low=2 / head_dim, high=1.0)
        return RopeSpec(theta, int(head_dim * factor), scaling)

    ropes = {slides: rope("sliding_attention" if slides else "full_attention") for slides in set(sliding)}
    return tuple(ropes[slides] for slides in sliding)


def rotary_dim(raw: Fields, head_dim: int, factor: float = 1.0) -> int:
    """Return how many values of a head rotate: head_dim * `partial_rotary_factor`, which defaults to `factor`."""
    section = _section(raw)
    source = section if section.has("partial_rotary_factor") else raw
    return int(head_dim * source.number("partial_rotary_factor", factor, low=2 / head_dim, high=1.0))


def _read(section: Fields, raw: Fields, handled: Collection[str]) -> ThetaAndScaling:
    theta_source = section if section.has("rope_theta") else raw
    theta = theta_source.number("rope_theta", 10000.0, low=1e-6, high=1e12)
    for key in ("partial_rotary_factor", "llama_4_scaling_beta"):
        if key not in handled and section.has(key) and section.values[key] not in _NEUTRAL[key]:
            raise section.fail(key, f"= {section.values[key]!r:.40} is not supported", UNSUPPORTED_HINT)
    kind = section.text("rope_type", section.text("type", "default"))
    if "longrope" in handled and (kind == "su" or kind == "yarn" and section.has("short_factor")):
        kind = "longrope"  # older names in Phi-3's files
    if kind == "default":
        return theta, RopeScaling()
    kinds = (*_KINDS, *(name for name in _FAMILY_KINDS if name in handled))
    if kind not in kinds:
        raise section.fail("rope_type", f"{kind!r} is not supported", f"supported: {', '.join(kinds)}")
    if kind == "yarn" and theta == 1.0:
        raise theta_source.fail("rope_theta", "must not be 1 with yarn, which divides by its logarithm")
    return theta, _scaling(kind, section, raw)  # type: ignore[arg-type]  # narrowed by the test above


def _scaling(kind: RopeKind, section: Fields, raw: Fields) -> RopeScaling:
    trained = trained_context(raw)
    if kind == "proportional":
        partial = section.number("partial_rotary_factor", 1.0, high=1.0)
        return RopeScaling(kind, section.number("factor", 1.0, low=1e-3, high=1e6), partial_factor=partial)
    if kind == "longrope":
        return _longrope(section, raw)
    # Dynamic scaling starts at max_position_embeddings whatever the section says, as in transformers.
    original = trained if kind == "dynamic" else section.integer("original_max_position_embeddings", trained)
    factor = section.number("factor", trained / original if kind == "yarn" else None, low=1e-3, high=1e6)
    if kind == "llama3":
        low = section.number("low_freq_factor", low=1e-3)
        high = section.number("high_freq_factor", low=1e-3)
        if high < low:  # Llama 4 Scout has equal ones: no frequency lies between
            raise section.fail("high_freq_factor", f"{high:g} must not be below low_freq_factor {low:g}")
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return RopeScaling(
            kind,
            factor,
            original,
            beta_fast=section.number("beta_fast", 32.0, low=1e-3),
            beta_slow=section.number("beta_slow", 1.0, low=1e-3),
            attention_factor=_yarn_attention_factor(section, factor),
            truncate=section.boolean("truncate", True),
            query_beta=section.number("llama_4_scaling_beta", 0.0),
        )
    return RopeScaling(kind, factor, original)


def _longrope(section: Fields, raw: Fields) -> RopeScaling:
    original = section.integer("original_max_position_embeddings", trained_context(raw), low=2)
    factor = section.number("factor", trained_context(raw) / original, low=1e-3, high=1e6)
    # arXiv 2402.13753
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=_longrope_magnitude(section, section.number("attention_factor", attention_factor, low=1e-6)),
        short_factors=_numbers(section, "short_factor"),
        long_factors=_numbers(section, "long_factor"),
    )


def _longrope_magnitude(section: Fields, default: float) -> float:
    # PhiMoE gives the magnitude of each set of factors; its published models have one for both.
    short, long = (section.number(key, default, low=1e-6) for key in ("short_mscale", "long_mscale"))
    if short != long:
        raise section.fail("short_mscale", f"= {short:g} and long_mscale = {long:g} are not equal", UNSUPPORTED_HINT)
    return short


def _numbers(section: Fields, key: str) -> tuple[float, ...]:
    values = section.array(key, object, _MAX_PAIRS)
    return tuple(Fields({key: value}, section.source).number(key, low=1e-3, high=1e6) for value in values)


def yarn_magnitude(mscale: float, factor: float) -> float:
    """Return the factor by which queries and keys grow with that of the context (arXiv 2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(section: Fields, factor: float) -> float:
    """Return the multiplier of cos and sin: as given, from mscale (DeepSeek), or by arXiv 2309.00071."""
    if section.has("attention_factor"):
        return section.number("attention_factor", low=1e-6)
    mscale, mscale_all_dim = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    # A 0 counts as absent, as in transformers: Megatron writes mscale_all_dim = 0.
    if mscale and mscale_all_dim:
        return yarn_magnitude(mscale, factor) / yarn_magnitude(mscale_all_dim, factor)
    return yarn_magnitude(1.0, factor)
