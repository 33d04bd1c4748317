"""How a config.json says that heads are turned: theta and scaling, in the words of transformers 5 and of before.

Knows `rope_parameters`, `rope_scaling`, `rope_theta`, and what may stand in them. The tables that follow are
`runtime.layers.rope`'s.
"""

import math
from collections.abc import Collection, Mapping

from mycli.runtime.models.part_spec import RopeKind, RopeScaling
from mycli.runtime.utils.json_fields import Fields

UNSUPPORTED_HINT = "this program would compute something else than the model; use transformers or vLLM for it"
ThetaAndScaling = tuple[float, RopeScaling]  # theta, and how its frequencies are stretched
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_SPECIAL = ("longrope", "proportional")  # of some families
_NEUTRAL: Mapping[str, tuple[float, ...]] = {"partial_rotary_factor": (1,), "llama_4_scaling_beta": (0,)}
_MAX_PAIRS = 1 << 15  # of a head


def trained_context(raw: Fields) -> int:
    """`max_position_embeddings`."""
    # Absent or absurd: the caller must then say how much context it wants, and memory bounds that.
    return raw.integer("max_position_embeddings", 2048, high=1 << 62)


def _section(raw: Fields) -> Fields:
    both = [key for key in ("rope_parameters", "rope_scaling") if raw.has(key)]
    if len(both) == 2 and raw.values[both[0]] != raw.values[both[1]]:
        raise raw.fail("rope_parameters", "and rope_scaling are both given and differ", "keep one of them")
    return raw.object(both[0] if both else "rope_scaling")


def _by_kind(section: Fields) -> bool:
    return any(isinstance(value, dict) for value in section.values.values())


def read_rope(raw: Fields, handled: Collection[str] = ()) -> ThetaAndScaling:
    """theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    `handled` names what the family does beyond the usual: `partial_rotary_factor`, `llama_4_scaling_beta`, the kinds
    `longrope` and `proportional`, and `rope_parameters` that differ by kind of layer, of which these are those of full
    attention. Raises ModelError for what is not done.
    """
    section = _section(raw)
    if not _by_kind(section):
        return _read(section, raw, handled)
    if "rope_parameters" not in handled:
        key = "rope_parameters" if raw.has("rope_parameters") else "rope_scaling"
        raise raw.fail(key, "differs by layer type, which is not supported", UNSUPPORTED_HINT)
    return _read(section.object("full_attention"), raw, handled)


def read_sliding_rope(raw: Fields, theta: float, handled: Collection[str] = ()) -> ThetaAndScaling:
    """theta and scaling of layers that slide, where they have their own; `theta` is the family's where none is given.

    In the words of before, what scales is for full attention only.
    """
    section = _section(raw)
    if not _by_kind(section):
        return theta, RopeScaling()
    own = section.object("sliding_attention")
    return _read(Fields({"rope_theta": theta, **own.values}, own.source), raw, handled)


def rotary_dim(raw: Fields, head_dim: int, factor: float = 1.0) -> int:
    """How many values of a head are turned, by `partial_rotary_factor`; `factor` where it is not given."""
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
    if "longrope" in handled and kind in ("su", "yarn"):
        kind = "longrope"  # as Phi-3's files called it
    if kind == "default":
        return theta, RopeScaling()
    kinds = (*_KINDS, *(each for each in _SPECIAL if each in handled))
    if kind not in kinds:
        raise section.fail("rope_type", f"{kind!r} is not supported", f"supported: {', '.join(kinds)}")
    return theta, _scaling(kind, section, raw)  # type: ignore[arg-type]  # narrowed by the test above


def _scaling(kind: RopeKind, scaling: Fields, raw: Fields) -> RopeScaling:
    trained = trained_context(raw)
    if kind == "proportional":
        share = scaling.number("partial_rotary_factor", 1.0, high=1.0)
        return RopeScaling(kind, scaling.number("factor", 1.0, low=1e-3, high=1e6), partial_factor=share)
    if kind == "longrope":
        return _longrope(scaling, raw)
    # Dynamic scaling measures against the context of the config itself, as transformers does.
    original = trained if kind == "dynamic" else scaling.integer("original_max_position_embeddings", trained)
    factor = scaling.number("factor", trained / original if kind == "yarn" else None, low=1e-3, high=1e6)
    if kind == "llama3":
        low = scaling.number("low_freq_factor", low=1e-3)
        high = scaling.number("high_freq_factor", low=1e-3)
        if high <= low:
            raise scaling.fail("high_freq_factor", f"{high:g} must be above low_freq_factor {low:g}")
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return RopeScaling(
            kind,
            factor,
            original,
            beta_fast=scaling.number("beta_fast", 32.0, low=1e-3),
            beta_slow=scaling.number("beta_slow", 1.0, low=1e-3),
            attention_factor=_yarn_attention(scaling, factor),
            truncate=scaling.boolean("truncate", True),
            query_beta=scaling.number("llama_4_scaling_beta", 0.0),
        )
    return RopeScaling(kind, factor, original)


def _longrope(scaling: Fields, raw: Fields) -> RopeScaling:
    """Two sets of factors, and the attention factor of arXiv 2402.13753. The config's own original context counts
    before that of the section."""
    source = raw if raw.has("original_max_position_embeddings") else scaling
    original = source.integer("original_max_position_embeddings", trained_context(raw), low=2)
    factor = scaling.number("factor", trained_context(raw) / original, low=1e-3, high=1e6)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=scaling.number("attention_factor", usual, low=1e-6),
        short_factors=_numbers(scaling, "short_factor"),
        long_factors=_numbers(scaling, "long_factor"),
    )


def _numbers(scaling: Fields, key: str) -> tuple[float, ...]:
    values = scaling.array(key, object, _MAX_PAIRS)
    return tuple(Fields({key: value}, scaling.source).number(key, low=1e-3, high=1e6) for value in values)


def _yarn_attention(scaling: Fields, factor: float) -> float:
    """The multiplier of cos and sin: given, or from mscale (DeepSeek), or 0.1 ln(factor) + 1 (arXiv 2309.00071)."""

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.has("attention_factor"):
        return scaling.number("attention_factor", low=1e-6)
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        return magnitude(scaling.number("mscale", low=1e-6)) / magnitude(scaling.number("mscale_all_dim", low=1e-6))
    return magnitude(1.0)
