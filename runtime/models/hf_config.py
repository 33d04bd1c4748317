"""What the families share: reading the common fields of config.json, and refusing by name what is not implemented.

Knows the keys that change the arithmetic of a decoder. Keys that only describe training or the writer's software are
ignored; a key that would change the result and is not implemented is an error, never a silent difference.
"""

import math
from typing import Any

from mycli.runtime.models.config import MAX_LAYERS, RopeKind, RopeScaling
from mycli.runtime.utils.dtypes import float_dtype
from mycli.runtime.utils.json_fields import Fields

UNSUPPORTED_HINT = "this program would compute something else than the model; use transformers or vLLM for it"
# Each would change what is computed. The value beside a key is the one that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "logit_scale": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "no_rope_layers": ([],),
    "alibi": (False,),
    "is_decoder": (True, False),
    "add_cross_attention": (False,),
    "parallel_attn": (False,),
    "attention_chunk_size": (),
}


def refuse_unsupported(raw: Fields) -> None:
    """Raise ModelError for the first key of `NEUTRAL` whose value is not neutral, and for an unknown activation."""
    for key, neutral in NEUTRAL.items():
        if raw.has(key) and raw.values[key] not in neutral:
            raise raw.fail(key, f"= {raw.values[key]!r:.60} is not supported", UNSUPPORTED_HINT)
    activation = raw.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise raw.fail("hidden_act", f"{activation!r} is not supported (silu is)", UNSUPPORTED_HINT)


def _context(raw: Fields) -> int:
    # Absent or absurd: the caller must then say how much context it wants, and memory bounds that.
    return raw.integer("max_position_embeddings", 2048, high=1 << 62)


def rope(raw: Fields) -> tuple[float, RopeScaling]:
    """theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    both = [key for key in ("rope_parameters", "rope_scaling") if raw.has(key)]
    if len(both) == 2 and raw.values[both[0]] != raw.values[both[1]]:
        raise raw.fail("rope_parameters", "and rope_scaling are both given and differ", "keep one of them")
    scaling = raw.object(both[0] if both else "rope_scaling")
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise raw.fail(both[0], "differs by layer type, which is not supported", UNSUPPORTED_HINT)
    theta_source = scaling if scaling.has("rope_theta") else raw
    theta = theta_source.number("rope_theta", 10000.0, low=1e-6, high=1e12)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        supported = "default, linear, dynamic, llama3, yarn"
        raise scaling.fail("rope_type", f"{kind!r} is not supported", f"supported: {supported}")
    return theta, _scaling(kind, scaling, raw)  # type: ignore[arg-type]  # narrowed by the test above


def _scaling(kind: RopeKind, scaling: Fields, raw: Fields) -> RopeScaling:
    trained = _context(raw)
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
        )
    return RopeScaling(kind, factor, original)


def _yarn_attention(scaling: Fields, factor: float) -> float:
    """The multiplier of cos and sin: given, or from mscale (DeepSeek), or 0.1 ln(factor) + 1 (arXiv 2309.00071)."""

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.has("attention_factor"):
        return scaling.number("attention_factor", low=1e-6)
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        return magnitude(scaling.number("mscale", low=1e-6)) / magnitude(scaling.number("mscale_all_dim", low=1e-6))
    return magnitude(1.0)


def token_ids(raw: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of `key`, one integer or a list of at most 100; each must be below `vocab_size`."""
    value = raw.values.get(key)
    ids = [] if value is None else raw.array(key, int, 100) if isinstance(value, list) else [raw.integer(key, low=0)]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise raw.fail(key, f"{token} is not below vocab_size {vocab_size}")
    return tuple(dict.fromkeys(ids))


def common(raw: Fields, head_dim: int | None = None) -> dict[str, Any]:
    """The ModelConfig fields that every family reads the same way; a family adds or replaces what is its own.

    `head_dim` is the family's where config.json gives none; None for hidden_size / num_attention_heads.
    """
    refuse_unsupported(raw)
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads", high=1 << 16)
    if head_dim is None:
        if not raw.has("head_dim") and hidden % heads:
            raise raw.fail("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = max(hidden // heads, 1)
    spelled = raw.text("dtype", raw.text("torch_dtype", "bfloat16"))
    dtype = float_dtype(spelled)
    if dtype is None:
        raise raw.fail("dtype", f"{spelled!r} is not supported", "supported: bfloat16, float16, float32")
    vocab = raw.integer("vocab_size")
    bos = token_ids(raw, "bos_token_id", vocab)
    theta, scaling = rope(raw)
    return {
        "model_type": raw.text("model_type"),
        "hidden_size": hidden,
        "layers": raw.integer("num_hidden_layers", high=MAX_LAYERS),
        "heads": heads,
        "kv_heads": raw.integer("num_key_value_heads", heads, high=1 << 16),
        "head_dim": raw.integer("head_dim", head_dim, high=1 << 16),
        "intermediate_size": raw.integer("intermediate_size"),
        "vocab_size": vocab,
        "max_context": _context(raw),
        "rms_norm_eps": raw.number("rms_norm_eps", 1e-6, low=1e-30, high=1.0),
        "rope_theta": theta,
        "rope": scaling,
        "tie_embeddings": raw.boolean("tie_word_embeddings", False),
        "dtype": dtype,
        "eos": token_ids(raw, "eos_token_id", vocab),
        "bos": bos[0] if bos else None,
    }


def layer_windows(raw: Fields, layers: int, window: int | None) -> tuple[int | None, ...]:
    """The sliding window of each layer from `layer_types`; the same for all where the key is absent."""
    kinds = raw.array("layer_types", str, MAX_LAYERS)
    if not kinds:
        return (window,) * layers if window else ()
    if len(kinds) != layers:
        raise raw.fail("layer_types", f"has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise raw.fail("layer_types", f"{kind!r:.40} is not supported", UNSUPPORTED_HINT)
        if kind == "sliding_attention" and window is None:
            raise raw.fail("layer_types", "asks for sliding_attention without sliding_window")
    if "sliding_attention" not in kinds:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def sliding_windows(raw: Fields, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """`layer_windows` by `sliding_window`, if there is one: a window as long as the context is none."""
    window = raw.integer("sliding_window") if raw.has("sliding_window") else None
    if window is not None and window >= fields["max_context"]:
        window = None
    return layer_windows(raw, fields["layers"], window)
